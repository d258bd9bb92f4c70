"""The brokers: one connection to each, requests over it, and who of them is alive.

Owns all sockets of the sink. Nothing here retries: a request has an answer or raises `Lost`, and what that
means for the order of a key is decided by `delivery`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from relay.sink import Outcome, unavailable
from relay.sinks.kafka import wire
from relay.sinks.kafka.answers import Step, after_connection_failure, after_produce, no_producer_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence

    from relay.sinks.kafka.topics import Partition, Topics

__all__ = ["Cluster", "Lost", "Node", "Settings", "Unreachable"]

_REQUEST_BYTES: Final = 64 * 1024 * 1024  # of one produce request at most; a broker's limit is 100 MiB
_CLOSE_SECONDS: Final = 1.0

_PRODUCER_ID_PAUSES: Final = (0.02, 0.05, 0.1, 0.2, 0.4, 0.4, 0.4)

_CLOSED: Final = unavailable("the sink is closed", sink_down=True)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """What all connections of a sink share; times in seconds."""

    bootstrap_servers: tuple[str, ...]
    client_id: str
    request_timeout: float
    linger: float
    security: wire.Security


class Lost(Exception):
    """There was no answer; whether the request was carried out is unknown. `cause` is why."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Unreachable(Exception):
    """No broker can be spoken to. `outcome` is what that means for messages.

    `cut`: the last one took the connection and dropped it, which may be over in a moment.
    """

    def __init__(self, outcome: Outcome, *, cut: bool = False) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome
        self.cut = cut


@dataclass(slots=True, eq=False)
class _Entry:
    """A record batch that waits to be written, then for its answer."""

    partition: Partition
    data: bytearray
    future: asyncio.Future[wire.Answer | Lost]
    connection: wire.Connection | None = None


