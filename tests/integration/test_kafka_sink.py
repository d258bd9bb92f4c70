"""The Kafka sink on a well broker: partitions, sizes, refused records, topics that are missing or change."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from relay.sink import CONFIRMED, Outcome, Status
from relay.sinks.kafka import KafkaOptions, KafkaSink
from relay.sinks.kafka.partitioner import murmur2
from relay.testing.messages import make_message
from tests.integration.kafka_reader import create_topic, records_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from relay.types import Message
    from tests.servers.kafka import Kafka


@asynccontextmanager
async def opened(kafka: Kafka, **options: Any) -> AsyncIterator[KafkaSink]:
    """An open sink on the broker's plain listener."""
    values = {"bootstrap_servers": kafka.bootstrap_servers, "publish_timeout_seconds": 10.0, **options}
    sink = KafkaSink("kafka", KafkaOptions.model_validate(values))
    await sink.open()
    try:
        yield sink
    finally:
        await sink.close()


def statuses(outcomes: Sequence[Outcome]) -> list[str]:
    return [outcome.status.value for outcome in outcomes]


def ids(messages: Iterable[Message]) -> list[str]:
    return [message.id for message in messages]


def ids_of(records: Iterable[Any]) -> list[str]:
    return [dict(record.headers)["id"].decode() for record in records]


async def publish_until_confirmed(sink: KafkaSink, batch: Sequence[Message]) -> None:
    """Publish what is not confirmed yet, again and again, as the pipeline does."""
    async with asyncio.timeout(60):
        while batch:
            outcomes = await sink.publish(batch)
            batch = [message for message, outcome in zip(batch, outcomes, strict=True) if outcome != CONFIRMED]
            if batch:
                await asyncio.sleep(0.05)


def now_micros() -> int:
    return time.time_ns() // 1000


# --- keys and partitions -------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 3, 12])
async def test_keys_keep_their_order_on_the_partition_that_java_chooses(
    kafka: Kafka, unique: str, partitions: int
) -> None:
    """Four workers, 2,000 messages of 40 keys: each once, in order, on `murmur2 % partitions`."""
    topic = await create_topic(kafka, unique, partitions=partitions)
    workers = [[make_message(topic, key=f"key{w}.{n % 10}") for n in range(500)] for w in range(4)]
    async with opened(kafka) as sink:

        async def work(messages: list[Message]) -> None:
            rest = messages
            while rest:
                size = random.randint(1, 60)
                batch, rest = rest[:size], rest[size:]
                assert set(statuses(await sink.publish(batch))) == {"confirmed"}

        await asyncio.gather(*map(work, workers))
    records = await records_of(kafka, topic, 2_000)
    assert len(records) == 2_000
    for messages in workers:
        for key in {message.key for message in messages if message.key}:
            mine = [record for record in records if record.key == key.encode()]
            assert ids_of(mine) == [message.id for message in messages if message.key == key]
            assert {record.partition for record in mine} == {(murmur2(key.encode()) & 0x7FFFFFFF) % partitions}


async def test_messages_without_a_key_spread_over_the_partitions(kafka: Kafka, unique: str) -> None:
    """Those of one batch stay together; the next batch goes to the next partition."""
    topic = await create_topic(kafka, unique, partitions=3)
    async with opened(kafka) as sink:
        batches = [[make_message(topic, key=None) for _ in range(5)] for _ in range(6)]
        for batch in batches:
            assert set(statuses(await sink.publish(batch))) == {"confirmed"}
    records = await records_of(kafka, topic, 30)
    assert [sum(record.partition == number for record in records) for number in range(3)] == [10, 10, 10]
    place = {id_: record.partition for id_, record in zip(ids_of(records), records, strict=True)}
    assert [len({place[message.id] for message in batch}) for batch in batches] == [1] * 6


async def test_new_partitions_are_noticed(kafka: Kafka, unique: str) -> None:
    """Without an error and without a restart, once the metadata is old."""
    topic = await create_topic(kafka, unique, partitions=1)
    async with opened(kafka, metadata_max_age_seconds=0.05) as sink:
        assert statuses(await sink.publish([make_message(topic)])) == ["confirmed"]
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
        await admin.start()
        await admin.create_partitions({topic: NewPartitions(4)})
        await admin.close()
        async with asyncio.timeout(20):
            while {record.partition for record in await records_of(kafka, topic, 1)} != {0, 1, 2, 3}:
                await sink.publish([make_message(topic, key=None)])


