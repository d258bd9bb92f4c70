"""A broker or a database that is away: nobody's attempts are counted, nothing grows, and it ends within seconds."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

from relay.demo.processes import free_port
from tests.acceptance.consumers import redis_consumer
from tests.acceptance.judges import assert_at_rest, judge, left_behind
from tests.acceptance.pods import eventually, settings_of
from tests.acceptance.writers import Load, insert

if TYPE_CHECKING:
    from tests.acceptance.consumers import Consumer
    from tests.acceptance.pods import Pods
    from tests.acceptance.writers import Ledger
    from tests.outbox import Outbox, OutboxFactory
    from tests.servers.postgres import Postgres
    from tests.servers.redis import Valkey

OUTAGE_SECONDS = float(os.environ.get("RELAY_OUTAGE_SECONDS", "8"))
"""The promise is about ten minutes: RELAY_OUTAGE_SECONDS=600."""


def sink(server: Valkey) -> dict[str, Any]:
    return {"type": "redis", "url": server.url}


async def test_an_outage_costs_no_attempts_and_no_memory_and_ends_within_seconds(
    outbox: Outbox, pods: Pods, own_redis: Valkey, unique: str, seed: int
) -> None:
    """The broker stops while rows go on being inserted; live, not ready; it comes back; nothing was given up."""
    stream = f"{unique}.orders"
    pod = await pods.start(settings_of(outbox, {"main": sink(own_redis)}))
    async with redis_consumer(own_redis.url, [stream]) as consumer:
        async with Load(outbox, [stream], seed=seed, writers=8, pause_seconds=0.01, late_seconds=0) as load:
            await consumer.wait_for_count(100)
            own_redis.stop()
            assert "sink main" in await pod.unready()
            assert await pod.is_live()
            await asyncio.sleep(OUTAGE_SECONDS / 4)  # what is in flight has filled up to its bound
            files, memory = pod.open_files, pod.rss_mb
            await asyncio.sleep(OUTAGE_SECONDS * 3 / 4)
            assert await pod.is_live()
            assert pod.rss_mb - memory < 15, f"grew from {memory:.0f} to {pod.rss_mb:.0f} MB"
            assert pod.open_files <= files + 4
            assert left_behind(outbox)["dead letters"] == left_behind(outbox)["parked"] == 0
            before = load.ledger.ids
            own_redis.start()
            back = time.monotonic()
            await pod.ready()
            await consumer.wait_for(before)
            recovery = time.monotonic() - back
        await consumer.wait_for(load.ledger.ids)
    judge(load.ledger, consumer).assert_kept()
    assert recovery < 10, f"recovery took {recovery:.1f} s"
    assert await pod.metric("relay_dead_letters_total") == 0
    assert pod.printed.count('"message":"sink is down"') == 1  # a state change, not a line per attempt
    assert await pod.stopped() == 0
    assert_at_rest(outbox)


async def test_sigterm_during_an_outage_ends_inside_the_grace_period(
    outbox: Outbox, pods: Pods, own_redis: Valkey, unique: str
) -> None:
    """With events in flight that cannot go anywhere; the next pod sends them."""
    stream = f"{unique}.orders"
    settings = settings_of(outbox, {"main": sink(own_redis)}, pipeline={"grace_seconds": 3.0})
    pod = await pods.start(settings)
    own_redis.stop()
    ids = await insert(outbox, [(stream, f"k{number % 7}", "{}") for number in range(200)], one_by_one=False)
    await pod.says('"message":"sink is down"')
    began = time.monotonic()
    assert await pod.stopped() == 0
    assert time.monotonic() - began < 3.0 + 2.0
    assert left_behind(outbox) == {"unsettled": 200, "parked": 0, "dead letters": 0}
    own_redis.start()
    await pods.start(settings)
    async with redis_consumer(own_redis.url, [stream]) as consumer:
        await consumer.wait_for(ids)
        await pods.stop_all()
        await consumer.drain()
        by_key = [[event for event in dict.fromkeys(consumer.ids) if event in set(ids[k::7])] for k in range(7)]
        assert by_key == [ids[k::7] for k in range(7)]
    assert_at_rest(outbox)


async def test_a_pod_that_starts_before_its_broker_is_live_and_recovers_by_itself(
    outbox: Outbox, pods: Pods, own_redis: Valkey, unique: str
) -> None:
    """Not ready with the reason, no growth of open files; then the broker comes."""
    own_redis.stop()
    pod = await (await pods.launch(settings_of(outbox, {"main": sink(own_redis)}))).live()
    assert "sink main" in await pod.unready()
    ids = await insert(outbox, [(unique, "a", "{}")] * 20)
    await pod.says('"message":"sink is down"')
    own_redis.start()
    await pod.ready()
    async with redis_consumer(own_redis.url, [unique]) as consumer:
        await consumer.wait_for(ids)
        assert consumer.ids == ids
    assert await pod.stopped() == 0
    assert_at_rest(outbox)


async def test_a_pod_that_starts_before_its_database_is_live_and_recovers_by_itself(
    own_postgres: Postgres, outbox_factory: OutboxFactory, pods: Pods, valkey: Valkey, unique: str
) -> None:
    """Not ready with the reason; SIGTERM meanwhile ends it at once."""
    outbox = outbox_factory(server=own_postgres)
    ids = await insert(outbox, [(unique, "a", "{}")] * 20)
    own_postgres.stop()
    settings = settings_of(outbox, {"main": sink(valkey)})
    waiting, impatient = [await (await pods.launch(settings)).live() for _ in range(2)]
    assert "source" in await waiting.unready()
    assert await impatient.stopped() == 0
    own_postgres.start()
    await waiting.ready()
    async with redis_consumer(valkey.url, [unique]) as consumer:
        await consumer.wait_for(ids)
        assert consumer.ids == ids
    assert await waiting.stopped() == 0
    assert_at_rest(outbox)


async def test_kafka_and_rabbitmq_that_are_down_at_the_start_are_waited_for(outbox: Outbox, pods: Pods) -> None:
    """Live, not ready, few descriptors, and SIGTERM ends it (FIELD.md C1)."""
    sinks = {
        "kafka": {"type": "kafka", "bootstrap_servers": f"127.0.0.1:{free_port()}", "publish_timeout_seconds": 1.0},
        "rabbit": {"type": "rabbitmq", "url": f"amqp://u:p@127.0.0.1:{free_port()}/", "publish_timeout_seconds": 1.0},
    }
    routes = [{"topic": "*", "sinks": list(sinks)}]
    settings = settings_of(outbox, sinks, routes=routes, pipeline={"grace_seconds": 3.0})
    pod = await (await pods.launch(settings)).live()
    reasons = await pod.unready()
    assert "sink kafka" in reasons
    assert "sink rabbit" in reasons
    await insert(outbox, [("t", f"k{number}", "{}") for number in range(100)], one_by_one=False)
    await pod.says('"message":"sink is down"', 2)
    files = pod.open_files

    async def tried_often() -> bool:
        return bool(await pod.metric("relay_failures_total", kind="sink_down") >= 500)

    await eventually("several more attempts", tried_often)
    assert pod.open_files <= files + 10
    assert left_behind(outbox) == {"unsettled": 100, "parked": 0, "dead letters": 0}
    assert await pod.stopped() == 0


async def test_a_dead_sink_parks_its_deliveries_and_the_other_keeps_its_pace(
    outbox: Outbox, pods: Pods, own_redis: Valkey, valkey: Valkey, unique: str, seed: int
) -> None:
    """Two sinks, one dies; pods are killed meanwhile; after its recovery everything is there, in order."""
    stream = f"{unique}.orders"
    settings = settings_of(
        outbox,
        {"steady": sink(valkey), "shaky": sink(own_redis)},
        routes=[{"topic": "*", "sinks": ["steady", "shaky"]}],
        pipeline={"park_outage_after_seconds": 1.0},
    )
    await pods.start_many(2, settings)
    async with redis_consumer(valkey.url, [stream]) as steady, redis_consumer(own_redis.url, [stream]) as shaky:
        async with Load(outbox, [stream], seed=seed, writers=6, late_seconds=0) as load:
            await shaky.wait_for_count(50)
            own_redis.stop()

            async def parking() -> bool:
                return left_behind(outbox)["parked"] > 0

            await eventually("the first parked delivery", parking)
            mark = len(load.ledger)
            await asyncio.to_thread(pods.running[0].kill9)
            await pods.start(settings)
            assert await pods.running[0].is_fully_ready()  # one sink takes messages
            await steady.wait_for_count(mark + 200)
            latency = await _latencies(outbox, steady, stream, load.ledger)
            own_redis.start()
            await shaky.wait_for_count(mark + 200)
        await steady.wait_for(load.ledger.ids)
        await shaky.wait_for(load.ledger.ids)
        await pods.stop_all()
        for consumer in (steady, shaky):
            await consumer.drain()
            judge(load.ledger, consumer).assert_kept()
    assert statistics.median(latency) < 1.0, latency
    assert_at_rest(outbox)


async def _latencies(outbox: Outbox, consumer: Consumer, stream: str, ledger: Ledger) -> list[float]:
    """Seconds from commit to arrival of single events, seen from outside."""
    found = []
    for number in range(10):
        (event,) = await insert(outbox, [(stream, f"probe{number}", "{}")])
        ledger.committed[f"probe{number}"].append(event)
        began = time.monotonic()
        await consumer.wait_for([event])
        found.append(time.monotonic() - began)
    return found