class Node:
    """One broker and the connection to it."""

    def __init__(self, address: wire.Address, settings: Settings) -> None:
        self.address = address
        self.alive = False
        """Whether its last word was an answer, and not a refusal or silence."""
        self._settings = settings
        self._connection: wire.Connection | None = None
        self._connecting: asyncio.Task[wire.Connection] | None = None
        self._waiting: list[_Entry] = []
        self._requests: set[asyncio.Task[None]] = set()
        self._flush_timer: asyncio.Handle | None = None

    async def request(self, send: Callable[[wire.Connection], Awaitable[T]]) -> T:
        """One request over the connection, which is made if there is none. Raises Lost."""
        connection = None
        try:
            connection = await self._connect()
            answer = await send(connection)
        except wire.FAILURES as error:
            # Whatever is wrong with it, an answer to this request could still come and be taken for another's.
            self.abort(connection)
            self.alive = False
            raise Lost(error) from error
        self.alive = True
        return answer

    async def produce(self, partition: Partition, data: bytearray) -> wire.Answer:
        """Send a record batch, together with what else is to be sent now. Raises Lost.

        When it is cancelled, no byte of the batch is sent any more: the connection is dropped with what is
        still in its buffers. Other batches that were on it are Lost too.
        """
        loop = asyncio.get_running_loop()
        entry = _Entry(partition, data, loop.create_future())
        self._waiting.append(entry)
        if self._flush_timer is None:
            # After the batches that other coroutines hand over in this turn of the loop: one request for all.
            linger = self._settings.linger
            self._flush_timer = loop.call_later(linger, self._flush) if linger else loop.call_soon(self._flush)
        try:
            answer = await entry.future
        except asyncio.CancelledError:
            if entry.connection is not None:
                self.abort(entry.connection)
            raise
        if isinstance(answer, Lost):
            raise answer
        return answer

    def abort(self, connection: wire.Connection | None) -> None:
        """Drop a connection and what was not sent yet."""
        if connection is not None:
            wire.abort(connection)
            if self._connection is connection:
                self._connection = None

    async def close(self) -> None:
        """Drop everything; bounded in time."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        _settle(self._waiting, _closed)
        await _cancel([*self._requests, *([self._connecting] if self._connecting else [])])
        connection, self._connection = self._connection, None
        if connection is not None:
            await wire.close(connection, _CLOSE_SECONDS)

    def _flush(self) -> None:
        self._flush_timer = None
        waiting, self._waiting = self._waiting, []
        for entries in _requests(waiting):
            task = asyncio.get_running_loop().create_task(self._produce(entries), name="kafka produce")
            self._requests.add(task)
            task.add_done_callback(partial(self._request_is_over, entries))

    def _request_is_over(self, entries: list[_Entry], task: asyncio.Task[None]) -> None:
        self._requests.discard(task)
        _settle(entries, _closed)  # of a task that was cancelled, perhaps before its first step

    async def _produce(self, entries: list[_Entry]) -> None:
        timeout = self._settings.request_timeout * 0.8  # the broker's own answer to slow replicas comes before ours

        def send(connection: wire.Connection) -> Awaitable[dict[tuple[str, int], wire.Answer]]:
            # Those whose publish was cancelled while the connection was made are not sent at all.
            entries[:] = [entry for entry in entries if not entry.future.done()]
            for entry in entries:
                entry.connection = connection
            batches = [(entry.partition.topic.name, entry.partition.number, entry.data) for entry in entries]
            return wire.produce(connection, batches, timeout) if batches else _nothing()

        try:
            answers = await self.request(send)
        except Lost as error:
            lost = error  # the name of an except clause ends with it
            _settle(entries, lambda _: lost)
        else:
            missing = Lost(ConnectionError("the broker's answer does not mention the partition"))
            _settle(entries, lambda entry: answers.get((entry.partition.topic.name, entry.partition.number), missing))

    async def _connect(self) -> wire.Connection:
        if self._connection is not None:
            if wire.is_open(self._connection):
                return self._connection
            self.abort(self._connection)
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._open(), name="kafka connect")
            self._connecting.add_done_callback(_retrieve)
        return await _join(self._connecting, ConnectionAbortedError("the connection was given up"))

    async def _open(self) -> wire.Connection:
        try:
            self._connection = await _connect(self.address, self._settings)
            return self._connection
        finally:
            self._connecting = None


class Cluster:
    """All brokers of a sink, found through its bootstrap servers."""

    def __init__(self, settings: Settings, topics: Topics) -> None:
        self._settings = settings
        self._topics = topics
        self._nodes: dict[int, Node] = {}
        self._closed = False
        self._cluster_id: str | None = None
        self._producer_id: int | None = None
        self._shared: dict[object, asyncio.Task[None]] = {}
        self._retired: set[asyncio.Task[None]] = set()

    def node(self, broker: int) -> Node | None:
        """The broker with this number, if the cluster has announced it."""
        return self._nodes.get(broker)

    def is_down(self) -> bool:
        """Whether no broker has answered its last request."""
        return not any(node.alive for node in self._nodes.values())

    async def look_up(self, topics: Iterable[str]) -> None:
        """Ask for brokers and topics, and take the answer over. Raises Unreachable."""
        names = tuple(sorted(topics))
        await self._share(names, lambda: self._look_up(names))

    async def producer_id(self, used_up: int | None = None) -> int:
        """A producer id, the same for all partitions until one finds it `used_up`. Raises Unreachable."""
        while self._producer_id is None or self._producer_id == used_up:
            await self._share("producer id", self._new_producer_id)
        return self._producer_id

    async def close(self) -> None:
        """Close all connections at once; bounded in time."""
        self._closed = True
        nodes, self._nodes = list(self._nodes.values()), {}
        await _cancel([*self._shared.values()])
        await asyncio.gather(*(node.close() for node in nodes), *self._retired, return_exceptions=True)

    async def _share(self, what: object, start: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do something once for all who want it now."""
        if self._closed:
            raise Unreachable(_CLOSED)
        if (task := self._shared.get(what)) is None:
            task = self._shared[what] = asyncio.get_running_loop().create_task(start(), name="kafka look-up")
            task.add_done_callback(_retrieve)
            task.add_done_callback(lambda _: self._shared.pop(what, None))
        await _join(task, Unreachable(_CLOSED))

    async def _look_up(self, names: Sequence[str]) -> None:
        metadata = await self._anywhere(lambda connection: wire.fetch_metadata(connection, names))
        if metadata.cluster_id != self._cluster_id:
            if self._cluster_id is not None:
                # Another cluster under the same addresses: it may give our producer id to somebody else.
                self._producer_id = None
                self._topics.forget_producer()
            self._cluster_id = metadata.cluster_id
        self._take_over(metadata.brokers)
        self._topics.update(metadata.topics)

    async def _new_producer_id(self) -> None:
        for pause in _PRODUCER_ID_PAUSES:
            code, producer_id = await self._anywhere(wire.fetch_producer_id)
            if code == 0:
                self._producer_id = producer_id
                return
            if after_produce(code, resent=False).step is not Step.RETRY:
                break
            # A broker that has just started answers COORDINATOR_LOAD_IN_PROGRESS until it has ids to give.
            await asyncio.sleep(pause)
        raise Unreachable(no_producer_id(code))

    async def _anywhere(self, send: Callable[[wire.Connection], Awaitable[T]]) -> T:
        """One request to whichever broker answers: first those that answered last, at the end a bootstrap server."""
        failure: BaseException = ConnectionError("there is no broker")
        for node in sorted(self._nodes.values(), key=lambda node: not node.alive):
            try:
                return await node.request(send)
            except Lost as lost:
                failure = lost.cause
        for address in wire.addresses(self._settings.bootstrap_servers):
            connection = None
            try:
                connection = await _connect(address, self._settings)
                return await send(connection)
            except wire.FAILURES as error:
                failure = error
            finally:
                if connection is not None:
                    await wire.close(connection, _CLOSE_SECONDS)
        raise Unreachable(after_connection_failure(failure), cut=isinstance(failure, wire.CUTS))

    def _take_over(self, brokers: Sequence[wire.Broker]) -> None:
        if not brokers:
            return
        known = self._nodes
        self._nodes = {}
        for broker in brokers:
            node = known.get(broker.id)
            if node is None or node.address != broker.address:
                node = Node(broker.address, self._settings)
            else:
                del known[broker.id]
            self._nodes[broker.id] = node
        for node in known.values():
            task = asyncio.get_running_loop().create_task(node.close(), name="kafka close")
            self._retired.add(task)
            task.add_done_callback(self._retired.discard)


