"""The broker at the end of a path: its options as a sink, and what has to be made or emptied before a round."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["PARTITIONS", "SINKS", "Target", "prepare"]

SINKS: Final = ("null", "redis", "kafka", "rabbitmq")
PARTITIONS: Final = 8


@dataclass(frozen=True, slots=True)
class Target:
    """A sink's type and options, and the topic, stream or queue that the events go to."""

    sink: str
    options: dict[str, Any]
    topic: str


async def prepare(target: Target) -> None:
    """Make the topic or queue if it is missing, and empty stream or queue."""
    if (how := _PREPARE.get(target.sink)) is not None:
        await how(target)


async def _redis(target: Target) -> None:
    import redis.asyncio  # noqa: PLC0415  # each broker's client only when it is measured

    async with redis.asyncio.Redis.from_url(target.options["url"]) as client:
        await client.unlink(target.topic)


async def _kafka(target: Target) -> None:
    from aiokafka.admin import AIOKafkaAdminClient, NewTopic  # noqa: PLC0415
    from aiokafka.errors import TopicAlreadyExistsError  # noqa: PLC0415

    admin = AIOKafkaAdminClient(bootstrap_servers=target.options["bootstrap_servers"])
    await admin.start()
    try:
        with suppress(TopicAlreadyExistsError):
            await admin.create_topics([NewTopic(target.topic, PARTITIONS, 1)])
    finally:
        await admin.close()


async def _rabbitmq(target: Target) -> None:
    import aio_pika  # noqa: PLC0415

    async with await aio_pika.connect(target.options["url"]) as connection, connection.channel() as channel:
        queue = await channel.declare_queue(target.topic, durable=True)
        await queue.purge()


_PREPARE: Final = {"redis": _redis, "kafka": _kafka, "rabbitmq": _rabbitmq}
