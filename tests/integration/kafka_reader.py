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
    """Create a topic and wait until the broker's metadata has it: that comes a moment after the creation.

    Without retention: it counts from the records' timestamps, and those of tests are long ago, so that a
    cleaner, half a minute after the broker's start, would take away what the test is about to read.
    """
    await kafka.create_topic(name, partitions=partitions, **{"retention_ms": -1, **config})
    async with asyncio.timeout(READ_SECONDS_MAX):
        while len(await _partitions(kafka, name)) < partitions:
            pass
    return name


async def records_of(kafka: Kafka, topic: str, count: int) -> list[Any]:
    """All records of a topic, by partition and offset. Waits until there are at least `count`."""
    numbers = await _partitions(kafka, topic)
    partitions = [TopicPartition(topic, number) for number in numbers]
    # Only `assign` and `earliest`: after a subscription or with `latest` it may begin at the end and read nothing.
    consumer = AIOKafkaConsumer(
        bootstrap_servers=kafka.bootstrap_servers,
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=64_000_000,
    )
    consumer.assign(partitions)
    await consumer.start()
    records: dict[TopicPartition, list[Any]] = {partition: [] for partition in partitions}
    try:
        async with asyncio.timeout(READ_SECONDS_MAX):
            while True:
                await _read_to_the_end(consumer, records)
                everything = [record for partition in partitions for record in records[partition]]
                if len(everything) >= count:
                    return everything
    except TimeoutError:
        found = {partition.partition: len(read) for partition, read in records.items()}
        raise AssertionError(f"{topic}: {count} records expected, {found} found by partition") from None
    finally:
        await consumer.stop()


async def _partitions(kafka: Kafka, topic: str) -> list[int]:
    """Numbers of the partitions that have a leader."""
    client = AIOKafkaClient(bootstrap_servers=kafka.bootstrap_servers)
    await client.bootstrap()
    try:
        await client.set_topics([topic])
        return sorted(client.cluster.available_partitions_for_topic(topic) or ())
    finally:
        await client.close()


async def _read_to_the_end(consumer: AIOKafkaConsumer, records: dict[TopicPartition, list[Any]]) -> None:
    ends = await consumer.end_offsets(list(records))
    while any(
        len(read) == 0 or read[-1].offset + 1 < ends[partition]
        for partition, read in records.items()
        if ends[partition]
    ):
        for partition, more in (await consumer.getmany(timeout_ms=200)).items():
            records[partition] += more