# --- what a record looks like --------------------------------------------------------------------


async def test_a_record_has_the_documented_form(kafka: Kafka, unique: str) -> None:
    """Key, value, timestamp and headers, in this order, as docs/sinks/kafka.md says."""
    topic = await create_topic(kafka, unique)
    created_at = now_micros()
    message = make_message(topic, key="k", payload=b'{"a": 1}', headers='{"n": 1.50, "x": null}', created_at=created_at)
    async with opened(kafka) as sink:
        await sink.publish([message])
    [record] = await records_of(kafka, topic, 1)
    assert (record.key, record.value, record.timestamp) == (b"k", b'{"a": 1}', created_at // 1000)
    assert [name for name, _ in record.headers] == ["id", "created_at", "n", "x"]
    assert dict(record.headers)["id"] == message.id.encode()
    assert [dict(record.headers)[name] for name in ("n", "x")] == [b"1.50", None]


async def test_headers_that_are_no_object_hurt_only_their_key(kafka: Kafka, unique: str) -> None:
    """The column should not have them; if it does, the event is dead-lettered and its text is not shown."""
    topic = await create_topic(kafka, unique)
    batch = [
        make_message(topic, key="a", headers='["secret"]'),
        make_message(topic, key="a"),
        make_message(topic, key="b"),
        make_message(topic, key="c\ud800"),
    ]
    async with opened(kafka) as sink:
        outcomes = await sink.publish(batch)
    assert statuses(outcomes) == ["rejected", "deferred", "confirmed", "rejected"]
    assert "secret" not in outcomes[0].reason


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compression", "too_large"),
    # gzip makes the text of 8 MB small enough for the broker, which is what counts; noise stays too large.
    [("none", {"text 1.1", "text 4", "text 8", "noise 4"}), ("gzip", {"noise 4"})],
)
async def test_rows_over_the_brokers_limit_are_rejected_alone(
    kafka: Kafka, unique: str, compression: str, too_large: set[str]
) -> None:
    """0.9, 1.1, 4 and 8 MB among small rows: those too large say their size; all others arrive (FIELD.md A2)."""
    topic = await create_topic(kafka, unique, partitions=3)
    large = {f"text {size}": b"x" * int(size * 1e6) for size in (0.9, 1.1, 4, 8)} | {
        "noise 4": random.randbytes(4_000_000)
    }
    batch: list[Message] = []
    for name, payload in large.items():
        batch += [make_message(topic, key=name, payload=text) for text in (b"before", payload, b"after")]
        batch += [make_message(topic, key=f"small {n}") for n in range(20)]
    async with opened(kafka, compression=compression) as sink:
        outcomes = await sink.publish(batch)
    found = dict(zip(ids(batch), outcomes, strict=True))
    for message in batch:
        status = found[message.id].status
        if message.key not in too_large or message.payload == b"before":
            assert status is Status.CONFIRMED
        elif message.payload == b"after":
            assert status is Status.DEFERRED
        else:
            assert status is Status.REJECTED
            assert f"payload of {len(message.payload or b'')} bytes" in found[message.id].reason
    delivered = [message.id for message in batch if found[message.id].status is Status.CONFIRMED]
    assert sorted(ids_of(await records_of(kafka, topic, len(delivered)))) == sorted(delivered)


async def test_our_own_limit_is_checked_before_the_wire(kafka: Kafka, unique: str) -> None:
    """`max_request_size` counts bytes as they are sent; the reason names it."""
    topic = await create_topic(kafka, unique)
    batch = [make_message(topic, key=f"{size}", payload=secrets.token_bytes(size)) for size in (100, 3_000, 200)]
    async with opened(kafka, max_request_size=2_000) as sink:
        outcomes = await sink.publish(batch)
    assert statuses(outcomes) == ["confirmed", "rejected", "confirmed"]
    assert "max_request_size = 2000" in outcomes[1].reason


