"""Exchanges, queues and consumers that know nothing of the sink: plain aio-pika beside it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import aio_pika

from relay.sink import Outcome, Status
from relay.sinks.rabbitmq import RabbitMQOptions, RabbitMQSink

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

    from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractIncomingMessage, AbstractQueue

    from relay.types import Message

__all__ = [
    "EXCHANGE",
    "Collector",
    "Topology",
    "collector_of",
    "ids",
    "new_sink",
    "open_sink",
    "publish_until_confirmed",
    "repeating",
    "statuses",
    "topology_of",
]

EXCHANGE = "events"
_RECOVERY_SECONDS_MAX = 30.0


class Topology:
    """A direct exchange and queues in one vhost."""

    def __init__(self, channel: AbstractChannel, exchange: AbstractExchange) -> None:
        self.channel = channel
        self.exchange = exchange

    async def queue(self, name: str, *routing_keys: str, arguments: dict[str, Any] | None = None) -> AbstractQueue:
        """A durable queue, bound for the routing keys (default: its name)."""
        queue = await self.channel.declare_queue(name, durable=True, arguments=arguments)
        for routing_key in routing_keys or (name,):
            await queue.bind(self.exchange, routing_key=routing_key)
        return queue

    async def drain(self, queue: AbstractQueue) -> list[AbstractIncomingMessage]:
        """Everything that is in the queue now, taken out of it."""
        messages = []
        while (message := await queue.get(no_ack=True, fail=False)) is not None:
            messages.append(message)
        return messages


@asynccontextmanager
async def topology_of(url: str, *, exchange: str = EXCHANGE) -> AsyncIterator[Topology]:
    """Connect to a vhost and make the exchange there."""
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        yield Topology(channel, await channel.declare_exchange(exchange, durable=True))


class Collector:
    """Event ids in the order in which an independent consumer gets them."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._progress = asyncio.Condition()

    async def take(self, message: AbstractIncomingMessage) -> None:
        """Consume one message."""
        self.ids.append(message.message_id or "")
        await message.ack()
        async with self._progress:
            self._progress.notify_all()

    async def assert_complete_and_in_order(self, batch: Sequence[Message]) -> None:
        """Each message arrives, and the first deliveries of each key come in the batch's order."""
        async with asyncio.timeout(_RECOVERY_SECONDS_MAX), self._progress:
            await self._progress.wait_for(lambda: {message.id for message in batch} <= set(self.ids))
        key_of = {message.id: message.key for message in batch}
        first = list(dict.fromkeys(self.ids))
        for key in set(key_of.values()):
            assert [event for event in first if key_of[event] == key] == [m.id for m in batch if m.key == key]


@asynccontextmanager
async def collector_of(url: str, queue_name: str, *, prefetch_count: int = 100) -> AsyncIterator[Collector]:
    """A consumer of one queue, with a connection of its own."""
    collector = Collector()
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=prefetch_count)
        await (await channel.get_queue(queue_name)).consume(collector.take)
        yield collector


@asynccontextmanager
async def repeating(fault: Callable[[], Awaitable[Any]]) -> AsyncIterator[None]:
    """Do something to the broker over and over, meanwhile."""

    async def repeat() -> None:
        while True:
            await fault()

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def new_sink(url: str, **options: Any) -> RabbitMQSink:
    """A sink with a short patience, because tests wait for it."""
    return RabbitMQSink(
        "rabbit",
        RabbitMQOptions.model_validate({"exchange": EXCHANGE, "publish_timeout_seconds": 2.0, "url": url, **options}),
    )


@asynccontextmanager
async def open_sink(url: str, **options: Any) -> AsyncIterator[RabbitMQSink]:
    """An open sink, closed afterwards."""
    sink = new_sink(url, **options)
    await sink.open()
    try:
        yield sink
    finally:
        await sink.close()


def statuses(outcomes: Iterable[Outcome]) -> list[Status]:
    """The bare statuses."""
    return [outcome.status for outcome in outcomes]


def ids(messages: Iterable[Message | AbstractIncomingMessage]) -> list[str | None]:
    """Event ids, of messages that were sent or received."""
    return [message.message_id if hasattr(message, "message_id") else message.id for message in messages]


async def publish_until_confirmed(sink: RabbitMQSink, batch: Sequence[Message]) -> int:
    """Retry in order as the pipeline does, with a pause; the number of attempts."""
    async with asyncio.timeout(_RECOVERY_SECONDS_MAX):
        for attempt in count(1):
            outcomes = await sink.publish(batch)
            assert Status.REJECTED not in statuses(outcomes)
            batch = [m for m, outcome in zip(batch, outcomes, strict=True) if outcome.status is not Status.CONFIRMED]
            if not batch:
                return attempt
            await asyncio.sleep(min(0.01 * attempt, 0.2))
    raise AssertionError
