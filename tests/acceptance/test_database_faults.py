"""PostgreSQL crashes, sessions die, poolers stand between, and migrations run under load."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from tests.acceptance.consumers import redis_consumer
from tests.acceptance.judges import assert_at_rest, judge
from tests.acceptance.pods import eventually, settings_of
from tests.acceptance.writers import Load, insert
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import Database

if TYPE_CHECKING:
    from tests.acceptance.pods import Pods
    from tests.conftest import MakeProxy
    from tests.outbox import Outbox, OutboxFactory
    from tests.servers.postgres import Postgres
    from tests.servers.redis import Valkey

BELLS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'outbox-relay bell' AND datname = current_database()"


def settings_for(outbox: Outbox, server: Valkey, **sections: Any) -> dict[str, Any]:
    return settings_of(outbox, {"main": {"type": "redis", "url": server.url}}, **sections)


async def test_a_database_that_crashes_under_load_costs_nothing_but_time(
    own_postgres: Postgres, outbox_factory: OutboxFactory, pods: Pods, valkey: Valkey, unique: str, seed: int
) -> None:
    """The whole server is killed twice, under two pods and eight writers; the pods find it again by themselves."""
    outbox = outbox_factory(server=own_postgres)
    await pods.start_many(2, settings_for(outbox, valkey))
    async with redis_consumer(valkey.url, [unique]) as consumer:
        async with Load(outbox, [unique], seed=seed, writers=8, late_seconds=0.5) as load:
            for _ in range(2):
                await consumer.wait_for_count(len(set(consumer.ids)) + 100)
                await asyncio.to_thread(own_postgres.kill9)
                await asyncio.to_thread(own_postgres.start)
            await consumer.wait_for_count(len(set(consumer.ids)) + 100)
        await consumer.wait_for(load.ledger.ids)
        assert all([await pod.is_live() for pod in pods.running])
        await pods.stop_all()
        await consumer.drain()
        judge(load.ledger, consumer).assert_kept()
    assert_at_rest(outbox)


async def test_sigterm_while_the_database_is_silent_ends_inside_the_grace_period(
    outbox: Outbox, pods: Pods, valkey: Valkey, proxy: MakeProxy
) -> None:
    """Connections stay open and nothing comes back, as after a cut in the network: every call that waits is given up."""
    wall = await proxy(outbox.server.host, outbox.server.port)
    database = {"dsn": outbox.relay_dsn.replace(f":{outbox.server.port}/", f":{wall.port}/")}
    settings = settings_for(outbox, valkey, database=database, pipeline={"grace_seconds": 4.0})
    pod = await pods.start(settings)
    await pod.ready()
    wall.swallow_replies()
    seen = wall.bytes_swallowed
    await wall.wait_until(lambda: wall.bytes_swallowed > seen)
    began = time.monotonic()
    assert await pod.stopped() == 0
    assert time.monotonic() - began < 4.0 + 2.0


async def test_a_terminated_listener_listens_again_and_reads_at_once(
    outbox: Outbox, pods: Pods, valkey: Valkey, unique: str
) -> None:
    """The direct session of a sleeping pod is terminated; events wake it, before and after it is back (FIELD.md B7)."""
    polling = {"fallback_interval_seconds": 300.0}
    pod = await pods.start(settings_for(outbox, valkey, source={"polling": polling}, leases={"ttl_seconds": 15.0}))

    async def asleep() -> bool:
        return await pod.metric("relay_asleep") == 1

    async with redis_consumer(valkey.url, [unique]) as consumer:
        for _ in range(2):
            await eventually("asleep", asleep)
            outbox.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE application_name = 'outbox-relay bell' AND datname = current_database()"
            )
            began = time.monotonic()
            await consumer.wait_for(await insert(outbox, [(unique, "a", "{}")]))
            assert time.monotonic() - began < 5.0

            async def listens() -> bool:
                return outbox.execute(BELLS) == [(1,)]

            await eventually("a new direct session", listens)
            await eventually("asleep again", asleep)
            began = time.monotonic()
            await consumer.wait_for(await insert(outbox, [(unique, "a", "{}")]))
            assert time.monotonic() - began < 2.0
        assert len(consumer.ids) == 4
    assert await pod.stopped() == 0


@pytest.mark.parametrize("direct", [True, False], ids=["with direct_dsn", "without direct_dsn"])
async def test_the_relay_works_through_a_pooler_in_transaction_mode(
    outbox: Outbox, pods: Pods, valkey: Valkey, unique: str, seed: int, direct: bool
) -> None:
    """Two pods, one of them killed; with a direct address they sleep and wake, without one they poll (FIELD.md B8)."""
    with PgBouncer(Database(outbox.server, outbox.name)) as pooler:
        database = {"dsn": pooler.dsn_of("test_relay")}
        if direct:
            database["direct_dsn"] = outbox.relay_dsn
        settings = settings_for(outbox, valkey, database=database)
        killed, _ = await pods.start_many(2, settings)
        async with redis_consumer(valkey.url, [unique]) as consumer:
            async with Load(outbox, [unique], seed=seed, writers=4, late_seconds=0.5) as load:
                await consumer.wait_for_count(100)
                await asyncio.to_thread(killed.kill9)
                await pods.start(settings)
                await consumer.wait_for_count(len(set(consumer.ids)) + 100)
            await consumer.wait_for(load.ledger.ids)
            assert outbox.execute(BELLS) == [(2 if direct else 0,)]
            await pods.stop_all()
            await consumer.drain()
            judge(load.ledger, consumer).assert_kept()
    assert_at_rest(outbox)


async def test_schema_changes_under_load_need_no_restart(
    outbox: Outbox, pods: Pods, valkey: Valkey, unique: str, seed: int
) -> None:
    """ADD COLUMN, ALTER TYPE, indexes and ANALYZE while events flow: cached plans die, the relay does not (FIELD.md B16)."""
    pod = await pods.start(settings_for(outbox, valkey))
    changes = (
        "ALTER TABLE {outbox} ADD COLUMN note text DEFAULT 'x'",
        "CREATE INDEX CONCURRENTLY outbox_note ON {outbox} (note)",
        "ALTER TABLE {outbox} ALTER COLUMN note TYPE varchar(99)",
        "DROP INDEX CONCURRENTLY outbox_note",
        "REINDEX TABLE CONCURRENTLY {outbox}",
        "ALTER TABLE {outbox} DROP COLUMN note",
        "ALTER TABLE {outbox} ALTER COLUMN topic TYPE varchar(300)",
    )
    async with redis_consumer(valkey.url, [unique]) as consumer:
        async with Load(outbox, [unique], seed=seed, writers=4, late_seconds=0) as load:
            for change in changes:
                await consumer.wait_for_count(len(set(consumer.ids)) + 40)
                await asyncio.to_thread(_alter, outbox, change)
            await consumer.wait_for_count(len(set(consumer.ids)) + 40)
        await consumer.wait_for(load.ledger.ids)
        assert pod.running
        assert await pod.stopped() == 0
        await consumer.drain()
        judge(load.ledger, consumer).assert_kept()
    assert_at_rest(outbox)


def _alter(outbox: Outbox, change: str) -> None:
    """As a careful migration does: with a lock timeout, tried again."""
    with psycopg.connect(outbox.owner_dsn, autocommit=True) as connection:
        connection.execute("SET lock_timeout = '200ms'")
        deadline = time.monotonic() + 30
        while True:
            try:
                connection.execute(outbox.names.format(change).encode())
            except psycopg.errors.LockNotAvailable:
                assert time.monotonic() < deadline, f"never got its lock: {change}"
            else:
                return