async def test_a_topic_with_a_small_limit_is_learned(kafka: Kafka, unique: str) -> None:
    """Batches are cut until the broker takes them; single records over the limit are found, in order of keys."""
    topic = await create_topic(kafka, unique, max_message_bytes=2_000)
    batch = [
        make_message(topic, key=f"k{n % 7}", payload=b"x" * (2_500 if n in {100, 333} else 50)) for n in range(500)
    ]
    async with opened(kafka) as sink:
        outcomes = await sink.publish(batch)
        again = [make_message(topic, key=f"k{n % 7}") for n in range(500)]
        assert set(statuses(await sink.publish(again))) == {"confirmed"}
    for index, outcome in enumerate(outcomes):
        follows = any(index > bad and index % 7 == bad % 7 for bad in (100, 333))
        expected = Status.DEFERRED if follows else Status.REJECTED if index in {100, 333} else Status.CONFIRMED
        assert outcome.status is expected, index
    delivered = [
        message for message, outcome in zip(batch, outcomes, strict=True) if outcome.status is Status.CONFIRMED
    ]
    records = ids_of(await records_of(kafka, topic, len(delivered) + 500))
    assert len(records) == len(delivered) + 500
    for key in range(7):
        mine = [message.id for message in [*delivered, *again] if message.key == f"k{key}"]
        assert [id_ for id_ in records if id_ in set(mine)] == mine


# --- records that the broker names ---------------------------------------------------------------


async def test_records_that_the_broker_refuses_are_found_and_their_neighbours_delivered(
    kafka: Kafka, unique: str
) -> None:
    """A compacted topic takes no record without a key; one answer names them all (KIP-467)."""
    topic = await create_topic(kafka, unique, cleanup_policy="compact")
    batch = [make_message(topic, key=None if n in {3, 7} else f"k{n}") for n in range(10)]
    async with opened(kafka) as sink:
        outcomes = await sink.publish(batch)
    assert statuses(outcomes) == ["rejected" if n in {3, 7} else "confirmed" for n in range(10)]
    assert "without key" in outcomes[3].reason
    assert ids_of(await records_of(kafka, topic, 8)) == [m.id for n, m in enumerate(batch) if n not in {3, 7}]


async def test_a_timestamp_that_the_topic_refuses_is_replaced_by_the_time_of_publishing(
    kafka: Kafka, unique: str
) -> None:
    """An event is not lost for its age; its header keeps `created_at` (FIELD.md A5)."""
    topic = await create_topic(kafka, unique, message_timestamp_before_max_ms=60_000)
    batch = [make_message(topic, created_at=now_micros()), make_message(topic, created_at=now_micros() - 10**9)]
    async with opened(kafka) as sink:
        assert statuses(await sink.publish(batch)) == ["confirmed"] * 2
    records = await records_of(kafka, topic, 2)
    assert ids_of(records) == ids(batch)
    assert records[0].timestamp == batch[0].created_at // 1000
    assert records[1].timestamp > batch[0].created_at // 1000 - 60_000


# --- topics --------------------------------------------------------------------------------------


async def test_missing_and_illegal_topics_hurt_only_their_own_events(kafka: Kafka, unique: str) -> None:
    """Tried again, or rejected at once; the others in the batch arrive in order."""
    topic = await create_topic(kafka, unique)
    batch = [make_message(name, key=name) for name in (topic, f"{unique}.missing", "not legal!", "..", topic)]
    async with opened(kafka) as sink:
        outcomes = await sink.publish(batch)
    assert statuses(outcomes) == ["confirmed", "unavailable", "rejected", "rejected", "confirmed"]
    assert not any(outcome.sink_down or outcome.misconfigured for outcome in outcomes)
    assert "does not exist" in outcomes[1].reason
    assert ids_of(await records_of(kafka, topic, 2)) == [batch[0].id, batch[4].id]


async def test_a_missing_topic_does_not_slow_the_others(kafka: Kafka, unique: str) -> None:
    """Every batch has one row for it. With a wait for metadata in each, 200 batches would take hours (FIELD.md C4)."""
    topic = await create_topic(kafka, unique)
    async with opened(kafka) as sink, asyncio.timeout(20):
        for number in range(200):
            batch = [make_message(topic, key=f"k{n}") for n in range(99)]
            outcomes = await sink.publish([make_message(f"{unique}.missing", key=f"m{number}"), *batch])
            assert statuses(outcomes) == ["unavailable"] + ["confirmed"] * 99


