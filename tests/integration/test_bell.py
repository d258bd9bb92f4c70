"""Sleep and wake-up on PostgreSQL: silent while anybody is awake, and nobody misses its wake-up (rule 9)."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from relay.config import Database
from relay.sources.polling.bell import PostgresBell
from tests.integration.pods import connected, lane_of, pod, publish, source_of, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import asyncpg

    from tests.outbox import Outbox, OutboxFactory

LONG = 3600.0
SOON = 10.0
INSERT = "INSERT INTO {outbox} (topic, key) VALUES ('t', 'k')"


@asynccontextmanager
async def bell_of(outbox: Outbox, name: str = "a", *, dsn: str | None = None) -> AsyncIterator[PostgresBell]:
    """A running bell whose session is there."""
    database = outbox.database if dsn is None else Database.model_validate({"dsn": dsn})
    bell = PostgresBell(database, outbox.names, name, direct=True, application="outbox-relay")
    there = asyncio.Event()
    bell.on_session = there.set
    running = asyncio.create_task(bell.run())
    try:
        await asyncio.wait_for(there.wait(), SOON)
        assert await bell.wait(SOON) == "reconnect"
        yield bell
    finally:
        running.cancel()
        await bell.close()


async def kill(outbox: Outbox, bell: PostgresBell) -> None:
    """End the bell's session on the server."""
    assert bell._connection is not None
    outbox.execute(f"SELECT pg_terminate_backend({bell._connection.get_server_pid()})")


def key_of(bell: PostgresBell) -> int | None:
    """The lock that its session holds now."""
    return bell.session_key


class Heard:
    """Notifications of the outbox's channel, counted without waiting for silence."""

    def __init__(self, connection: asyncpg.Connection[Any], outbox: Outbox) -> None:
        self._connection, self._channel = connection, outbox.names.channel
        self._count = 0
        self._end = asyncio.Event()

    async def listen(self) -> None:
        await self._connection.add_listener(self._channel, lambda *_: setattr(self, "_count", self._count + 1))
        await self._connection.add_listener("end", lambda *_: self._end.set())

    async def count(self) -> int:
        """Notifications so far: they come in the order of the commits, so our own one is the last."""
        self._end.clear()
        await self._connection.execute('NOTIFY "end"')
        await asyncio.wait_for(self._end.wait(), SOON)
        return self._count


@asynccontextmanager
async def hearing(outbox: Outbox) -> AsyncIterator[Heard]:
    async with connected(outbox.admin_dsn) as connection:
        heard = Heard(connection, outbox)
        await heard.listen()
        yield heard


# --- the trigger -----------------------------------------------------------------------------------


async def test_producers_are_silent_while_a_pod_is_awake(outbox: Outbox) -> None:
    """With and without a pod that says that it is busy: nobody sleeps, so nobody is notified."""
    async with hearing(outbox) as heard, bell_of(outbox) as bell:
        await publish(outbox, ("k", "{}"))
        await bell.busy()
        await publish(outbox, ("k", "{}"), ("k", "{}"))
        assert await heard.count() == 0


async def test_producers_notify_once_for_a_transaction_while_the_cluster_sleeps(outbox: Outbox) -> None:
    async with hearing(outbox) as heard, bell_of(outbox) as bell, connected(outbox.app_dsn) as app:
        assert await bell.sleep()
        async with app.transaction():
            for _ in range(3):
                await app.execute(outbox.names.format(INSERT))
            assert await heard.count() == 0
        assert await heard.count() == 1
        assert await bell.wait(SOON) == "notify"
        await bell.wake()
        await publish(outbox, ("k", "{}"))
        assert await heard.count() == 1


async def test_an_application_may_wake_the_relay_by_itself(outbox: Outbox) -> None:
    """`NOTIFY outbox`, with the application's role and without an event."""
    async with bell_of(outbox) as bell, connected(outbox.app_dsn) as app:
        assert await bell.sleep()
        await app.execute("NOTIFY outbox")
        assert await bell.wait(SOON) == "notify"


# --- the doorman -----------------------------------------------------------------------------------


async def test_nobody_sleeps_while_a_producer_is_in_flight(outbox: Outbox) -> None:
    """It inserted silently; what it commits would wake nobody. The lock is tried, not waited for."""
    async with bell_of(outbox) as bell, connected(outbox.app_dsn) as app:
        transaction = app.transaction()
        await transaction.start()
        await app.execute(outbox.names.format(INSERT))
        assert not await asyncio.wait_for(bell.sleep(), SOON)
        await transaction.commit()
        assert await bell.sleep()


async def test_an_orphaned_prepared_transaction_blocks_nobody(outbox: Outbox) -> None:
    """It may hold the lock for days: every try says no at once, and producers go on."""
    async with bell_of(outbox) as bell, connected(outbox.app_dsn) as app:
        await app.execute("BEGIN")
        await app.execute(outbox.names.format(INSERT))
        await app.execute(f"PREPARE TRANSACTION '{outbox.name}'")
        for _ in range(2):
            assert not await asyncio.wait_for(bell.sleep(), SOON)
            await publish(outbox, ("k", "{}"))
        await app.execute(f"ROLLBACK PREPARED '{outbox.name}'")
        assert await bell.sleep()


async def test_nobody_sleeps_while_another_pod_is_busy(outbox: Outbox) -> None:
    async with bell_of(outbox, "a") as a, bell_of(outbox, "b") as b:
        await a.busy()
        await b.busy()
        assert not await b.sleep()
        assert await a.sleep()
        assert await b.sleep()


