"""Exactly the committed events arrive, in order per key, whatever happens to the pods."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.acceptance.chaos import Chaos
from tests.acceptance.consumers import kafka_consumer, rabbitmq_consumer, redis_consumer
from tests.acceptance.judges import assert_at_rest, judge
from tests.acceptance.pods import settings_of
from tests.acceptance.writers import Load
from tests.integration.kafka_reader import create_topic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.acceptance.consumers import Consumer
    from tests.acceptance.pods import Pods
    from tests.outbox import Outbox
    from tests.servers.kafka import Kafka
    from tests.servers.redis import Valkey

SECONDS = os.environ.get("RELAY_CHAOS_SECONDS")
"""How long each of these rages; the suite's own figures are short."""

PARTITIONS = 3


def seconds(default: float) -> float:
    return float(SECONDS) if SECONDS else default


async def survive(
    outbox: Outbox,
    pods: Pods,
    sink: dict[str, Any],
    consumer: Consumer,
    topics: Sequence[str],
    *,
    seed: int,
    count: int,
    rage_seconds: float,
) -> None:
    """Writers and chaos for a while, then rest: everything must have come, and nothing may be left."""
    settings = settings_of(outbox, {"main": sink})
    chaos = Chaos(pods, settings, seed=seed, pause_seconds=1.0 if count < 10 else 0.5)
    await pods.start_many(count, settings)
    async with Load(outbox, topics, seed=seed, late_seconds=min(rage_seconds / 2, 30.0)) as load:
        await chaos.rage(rage_seconds)
    await consumer.wait_for(load.ledger.ids)
    await pods.stop_all()
    await consumer.drain()
    judgement = judge(load.ledger, consumer)
    print(f"{load.ledger}; {chaos.done}; {judgement.repeats} repeats")
    judgement.assert_kept()
    assert_at_rest(outbox)
    assert len(load.ledger) > 100
    assert load.ledger.rolled_back


@pytest.mark.time_limit(240 + seconds(15))
@pytest.mark.parametrize(("count", "default"), [(3, 15.0), (12, 8.0), (1, 6.0)])
async def test_redis_gets_exactly_what_was_committed_while_pods_die_freeze_and_start(
    outbox: Outbox, pods: Pods, valkey: Valkey, unique: str, seed: int, count: int, default: float
) -> None:
    """Three pods, twelve, and one, under SIGKILL, SIGSTOP beyond the lease, SIGTERM and newcomers."""
    topics = [f"{unique}.orders", f"{unique}.bills"]
    async with redis_consumer(valkey.url, topics) as consumer:
        sink = {"type": "redis", "url": valkey.url}
        await survive(outbox, pods, sink, consumer, topics, seed=seed, count=count, rage_seconds=seconds(default))


@pytest.mark.time_limit(240 + seconds(8))
async def test_kafka_gets_exactly_what_was_committed_while_pods_die_freeze_and_start(
    outbox: Outbox, pods: Pods, kafka: Kafka, unique: str, seed: int
) -> None:
    """Two topics of three partitions: a key's order is its partition's."""
    topics = [f"{unique}.orders", f"{unique}.bills"]
    for topic in topics:
        await create_topic(kafka, topic, partitions=PARTITIONS)
    async with kafka_consumer(kafka, topics, PARTITIONS) as consumer:
        sink = {"type": "kafka", "bootstrap_servers": kafka.bootstrap_servers}
        await survive(outbox, pods, sink, consumer, topics, seed=seed, count=3, rage_seconds=seconds(8))


@pytest.mark.time_limit(240 + seconds(8))
async def test_rabbitmq_gets_exactly_what_was_committed_while_pods_die_freeze_and_start(
    outbox: Outbox, pods: Pods, vhost: str, unique: str, seed: int
) -> None:
    """One queue, bound for two routing keys."""
    topics = [f"{unique}.orders", f"{unique}.bills"]
    async with rabbitmq_consumer(vhost, unique, topics) as consumer:
        sink = {"type": "rabbitmq", "url": vhost, "exchange": unique}
        await survive(outbox, pods, sink, consumer, topics, seed=seed, count=3, rage_seconds=seconds(8))
