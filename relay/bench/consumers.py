"""What subscribers see: ids of events, each with the moment it arrived, as `time.monotonic()`."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from relay.bench.brokers import Target

    Seen = dict[str, float]

__all__ = ["consuming"]


@asynccontextmanager
async def consuming(target: Target) -> AsyncIterator[Seen]:
    """Ids and when each was seen first, from now on; filled in the background."""
    seen: Seen = {}
    ready = asyncio.Event()
    task = asyncio.create_task(_CONSUME[target.sink](target, seen, ready), name="consumer")
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        await task
    try:
        yield seen
    finally:
        # Seen once with redis-py: a cancellation that met the end of a blocking read was swallowed, and the loop went on.
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=1)


async def _redis(target: Target, seen: Seen, ready: asyncio.Event) -> None:
    import redis.asyncio  # noqa: PLC0415  # each broker's client only when it is measured

    async with redis.asyncio.Redis.from_url(target.options["url"]) as client:
        last: Any = "$" if await client.exists(target.topic) else "0"
        ready.set()
        while True:
            found: Any = await client.xread({target.topic: last}, block=1_000)
            now = time.monotonic()
            for _stream, entries in found:
                for last, fields in entries:  # noqa: B007  # the last one is where to go on
                    seen.setdefault(fields[b"id"].decode(), now)


async def _kafka(target: Target, seen: Seen, ready: asyncio.Event) -> None:
    from aiokafka import AIOKafkaConsumer  # noqa: PLC0415

    consumer = AIOKafkaConsumer(
        target.topic, bootstrap_servers=target.options["bootstrap_servers"], auto_offset_reset="latest"
    )
    await consumer.start()
    try:
        await consumer.seek_to_end()
        ready.set()
        while True:
            found = await consumer.getmany(timeout_ms=1_000)
            now = time.monotonic()
            for records in found.values():
                for record in records:
                    seen.setdefault(dict(record.headers)["id"].decode(), now)
    finally:
        await consumer.stop()


async def _rabbitmq(target: Target, seen: Seen, ready: asyncio.Event) -> None:
    import aio_pika  # noqa: PLC0415

    async with await aio_pika.connect(target.options["url"]) as connection, connection.channel() as channel:
        queue = await channel.declare_queue(target.topic, durable=True)
        async with queue.iterator(no_ack=True) as messages:
            ready.set()
            async for message in messages:
                seen.setdefault(message.message_id or "", time.monotonic())


_CONSUME: Final[dict[str, Callable[[Target, Seen, asyncio.Event], Coroutine[Any, Any, None]]]] = {
    "redis": _redis,
    "kafka": _kafka,
    "rabbitmq": _rabbitmq,
}
