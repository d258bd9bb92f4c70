"""Independent consumers: they share no code with the sinks, and note everything in the order of its arrival."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import aio_pika
import redis.asyncio
from aiokafka import AIOKafkaConsumer, TopicPartition

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Sequence

    from aio_pika.abc import AbstractIncomingMessage

    from tests.servers.kafka import Kafka

__all__ = ["Consumer", "Delivery", "bind", "kafka_consumer", "rabbitmq_consumer", "redis_consumer"]

PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message as a consumer sees it. `headers` without those that the relay adds itself."""

    id: str
    key: str | None
    payload: bytes | None
    place: str
    at: float
    headers: dict[str, Any] = field(default_factory=dict)


class Opened(Protocol):
    """Opens a consumer of topics."""

    def __call__(self, topics: Sequence[str]) -> Any: ...


class Consumer(ABC):
    """Reads when it is asked to; `deliveries` in order of arrival, per stream, partition or queue."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self._seen: set[str] = set()

    @abstractmethod
    async def read(self) -> bool:
        """Read what there is, waiting a moment if there is nothing. True if something was new."""

    def note(self, delivery: Delivery) -> None:
        """One more."""
        self.deliveries.append(delivery)
        self._seen.add(delivery.id)

    @property
    def ids(self) -> list[str]:
        """Ids in order of arrival."""
        return [delivery.id for delivery in self.deliveries]

    async def wait_for(self, ids: Collection[str], seconds: float = PATIENCE_SECONDS) -> None:
        """Read until all of these have arrived."""
        wanted = set(ids)
        try:
            async with asyncio.timeout(seconds):
                while not wanted <= self._seen:
                    await self.read()
        except TimeoutError:
            missing = wanted - self._seen
            raise AssertionError(
                f"{len(missing)} of {len(wanted)} not within {seconds:.0f} s: {sorted(missing)[:5]}"
            ) from None

    async def wait_for_count(self, count: int, seconds: float = PATIENCE_SECONDS) -> None:
        """Read until so many different events have arrived."""
        try:
            async with asyncio.timeout(seconds):
                while len(self._seen) < count:
                    await self.read()
        except TimeoutError:
            raise AssertionError(f"{len(self._seen)} of {count} events within {seconds:.0f} s") from None

    async def drain(self) -> None:
        """Read until nothing more comes."""
        while await self.read():
            pass


class _RedisConsumer(Consumer):
    def __init__(self, url: str, streams: Sequence[str]) -> None:
        super().__init__()
        self._client = redis.asyncio.Redis.from_url(url, socket_timeout=10)
        self._last: dict[Any, Any] = dict.fromkeys(streams, "0-0")

    async def read(self) -> bool:
        try:
            found: Any = await self._client.xread(self._last, count=5_000, block=200)
        except (redis.ConnectionError, redis.TimeoutError):  # its server is being tried
            await asyncio.sleep(0.1)
            return False
        for stream, entries in found:
            name = stream.decode()
            for entry, fields in entries:
                self._last[name] = entry
                self.note(_of_redis(fields, name))
        return bool(found)

    async def close(self) -> None:
        await self._client.aclose()


def _of_redis(fields: dict[bytes, bytes], stream: str) -> Delivery:
    key = fields.get(b"key")
    return Delivery(
        fields[b"id"].decode(),
        None if key is None else key.decode(),
        fields.get(b"payload"),
        stream,
        time.monotonic(),
        {"headers": fields.get(b"headers"), "created_at": fields[b"created_at"].decode()},
    )


@asynccontextmanager
async def redis_consumer(url: str, streams: Sequence[str]) -> AsyncIterator[Consumer]:
    """Reads streams from their beginning by XREAD."""
    consumer = _RedisConsumer(url, streams)
    try:
        yield consumer
    finally:
        await consumer.close()


class _KafkaConsumer(Consumer):
    def __init__(self, client: AIOKafkaConsumer) -> None:
        super().__init__()
        self._client = client

    async def read(self) -> bool:
        found = await self._client.getmany(timeout_ms=200)
        for partition, records in found.items():
            for record in records:
                headers = dict(record.headers)
                event = headers.pop("id").decode()
                place = f"{partition.topic}/{partition.partition}"
                key = None if record.key is None else record.key.decode()
                self.note(Delivery(event, key, record.value, place, time.monotonic(), headers))
        return bool(found)


@asynccontextmanager
async def kafka_consumer(kafka: Kafka, topics: Sequence[str], partitions: int) -> AsyncIterator[Consumer]:
    """Reads topics from their beginning, without a group."""
    client = AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap_servers, max_partition_fetch_bytes=32_000_000)
    await client.start()
    try:
        assigned = [TopicPartition(topic, number) for topic in topics for number in range(partitions)]
        client.assign(assigned)
        await client.seek_to_beginning(*assigned)
        yield _KafkaConsumer(client)
    finally:
        await client.stop()


class _RabbitConsumer(Consumer):
    def __init__(self) -> None:
        super().__init__()
        self._arrived = asyncio.Event()
        self._taken = 0

    async def take(self, message: AbstractIncomingMessage) -> None:
        headers = dict(message.headers)
        key = headers.get("key")
        payload = None if headers.pop("tombstone", False) else message.body
        self.note(
            Delivery(
                message.message_id or "",
                None if key is None else str(key),
                payload,
                message.routing_key or "",
                time.monotonic(),
                headers,
            )
        )
        self._arrived.set()

    async def read(self) -> bool:
        try:
            async with asyncio.timeout(0.2):
                await self._arrived.wait()
        except TimeoutError:
            return False
        self._arrived.clear()
        return True


@asynccontextmanager
async def rabbitmq_consumer(url: str, exchange: str, routing_keys: Sequence[str]) -> AsyncIterator[Consumer]:
    """Makes a topic exchange and one queue bound for these routing keys, and consumes it."""
    consumer = _RabbitConsumer()
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        made = await channel.declare_exchange(exchange, "topic", durable=True)
        queue = await channel.declare_queue(f"{exchange}-all", durable=True)
        for routing_key in routing_keys:
            await queue.bind(made, routing_key=routing_key)
        await queue.consume(consumer.take, no_ack=True)
        yield consumer


async def bind(url: str, exchange: str, routing_key: str) -> None:
    """Bind the queue of `rabbitmq_consumer` for one more routing key."""
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        await (await channel.get_queue(f"{exchange}-all")).bind(exchange, routing_key=routing_key)
