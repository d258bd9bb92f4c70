"""Reads Kafka topics behind the relay's back: aiokafka's consumer, which shares no code with the sink."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.client import AIOKafkaClient

if TYPE_CHECKING:
    from tests.servers.kafka import Kafka

__all__ = ["create_topic", "records_of"]

READ_SECONDS_MAX = 20.0


async def create_topic(kafka: Kafka, name: str, *, partitions: int = 1, **config: object) -> str:
    """Create a topic and wait until the broker's metadata has it: that comes a moment after the creation."""
    await kafka.create_topic(name, partitions=partitions, **config)
    client = AIOKafkaClient(bootstrap_servers=kafka.bootstrap_servers)
    await client.bootstrap()
    try:
        async with asyncio.timeout(READ_SECONDS_MAX):
            await client.set_topics([name])
            while len(client.cluster.available_partitions_for_topic(name) or ()) < partitions:
                await client.force_metadata_update()
    finally:
        await client.close()
    return name


async def records_of(kafka: Kafka, topic: str, count: int) -> list[Any]:
    """All records of a topic, by partition and offset. Waits until there are at least `count`."""
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap_servers, max_partition_fetch_bytes=64_000_000)
    await consumer.start()
    try:
        async with asyncio.timeout(READ_SECONDS_MAX):
            partitions = [TopicPartition(topic, number) for number in await _partitions(consumer, topic)]
            consumer.assign(partitions)
            await consumer.seek_to_beginning(*partitions)
            return await _read(consumer, partitions, count)
    finally:
        await consumer.stop()


async def _partitions(consumer: AIOKafkaConsumer, topic: str) -> list[int]:
    consumer.subscribe([topic])
    while not (numbers := consumer.partitions_for_topic(topic)):
        await consumer._client.force_metadata_update()
    consumer.unsubscribe()
    return sorted(numbers)


async def _read(consumer: AIOKafkaConsumer, partitions: list[TopicPartition], count: int) -> list[Any]:
    records: dict[TopicPartition, list[Any]] = {partition: [] for partition in partitions}
    while True:
        ends = await consumer.end_offsets(partitions)
        while not all([await consumer.position(partition) >= ends[partition] for partition in partitions]):
            for partition, more in (await consumer.getmany(timeout_ms=200)).items():
                records[partition] += more
        everything = [record for partition in partitions for record in records[partition]]
        if len(everything) >= count:
            return everything
