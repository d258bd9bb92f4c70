"""The Redis Streams sink: keeps the contract of `relay.sink` (DESIGN.md 2.2 to 2.4, PROTOCOLS.md 21)."""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from hiredis import ReplyError
from pydantic import BaseModel  # noqa: TC002 - the registry reads this annotation's value

from relay.errors import InvalidConfig, PermissionMissing, SinkUnavailable
from relay.sink import Outcome, unavailable
from relay.sinks.redis.attempt import Attempt
from relay.sinks.redis.connection import Connection, ConnectionLost, Refused, Unreachable, connect
from relay.sinks.redis.encoding import command
from relay.sinks.redis.errors import judge
from relay.sinks.redis.options import RedisOptions
from relay.sinks.redis.pace import Pace
from relay.sinks.redis.pool import Pool
from relay.sinks.redis.request import Request, build

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from relay.types import Message

__all__ = ["RedisSink"]

_log = logging.getLogger(__name__)

_PROBE = command("XADD", "outbox-relay:probe", "NOMKSTREAM", "*", "probe", "1")
"""Adds nothing, since the stream does not exist and is not made, but passes every check that a write does."""

_UNWELCOME = unavailable("the server ends the connection when it is sent: too large for its proto-max-bulk-len?")
_UNKNOWN = unavailable("nothing known", sink_down=True)


