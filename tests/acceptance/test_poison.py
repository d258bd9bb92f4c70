"""One event that cannot be delivered: its key waits in order, everybody else goes on, attempts are counted once."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

from tests.acceptance.consumers import bind, rabbitmq_consumer
from tests.acceptance.judges import assert_at_rest, left_behind
from tests.acceptance.pods import eventually, relay_command, settings_of
from tests.acceptance.writers import insert

if TYPE_CHECKING:
    from pathlib import Path

    from tests.acceptance.pods import Pods
    from tests.outbox import Outbox

ROUTES_HOLD = [{"topic": "*", "sinks": ["main"], "on_dead_letter": "hold"}]


async def dead_letters(outbox: Outbox, count: int) -> list[tuple[Any, ...]]:
    """Wait for so many; (id, attempts, kind, reason) in their order."""

    async def found() -> list[tuple[Any, ...]]:
        rows = outbox.execute("SELECT id::text, attempts, kind, reason FROM {dead_letter} ORDER BY number")
        return rows if len(rows) >= count else []

    return list(await eventually(f"{count} dead letters", found))


async def test_attempts_are_counted_once_however_many_pods_there_are(
    outbox: Outbox, pods: Pods, vhost: str, unique: str
) -> None:
    """One unroutable event in a batch of ten keys, four pods: five attempts on the broker in all; its key keeps its order."""
    good, lost = f"{unique}.good", f"{unique}.nowhere"
    async with rabbitmq_consumer(vhost, unique, [good]) as consumer:
        sink = {"type": "rabbitmq", "url": vhost, "exchange": unique}
        settings = settings_of(outbox, {"main": sink}, retry={"attempts_max": 5}, routes=ROUTES_HOLD)
        rows = [(lost if number == 3 else good, f"k{number % 10}", f'{{"n":{number}}}') for number in range(50)]
        ids = await insert(outbox, rows, one_by_one=False)
        running = await pods.start_many(4, settings)
        others = [event for number, event in enumerate(ids) if number % 10 != 3]
        await consumer.wait_for(others)
        ((event, attempts, kind, reason),) = await dead_letters(outbox, 1)
        assert (event, attempts, kind) == (ids[3], 5, "attempts")
        assert "NO_ROUTE" in reason.upper() or "rout" in reason
        # Behind it, in the same batch: held, not sent ahead and not lost.
        assert not set(consumer.ids) & set(ids[13::10])
        failures = [await pod.metric("relay_failures_total", sink="main") for pod in running]
        assert sum(failures) == 5
        assert sorted(set(consumer.ids)) == sorted(others)
        assert len(consumer.ids) == len(others)


async def test_a_retried_dead_letter_comes_in_order_before_what_waited_for_it(
    outbox: Outbox, pods: Pods, vhost: str, unique: str, tmp_path: Path
) -> None:
    """Three of ten events of each of five keys cannot be routed; `hold` stops the key at the first of them.

    A retry before the cause is gone dies again, after fresh attempts. One after it brings everything in order.
    """
    good, lost = f"{unique}.good", f"{unique}.nowhere"
    sink = {"type": "rabbitmq", "url": vhost, "exchange": unique}
    settings = settings_of(outbox, {"main": sink}, retry={"attempts_max": 2}, routes=ROUTES_HOLD)
    rows = [(lost if number in {2, 5, 8} else good, f"k{key}", "{}") for number in range(10) for key in range(5)]
    async with rabbitmq_consumer(vhost, unique, [good]) as consumer:
        await pods.start_many(2, settings)
        ids = await insert(outbox, rows)
        letters = await dead_letters(outbox, 5)
        assert sorted(event for event, *_ in letters) == sorted(ids[10:15])
        await consumer.wait_for(ids[:10])

        listed = await asyncio.to_thread(relay_command, tmp_path, "dead-letters", "list", "--json", settings=settings)
        assert listed.returncode == 0, listed.stderr
        assert all(event in listed.stdout for event in ids[10:15])
        retry = "dead-letters", "retry", "--all"
        assert (await asyncio.to_thread(relay_command, tmp_path, *retry, settings=settings)).returncode == 0
        again = await dead_letters(outbox, 5)
        assert {attempts for _, attempts, *_ in again} == {2}
        assert len(set(consumer.ids)) == 10

        await bind(vhost, unique, lost)
        assert (await asyncio.to_thread(relay_command, tmp_path, *retry, settings=settings)).returncode == 0
        await consumer.wait_for(ids)
        await pods.stop_all()
        await consumer.drain()
    for key in range(5):
        assert [event for event in consumer.ids if event in set(ids[key::5])] == ids[key::5]
    assert_at_rest(outbox)


async def test_good_events_flow_at_once_past_a_hundred_that_are_poison(
    outbox: Outbox, pods: Pods, vhost: str, unique: str
) -> None:
    """A hundred unroutable events are the oldest; ten thousand good ones of other keys do not wait for their retries."""
    good = f"{unique}.good"
    poison = [(f"{unique}.nowhere", f"poison{number}", "{}") for number in range(100)]
    rows = [(good, f"key{number % 500}", json.dumps({"n": number})) for number in range(10_000)]
    ids = await insert(outbox, poison + rows, one_by_one=False)
    retry = {"attempts_max": 4, "base_seconds": 5.0, "cap_seconds": 20.0}
    settings = settings_of(outbox, {"main": {"type": "rabbitmq", "url": vhost, "exchange": unique}}, retry=retry)
    async with rabbitmq_consumer(vhost, unique, [good]) as consumer:
        pod = await pods.start(settings)
        began = time.monotonic()
        await consumer.wait_for(ids[100:])
        took = time.monotonic() - began
        assert len(consumer.ids) == 10_000
        by_key: dict[str | None, int] = {}
        for delivery in consumer.deliveries:
            number = json.loads(delivery.payload or b"")["n"]
            assert by_key.get(delivery.key, -1) < number
            by_key[delivery.key] = number
        left = left_behind(outbox)
        assert left["dead letters"] == 0, f"the poison died before the good events had passed ({took:.1f} s)"
        assert left["parked"] == 100
        assert await pod.stopped() == 0