async def test_a_pod_that_relies_on_the_doorman_hears_that_it_wakes(outbox: Outbox) -> None:
    """The doorman wakes for a reason of its own and producers fall silent: all the others must be awake too."""
    async with bell_of(outbox, "a") as a, bell_of(outbox, "b") as b:
        assert await a.sleep()
        assert await b.sleep()
        a.ring()
        assert await a.wait(SOON) == "ring"
        await a.wake()
        assert await b.wait(SOON) == "notify"
        assert await b.sleep()


async def test_one_doorman_is_enough(outbox: Outbox) -> None:
    """The second sleeper wakes first and goes: producers still notify, because the doorman still sleeps."""
    async with hearing(outbox) as heard, bell_of(outbox, "a") as a, bell_of(outbox, "b") as b:
        assert await a.sleep()
        assert await b.sleep()
        await b.wake()
        before = await heard.count()
        await publish(outbox, ("k", "{}"))
        assert await heard.count() == before + 1


async def test_the_doormans_death_wakes_who_relied_on_it(outbox: Outbox) -> None:
    """Its session ends, its lock is gone and producers are silent: it says so as soon as it is back."""
    async with bell_of(outbox, "a") as a, bell_of(outbox, "b") as b:
        assert await a.sleep()
        assert await b.sleep()
        await kill(outbox, a)
        assert await b.wait(SOON) == "notify"


async def test_a_session_that_ends_is_made_again(outbox: Outbox) -> None:
    """It says so each time, ends a wait, and hears again (FIELD.md B7)."""
    async with bell_of(outbox) as bell:
        sessions: list[bool] = []
        bell.on_session = lambda: sessions.append(bell.session_key is not None)
        assert key_of(bell) == outbox.names.advisory_key("pod a")
        await kill(outbox, bell)
        assert await bell.wait(SOON) == "reconnect"
        if key_of(bell) is None:
            assert await bell.wait(SOON) == "reconnect"
        assert sessions == [False, True]
        assert await bell.sleep()
        await publish(outbox, ("k", "{}"))
        assert await bell.wait(SOON) == "notify"


async def test_a_session_that_did_not_get_the_pods_lock_does_not_vouch_for_it(outbox: Outbox) -> None:
    """An older session of this pod is cut off, and the server has not noticed: with it the lock will go."""
    key = outbox.names.advisory_key("pod a")
    async with connected(outbox.relay_dsn) as old:
        await old.execute("SELECT pg_advisory_lock($1)", key)
        async with bell_of(outbox) as bell:
            assert bell.session_key is None
            assert await bell.sleep()


async def test_without_a_direct_session_nobody_sleeps(outbox: Outbox) -> None:
    """And nothing fails: a wait is a timer, or ends with a ring."""
    bell = PostgresBell(outbox.database, outbox.names, "a", direct=False, application="outbox-relay")
    await bell.busy()
    assert not await bell.sleep()
    await bell.wake()
    assert await bell.wait(0.001) == "timeout"
    bell.ring()
    assert await bell.wait(SOON) == "ring"
    assert bell.session_key is None


async def test_two_outboxes_of_one_database_do_not_wake_each_other(outbox_factory: OutboxFactory) -> None:
    """Lock and channel belong to the schema and table."""
    one, other = outbox_factory(), outbox_factory(schema="My.App", table='Out"Box')
    async with bell_of(other) as asleep:
        assert one.names.lock_key != other.names.lock_key
        assert await asleep.sleep()
        async with connected(other.app_dsn) as app:
            await app.execute("NOTIFY outbox")
            await app.execute(other.names.format(INSERT))
        assert await asleep.wait(SOON) == "notify"


# --- the whole -------------------------------------------------------------------------------------


async def test_no_event_waits_for_the_fallback(outbox: Outbox) -> None:
    """Two pods fall asleep and are woken at any moment of it; the fallback is an hour away.

    With a lock per pod, or a doorman that tells nobody that it wakes, one of these events is read by nobody.
    """
    rng = random.Random(1)
    keys = [f"k{number}" for number in range(20)]
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        pods = [await stack.enter_async_context(pod(outbox, name)) for name in "ab"]
        bells = [await stack.enter_async_context(bell_of(outbox, name)) for name in "ab"]
        sinks, tasks, lanes = [], [], []
        for one, bell in zip(pods, bells, strict=True):
            source, sink, metrics = source_of(one, bell, fallback_interval_seconds=LONG)
            owned = await one.join(32)
            source.gain(owned.values())
            sinks.append((sink, metrics))
            lanes.append(owned)
            tasks.append(group.create_task(source.run()))
        for number in range(1, 13):
            if number % 4 == 0:
                await until(partial(all_asleep, [metrics for _, metrics in sinks]))
            else:
                await asyncio.sleep(rng.uniform(0.1, 0.35))  # not to wait for something, but to hit any moment
            key = rng.choice(keys)
            await publish(outbox, (key, "{}"))
            owner = 0 if lane_of(outbox, key) in lanes[0] else 1
            await sinks[owner][0].has(number, SOON)
        for task in tasks:
            task.cancel()


async def test_a_lost_notification_costs_the_fallback_at_most(outbox: Outbox) -> None:
    """Nothing notifies at all, and the event is read all the same."""
    outbox.execute("ALTER TABLE {outbox} DISABLE TRIGGER USER")
    async with pod(outbox) as one, bell_of(outbox) as bell, asyncio.TaskGroup() as group:
        source, sink, metrics = source_of(one, bell, fallback_interval_seconds=0.2)
        source.gain((await one.join()).values())
        task = group.create_task(source.run())
        await until(partial(all_asleep, [metrics]))
        await publish(outbox, ("k", "{}"))
        await sink.has(1, SOON)
        task.cancel()


async def all_asleep(metrics: list[Any]) -> bool:
    return all(one.asleep._value.get() == 1 for one in metrics)
