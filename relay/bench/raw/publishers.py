"""How the raw loops publish: each client library in bulk, as fast as we know how to use it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import orjson

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    Row = Sequence[Any]
    Publish = Callable[[Sequence[Row]], Awaitable[None]]

__all__ = ["publisher"]


async def publisher(sink: str, options: dict[str, Any], topic: str) -> Publish:
    """A function that publishes rows (seq, id, key, payload, headers, created_at) and returns once all are confirmed."""
    return await _MAKE[sink](options, topic)


async def _null(_options: dict[str, Any], _topic: str) -> Publish:
    async def publish(_rows: Sequence[Row]) -> None:
        pass

    return publish


async def _redis(options: dict[str, Any], topic: str) -> Publish:
    """Commands packed by hiredis, written as one buffer on the client's own connection."""
    import hiredis  # noqa: PLC0415
    import redis.asyncio  # noqa: PLC0415

    pack: Any = hiredis.pack_command
    connection: Any = redis.asyncio.Connection(**redis.asyncio.connection.parse_url(options["url"]))
    await connection.connect()

    async def publish(rows: Sequence[Row]) -> None:
        words = [
            ("XADD", topic, "*", "id", event, "key", key, "payload", payload, "headers", headers, "created_at", created)
            for _, event, key, payload, headers, created in rows
        ]
        await connection.send_packed_command([b"".join(map(pack, words))], check_health=False)
        for _ in rows:
            await connection.read_response()

    return publish


async def _kafka(options: dict[str, Any], topic: str) -> Publish:
    """One record batch for each partition, idempotent, `acks=all`."""
    from aiokafka import AIOKafkaProducer  # noqa: PLC0415

    from relay.sinks.kafka.partitioner import murmur2  # noqa: PLC0415

    producer = AIOKafkaProducer(
        bootstrap_servers=options["bootstrap_servers"], enable_idempotence=True, acks="all", max_batch_size=1 << 20
    )
    await producer.start()
    partitions = len(await producer.partitions_for(topic))
    known: dict[str, int] = {}

    def partition(key: str) -> int:
        if (found := known.get(key)) is None:
            found = known[key] = (murmur2(key.encode()) & 0x7FFFFFFF) % partitions
        return found

    async def publish(rows: Sequence[Row]) -> None:
        batches: dict[int, Any] = {}
        for _, event, key, payload, headers, created in rows:
            number = partition(key)
            if (batch := batches.get(number)) is None:
                batch = batches[number] = producer.create_batch()
            fields = [("id", event.encode()), ("created_at", created.encode())]
            fields += [(name, value.encode()) for name, value in orjson.loads(headers).items()]
            if batch.append(key=key.encode(), value=payload.encode(), timestamp=None, headers=fields) is None:
                raise RuntimeError("a batch of 2,000 rows did not fit")
        sent = [await producer.send_batch(batch, topic, partition=number) for number, batch in batches.items()]
        await asyncio.gather(*sent)

    return publish


async def _rabbitmq(options: dict[str, Any], topic: str) -> Publish:
    """Frames made by pamqp, all of a batch in one write on an aiormq connection, confirms awaited together."""
    from pamqp import commands as spec  # noqa: PLC0415
    from pamqp import frame as frames  # noqa: PLC0415
    from pamqp.body import ContentBody  # noqa: PLC0415
    from pamqp.header import ContentHeader  # noqa: PLC0415

    from relay.sinks.rabbitmq.wire import Wire  # noqa: PLC0415

    wire = await Wire.connect(options["url"], heartbeat_seconds=60, name="raw loop")
    channel = await wire.channel(confirms=True)
    confirms = channel.listener = _Confirms()
    method = frames.marshal(spec.Basic.Publish(exchange="", routing_key=topic, mandatory=True), channel.number)

    def encode(row: Row) -> bytes:
        _, event, key, payload, headers, created = row
        body = payload.encode()
        fields = {"key": key, "created_at": created, **orjson.loads(headers)}
        properties = spec.Basic.Properties(message_id=event, delivery_mode=2, headers=fields)
        header = ContentHeader(body_size=len(body), properties=properties)
        return method + frames.marshal(header, channel.number) + frames.marshal(ContentBody(body), channel.number)

    async def publish(rows: Sequence[Row]) -> None:
        confirmed = confirms.expect(len(rows))
        channel.write(b"".join(map(encode, rows)))
        await confirmed

    return publish


class _Confirms:
    """Counts confirms up to the last one of a batch. `relay.sinks.rabbitmq.wire.Listener`."""

    def __init__(self) -> None:
        self._confirmed = self._expected = 0
        self._all: asyncio.Future[None] | None = None

    def expect(self, count: int) -> asyncio.Future[None]:
        """Done when so many more are confirmed."""
        self._expected += count
        self._all = asyncio.get_running_loop().create_future()
        return self._all

    def acknowledged(self, tag: int, *, multiple: bool) -> None:
        # Single confirms may come out of order, multiple ones cover all below: the count is exact at the end only.
        self._confirmed = max(tag, self._confirmed) if multiple else self._confirmed + 1
        if self._confirmed >= self._expected and self._all is not None and not self._all.done():
            self._all.set_result(None)

    def refused(self, tag: int, *, multiple: bool) -> None:
        raise RuntimeError(f"the broker refused message {tag} (multiple: {multiple})")

    def returned(self, event_id: str | None, code: int, text: str) -> None:
        raise RuntimeError(f"the broker returned {event_id}: {code} {text}")

    def ended(self, fault: object) -> None:
        if self._all is not None and not self._all.done():
            self._all.set_exception(RuntimeError(str(fault)))


_MAKE: Final = {"null": _null, "redis": _redis, "kafka": _kafka, "rabbitmq": _rabbitmq}