async def _connect(address: wire.Address, settings: Settings) -> wire.Connection:
    return await wire.connect(
        address, client_id=settings.client_id, timeout_seconds=settings.request_timeout, security=settings.security
    )


def _requests(entries: list[_Entry]) -> Iterable[list[_Entry]]:
    """Parts of a queue that each fit one request."""
    part: list[_Entry] = []
    size = 0
    for entry in entries:
        if part and size + len(entry.data) > _REQUEST_BYTES:
            yield part
            part, size = [], 0
        part.append(entry)
        size += len(entry.data)
    if part:
        yield part


def _settle(entries: Iterable[_Entry], answer: Callable[[_Entry], Any]) -> None:
    for entry in entries:
        if not entry.future.done():
            entry.future.set_result(answer(entry))


def _closed(_: _Entry) -> Lost:
    return Lost(ConnectionAbortedError("the connection was given up"))


async def _nothing() -> dict[tuple[str, int], wire.Answer]:
    return {}


async def _join(task: asyncio.Task[T], if_cancelled: Exception) -> T:
    """The result of a task that several wait for; whoever is cancelled leaves it to the others."""
    await asyncio.wait([task])
    if task.cancelled():
        raise if_cancelled
    return task.result()


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Look at a task's failure, so that nobody is warned when all who waited for it were cancelled."""
    if not task.cancelled():
        task.exception()
