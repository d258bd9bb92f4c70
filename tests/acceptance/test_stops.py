"""Stops and takeovers: nothing lost, nothing repeated without a fault, and nobody waits for a lease to run out."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from tests.acceptance.consumers import redis_consumer
from tests.acceptance.judges import assert_at_rest, judge
from tests.acceptance.pods import eventually, settings_of
from tests.acceptance.writers import Load, insert

if TYPE_CHECKING:
    from tests.acceptance.pods import Pod, Pods
    from tests.outbox import Outbox
    from tests.servers.redis import Valkey

USUAL_LEASES = {"ttl_seconds": 15.0, "margin_seconds": 3.0}


def settings_for(outbox: Outbox, server: Valkey, **sections: Any) -> dict[str, Any]:
    """With the leases that production has."""
    return settings_of(outbox, {"main": {"type": "redis", "url": server.url}}, leases=USUAL_LEASES, **sections)


async def owns_lanes(pod: Pod, count: int) -> None:
    """Wait until a pod owns so many lanes."""

    async def reached() -> bool:
        return await pod.metric("relay_lanes_owned") == count

    await eventually(f"{count} lanes", reached)


async def test_without_faults_nothing_is_repeated_while_pods_come_and_go(
    outbox: Outbox, pods: Pods, valkey: Valkey, unique: str
) -> None:
    """Four pods, 200 rows, exactly 200 messages, though pods start and stop meanwhile."""
    settings = settings_for(outbox, valkey)
    first = await pods.start_many(4, settings)
    async with redis_consumer(valkey.url, [unique]) as consumer:
        ids: list[str] = []

        async def write() -> None:
            for _ in range(10):
                ids.extend(await insert(outbox, [(unique, f"k{number}", "{}") for number in range(20)]))
                await consumer.wait_for(ids)

        async def come_and_go() -> None:
            for pod in first[:2]:
                assert await pod.stopped() == 0
                await pods.start(settings)

        await asyncio.gather(write(), come_and_go())
        await pods.stop_all()
        await consumer.drain()
        assert sorted(consumer.ids) == sorted(ids)
        for key in range(20):
            assert [event for event in consumer.ids if event in set(ids[key::20])] == ids[key::20]
    assert_at_rest(outbox)


async def test_sigterm_under_load_loses_and_repeats_nothing(
    outbox: Outbox, pods: Pods, valkey: Valkey, unique: str, seed: int
) -> None:
    """A rolling deploy of two pods at a few hundred events a second (FIELD.md F1)."""
    settings = settings_for(outbox, valkey)
    old = await pods.start_many(2, settings)
    async with redis_consumer(valkey.url, [unique]) as consumer:
        async with Load(outbox, [unique], seed=seed, writers=8, late_seconds=1.0) as load:
            for pod in old:
                await consumer.wait_for_count(len(consumer.deliveries) + 100)
                assert await pod.stopped() == 0
                await pods.start(settings)
            await consumer.wait_for_count(len(consumer.deliveries) + 100)
        await consumer.wait_for(load.ledger.ids)
        await pods.stop_all()
        await consumer.drain()
        judgement = judge(load.ledger, consumer)
        judgement.assert_kept()
        assert judgement.repeats == 0
    assert_at_rest(outbox)


async def test_a_second_signal_ends_at_once(outbox: Outbox, pods: Pods, own_redis: Valkey, unique: str) -> None:
    """A frozen broker keeps the first signal waiting; the second does not wait. Nothing is lost."""
    settings = settings_for(outbox, own_redis, pipeline={"grace_seconds": 60.0})
    pod = await pods.start(settings)
    own_redis.freeze()
    ids = await insert(outbox, [(unique, f"k{number}", "{}") for number in range(50)], one_by_one=False)

    async def in_flight() -> bool:
        return await pod.metric("relay_in_flight_events") > 0

    await eventually("events in flight", in_flight)
    pod.terminate()
    await pod.says("stopping: finishing what is in flight")
    assert pod.running
    began = time.monotonic()
    pod.terminate()
    assert await pod.exit_code() == 1
    assert time.monotonic() - began < 4.0
    own_redis.thaw()
    await pods.start(settings)
    async with redis_consumer(own_redis.url, [unique]) as consumer:
        await consumer.wait_for(ids)
    await pods.stop_all()
    assert_at_rest(outbox)


async def test_a_killed_pods_lanes_are_taken_over_long_before_its_lease_runs_out(
    outbox: Outbox, pods: Pods, valkey: Valkey, unique: str
) -> None:
    """Two pods, one is killed; with a ttl of 15 s its keys flow again within about two, by its session's lock."""
    settings = settings_for(outbox, valkey)
    killed, heir = await pods.start_many(2, settings)
    await owns_lanes(killed, 32)
    await owns_lanes(heir, 32)
    async with redis_consumer(valkey.url, [unique]) as consumer:
        await asyncio.to_thread(killed.kill9)
        began = time.monotonic()
        ids = await insert(outbox, [(unique, f"k{number}", "{}") for number in range(200)], one_by_one=False)
        await consumer.wait_for(ids)
        took = time.monotonic() - began
        assert took < 4.0, f"{took:.1f} s"
        assert len(consumer.ids) == 200
    await pods.stop_all()


async def test_the_first_event_after_a_kill_waits_for_the_process_to_start_and_no_longer(
    outbox: Outbox, pods: Pods, valkey: Valkey, unique: str
) -> None:
    """The only pod is killed with a backlog; its successor does not wait for the old lease."""
    settings = settings_for(outbox, valkey)
    pod = await pods.start(settings)
    await owns_lanes(pod, 64)
    await asyncio.to_thread(pod.kill9)
    ids = await insert(outbox, [(unique, f"k{number}", "{}") for number in range(200)], one_by_one=False)
    async with redis_consumer(valkey.url, [unique]) as consumer:
        successor = await (await pods.launch(settings)).live()
        began = time.monotonic()
        await consumer.wait_for(ids)
        took = time.monotonic() - began
        assert took < 3.0, f"{took:.1f} s"
        assert await successor.stopped() == 0
    assert_at_rest(outbox)