async def test_a_topic_that_is_created_later_gets_its_events(kafka: Kafka, unique: str) -> None:
    """The answer that it does not exist is believed for a second only."""
    async with opened(kafka) as sink:
        message = make_message(unique)
        assert statuses(await sink.publish([message])) == ["unavailable"]
        await create_topic(kafka, unique)
        await publish_until_confirmed(sink, [message])
    assert ids_of(await records_of(kafka, unique, 1)) == [message.id]


async def test_a_topic_that_is_deleted_is_its_events_own_failure(kafka: Kafka, unique: str) -> None:
    """The broker is well, so the sink is not down; other topics go on in the same batch."""
    doomed, other = await create_topic(kafka, f"{unique}.1"), await create_topic(kafka, f"{unique}.2")
    async with opened(kafka) as sink:
        assert statuses(await sink.publish([make_message(doomed), make_message(other)])) == ["confirmed"] * 2
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
        await admin.start()
        await admin.delete_topics([doomed])
        await admin.close()
        outcomes = await sink.publish([make_message(doomed, key="a"), make_message(other, key="b")])
    assert statuses(outcomes) == ["unavailable", "confirmed"]
    assert not outcomes[0].sink_down


async def test_a_key_that_changes_its_topic_keeps_its_order(kafka: Kafka, unique: str) -> None:
    """The record of the earlier topic is confirmed before that of the later one is sent."""
    first, second = await create_topic(kafka, f"{unique}.1"), await create_topic(kafka, f"{unique}.2")
    batch = [make_message(first if n % 2 else second, key="k", created_at=now_micros()) for n in range(20)]
    async with opened(kafka) as sink:
        assert set(statuses(await sink.publish(batch))) == {"confirmed"}
    received = [*await records_of(kafka, first, 10), *await records_of(kafka, second, 10)]
    assert sorted(ids_of(received)) == sorted(ids(batch))


async def test_a_key_that_fails_at_one_topic_does_not_overtake_at_the_next(kafka: Kafka, unique: str) -> None:
    """Only the broker knows the first topic's limit, so the second record has to wait for its word."""
    strict = await create_topic(kafka, f"{unique}.1", max_message_bytes=2_000)
    other = await create_topic(kafka, f"{unique}.2")
    batch = [
        make_message(strict, key="k", payload=b"x" * 3_000),
        make_message(other, key="k"),
        make_message(other, key="free"),
        make_message(strict, key="k"),
    ]
    async with opened(kafka) as sink:
        assert statuses(await sink.publish(batch)) == ["rejected", "deferred", "confirmed", "deferred"]
    assert ids_of(await records_of(kafka, other, 1)) == [batch[2].id]
    assert await records_of(kafka, strict, 0) == []


# --- sequences -----------------------------------------------------------------------------------


async def test_a_gap_in_the_sequence_heals(kafka: Kafka, unique: str) -> None:
    """OUT_OF_ORDER_SEQUENCE_NUMBER, whatever caused it: a new epoch within the same publish (FIELD.md C2)."""
    topic = await create_topic(kafka, unique)
    async with opened(kafka) as sink:
        batch = [make_message(topic) for _ in range(3)]
        assert statuses(await sink.publish(batch[:1])) == ["confirmed"]
        assert sink._context is not None
        sink._context.topics[topic].partitions[0].sequence += 5
        assert statuses(await sink.publish(batch[1:])) == ["confirmed"] * 2
    assert ids_of(await records_of(kafka, topic, 3)) == ids(batch)


async def test_a_fenced_producer_is_replaced(kafka: Kafka, unique: str) -> None:
    """INVALID_PRODUCER_EPOCH: another producer id within the same publish."""
    topic = await create_topic(kafka, unique)
    async with opened(kafka) as sink, opened(kafka) as rival:
        assert statuses(await sink.publish([make_message(topic)])) == ["confirmed"]
        assert statuses(await rival.publish([make_message(topic)])) == ["confirmed"]
        assert sink._context is not None
        assert rival._context is not None
        mine, theirs = (context.topics[topic].partitions[0] for context in (sink._context, rival._context))
        assert mine.producer_id is not None
        theirs.begin(mine.producer_id)
        theirs.begin_epoch()
        assert statuses(await rival.publish([make_message(topic)])) == ["confirmed"]
        before = mine.producer_id
        assert statuses(await sink.publish([make_message(topic)])) == ["confirmed"]
        assert mine.producer_id != before
    assert len(await records_of(kafka, topic, 4)) == 4