class RedisSink:
    """One Redis or Valkey server. Streams are destinations; the order of a stream is that of its entries."""

    Options: ClassVar[type[BaseModel]] = RedisOptions

    def __init__(self, name: str, options: RedisOptions) -> None:
        self.name = name
        self._options = options
        self._address = options.address
        self._tls: ssl.SSLContext | None = None
        self._pool = Pool(self._connect, options.concurrency)
        self._permits = asyncio.Semaphore(options.concurrency)
        self._pace = Pace(options.publish_timeout_seconds)
        self._closed = False
        self._deadlines: set[asyncio.Timeout] = set()

    @property
    def concurrency(self) -> int:
        """How many batches may be in flight, each on a connection of its own."""
        return self._options.concurrency

    async def open(self) -> None:
        """Load the certificates. Does not connect. Raises InvalidConfig."""
        if self._address.tls:
            self._tls = self._tls_context()

    async def ping(self) -> None:
        """PING, and a write that writes nothing: a replica, a full memory or a failing disk say so.

        Raises SinkUnavailable, or PermissionMissing for a password or an ACL.
        """
        try:
            async with self._deadline(), self._pool.connection() as connection:
                replies = await connection.exchange(command("PING") + _PROBE, 2)
        except TimeoutError:
            raise SinkUnavailable(f"sinks.{self.name}: {self._address}: no answer in time") from None
        except Unreachable as error:
            raise SinkUnavailable(f"sinks.{self.name}: {error}") from None
        except Refused as error:
            self._raise(error.verdict.outcome)
        for reply in replies:
            self._raise_if_down(reply)

    async def advice(self) -> list[str]:
        """What `relay check` should tell an operator about a server that works: settings that lose events.

        Empty if there is nothing, or if the server cannot be asked.
        """
        try:
            async with self._deadline(), self._pool.connection() as connection:
                [memory] = await connection.exchange(command("INFO", "memory"), 1)
        except (TimeoutError, Unreachable, Refused):
            return []
        return _advice(memory)

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        """Add each message to its stream; see `relay.sink.Sink.publish`.

        An unknown outcome (deadline, cut) may have been delivered: its repeat carries the same `id`.
        """
        attempt = Attempt(batch)
        rest = _UNKNOWN
        try:
            async with self._deadline() as deadline, self._permits:
                await self._send(attempt, deadline)
        except TimeoutError:
            self._pace.timed_out()
            seconds = self._options.publish_timeout_seconds
            rest = unavailable(f"{self._address}: no answer within {seconds:g} s: unknown", sink_down=True)
        except Unreachable as error:
            rest = unavailable(str(error), sink_down=True)
        except Refused as error:
            outcome = error.verdict.outcome
            rest = unavailable(
                f"{self._address}: {outcome.reason}", sink_down=True, misconfigured=outcome.misconfigured
            )
        except Exception as error:  # noqa: BLE001 - a bug of ours: the events wait for its fix, visibly, and none is lost
            _log.exception("sink %s: publish failed", self.name)
            rest = unavailable(f"internal error: {type(error).__name__}", sink_down=True)
        return attempt.outcomes(rest)

    async def close(self) -> None:
        """End every connection; a `publish` in flight returns "unknown" at once."""
        self._closed = True
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            with suppress(RuntimeError):  # it has just passed by itself
                deadline.reschedule(now)
        await self._pool.close()

    async def _connect(self) -> Connection:
        return await connect(self._address, self._options, self._tls)

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[asyncio.Timeout]:
        """How long the server may be silent in one call; `close` makes it end now."""
        async with asyncio.timeout(self._options.publish_timeout_seconds) as deadline:
            self._deadlines.add(deadline)
            try:
                yield deadline
            finally:
                self._deadlines.discard(deadline)

    async def _send(self, attempt: Attempt, deadline: asyncio.Timeout) -> None:
        """Rounds until nothing is left to send, on a new connection after one that ended or should."""
        suspect: int | None = None
        while suspect is not None or attempt.pending():
            async with self._pool.connection() as connection:
                if suspect is not None:  # the server is there, so the message is to blame for the last connection
                    attempt.record(suspect, _UNWELCOME)
                suspect = await self._rounds(connection, attempt, deadline)

    async def _rounds(self, connection: Connection, attempt: Attempt, deadline: asyncio.Timeout) -> int | None:
        """Send as long as the connection lasts; the message that it may have ended for, if there is one."""
        while connection.is_usable and (pending := attempt.pending()):
            request = self._request(connection, attempt, pending)
            if not request.groups:  # all of them were rejected
                continue
            try:
                replies = await self._exchange(connection, request, deadline)
            except BaseException as error:
                attempt.read(request.groups, connection.replies)
                if isinstance(error, ConnectionLost) and request.large_message is not None:
                    return request.large_message
                raise
            if attempt.read(request.groups, replies):
                connection.abort()
        return None

    def _request(self, connection: Connection, attempt: Attempt, pending: Sequence[int]) -> Request:
        return build(
            attempt,
            pending,
            maxlen=self._options.maxlen,
            value_bytes_max=min(self._options.payload_bytes_max, connection.bulk_max),
            round_bytes=self._pace.round_bytes,
        )

    async def _exchange(self, connection: Connection, request: Request, deadline: asyncio.Timeout) -> list[Any]:
        """One round trip. An answer is progress, and gives the rest of the batch the whole time again."""
        now = asyncio.get_running_loop().time
        started = now()
        replies = await connection.exchange(request.data, request.replies)
        answered = now()
        self._pace.answered(len(request.data), answered - started)
        if not self._closed:
            deadline.reschedule(answered + self._options.publish_timeout_seconds)
        return replies

    def _tls_context(self) -> ssl.SSLContext:
        file = self._options.tls_ca_file
        try:
            return ssl.create_default_context(cafile=file)
        except OSError as error:  # SSLError is one
            raise InvalidConfig(
                f"sinks.{self.name}.tls_ca_file: {file} cannot be read: {error.strerror}",
                hint="Name a readable file of PEM certificates.",
            ) from None

    def _raise_if_down(self, reply: Any) -> None:
        """For the probe: its own key may be outside of what an ACL allows, which says nothing about the streams."""
        if isinstance(reply, ReplyError) and (outcome := judge(str(reply)).outcome).sink_down:
            self._raise(outcome)

    def _raise(self, outcome: Outcome) -> NoReturn:
        text = f"sinks.{self.name}: {self._address}: {outcome.reason}"
        if outcome.misconfigured:
            raise PermissionMissing(
                text,
                hint=f"Check the user and password of sinks.{self.name}, and that its ACL allows "
                "+xadd +multi +exec +ping and the streams' names (+client|kill +client|info +config|get help).",
            ) from None
        raise SinkUnavailable(text) from None


def _advice(memory: Any) -> list[str]:
    """From INFO memory (E5): an evicting policy deletes whole streams with the events that nobody has read."""
    if not isinstance(memory, bytes):
        return []
    info = dict(line.split(":", 1) for line in memory.decode(errors="replace").split("\r\n") if ":" in line)
    policy = info.get("maxmemory_policy", "noeviction")
    if policy.startswith("allkeys"):
        return [f"maxmemory-policy is {policy}: Redis may evict whole streams with unread events; set noeviction"]
    return []
