"""`relay migrate`: from nothing or any earlier version to the latest, by any number of pods at once."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import pytest

from relay.config import Database
from relay.errors import InvalidConfig, PermissionMissing, SchemaMismatch, SourceUnavailable
from relay.migrate import Migration, check, load, plan, require_current, run
from tests.migration.catalog import dump

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from relay.demo.servers import Postgres
    from tests.outbox import Outbox, OutboxFactory
    from tests.servers.pgbouncer import PgBouncer

FILES = load()
NEXT = Migration(
    len(FILES), "comes_later", "ALTER TABLE {outbox} ADD COLUMN later int;\nCREATE TABLE {schema}.later (n int);\n"
)
"""A migration that needs the strongest lock on the outbox."""

LAYOUTS = pytest.mark.parametrize("partitioned", [False, True], ids=["plain", "partitioned"])


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


async def execute_script(dsn: str, script: str) -> None:
    async with connected(dsn) as connection:
        await connection.execute(script)


@LAYOUTS
@pytest.mark.parametrize("payload", ["json", "jsonb", "text", "bytea"])
def test_every_kind_on_every_version(
    outbox_factory: OutboxFactory, any_postgres: Postgres, payload: str, partitioned: bool
) -> None:
    """An outbox of each kind takes rows from an INSERT and from the function, and numbers them in order."""
    outbox = outbox_factory(server=any_postgres, payload=payload, partitioned=partitioned)
    with psycopg.connect(outbox.app_dsn) as app:
        app.execute(
            outbox.names.format(
                """INSERT INTO {outbox} (topic, key, payload, headers) VALUES ('t', 'k', '{"a":1}', '{"h":"v"}')"""
            ).encode()
        )
        row = app.execute(
            outbox.names.format("""SELECT {publish}('t', '{"a":2}', 'k', headers => '{"h":"v"}')""").encode()
        ).fetchone()
    assert row is not None
    stored = outbox.execute(
        "SELECT seq, id, lane, xid = xmin::text::bigint, published_at IS NULL FROM {outbox} ORDER BY seq"
    )
    assert [r[0] for r in stored] == [1, 2]
    assert stored[1][1] == row[0]
    assert stored[0][2] == stored[1][2]
    assert {r[3:] for r in stored} == {(True, True)}


@LAYOUTS
@pytest.mark.parametrize("version", range(len(FILES)))
async def test_migrating_from_every_earlier_version_equals_the_fresh_schema(
    outbox_factory: OutboxFactory, version: int, partitioned: bool
) -> None:
    """Tables, columns, defaults, indexes, constraints, functions, triggers and storage are the same."""
    fresh = outbox_factory(partitioned=partitioned)
    upgraded = outbox_factory(partitioned=partitioned, migrated=False)
    migrations = FILES[: version + 1]
    # The last step of a partitioned outbox calls a function of the last migration.
    await run(upgraded.owner.model_copy(update={"partitioned": False}), migrations=migrations[:1])
    for migration in migrations[1:]:
        await apply(upgraded, migration)
    assert (await check(upgraded.owner)).version == version
    await run(upgraded.owner)
    assert without_grants(dump(upgraded)) == without_grants(dump(fresh))


async def apply(outbox: Outbox, migration: Migration) -> None:
    """One migration as `run` does it, from its own plan."""
    script = await plan(outbox.owner, migrations=FILES[: migration.version + 1])
    first_step = script.split("COMMIT;\n")[0] + "COMMIT;\n"
    await execute_script(outbox.owner_dsn, first_step)


def without_grants(catalog: dict[str, list[tuple[Any, ...]]]) -> dict[str, list[tuple[Any, ...]]]:
    """The fixture ran the roles script on one of the two."""
    return catalog | {"functions": [row[:1] for row in catalog["functions"]]}


@LAYOUTS
async def test_the_plan_is_what_run_would_do(outbox_factory: OutboxFactory, partitioned: bool) -> None:
    """An operator who may not run it can hand the script of `--dry-run` to somebody who may."""
    options: dict[str, Any] = {"partitioned": partitioned, "schema": "My.App", "notify": False}
    by_hand, by_run = (outbox_factory(migrated=False, **options) for _ in range(2))
    script = await plan(by_hand.owner)
    assert (await check(by_hand.owner)).version == -1, "planning changed something"
    await execute_script(by_hand.owner_dsn, script)
    await run(by_run.owner)
    assert dump(by_hand) == dump(by_run)
    assert await plan(by_hand.owner) == ""
    assert (await check(by_hand.owner)).state == "current"


async def test_running_again_does_nothing(outbox: Outbox) -> None:
    """No step, no new schema, and no write."""
    before = dump(outbox)
    (xid,) = outbox.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text")[0]
    assert await run(outbox.owner) == []
    assert outbox.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text") == [(xid,)]
    assert dump(outbox) == before


async def test_many_pods_at_once(outbox_factory: OutboxFactory) -> None:
    """Each migration is done exactly once, by whoever came first; all return when it is done."""
    outbox = outbox_factory(migrated=False, schema="app", partitioned=True)
    done = await asyncio.gather(*(run(outbox.owner) for _ in range(12)))
    assert sorted(step.name for steps in done for step in steps) == [f"{m.version:04d}_{m.name}" for m in FILES]
    assert (await check(outbox.owner)).state == "current"


async def test_a_failed_migration_leaves_whole_steps(outbox: Outbox) -> None:
    """Its own step is rolled back; the next run with a repaired file goes on from there."""
    broken = Migration(NEXT.version, NEXT.name, NEXT.template + "SELECT 1/0;\n")
    with pytest.raises(asyncpg.DivisionByZeroError):
        await run(outbox.owner, migrations=[*FILES, broken])
    assert (await check(outbox.owner, migrations=[*FILES, NEXT])).pending == ("0005_comes_later",)
    assert [step.name for step in await run(outbox.owner, migrations=[*FILES, NEXT])] == ["0005_comes_later"]


@LAYOUTS
async def test_producers_go_on_while_a_migration_waits(outbox_factory: OutboxFactory, partitioned: bool) -> None:
    """A long open writer holds the migration up; other writers must not queue behind it for longer than a moment."""
    outbox = outbox_factory(partitioned=partitioned)
    insert = outbox.names.format("INSERT INTO {outbox} (topic) VALUES ('t')")
    async with connected(outbox.app_dsn) as long_writer, connected(outbox.app_dsn) as producer:
        await long_writer.execute(f"BEGIN; {insert}")
        migration = asyncio.create_task(run(outbox.owner, migrations=[*FILES, NEXT]))
        await wait_for_lock_request(outbox)
        # Longer than one try of the migration, far shorter than the writer's transaction.
        await producer.execute("SET lock_timeout = '3s'")
        for _ in range(200):
            await producer.execute(insert)
        assert not migration.done()
        await long_writer.execute("COMMIT")
        assert [step.name for step in await migration] == ["0005_comes_later"]
    assert outbox.execute("SELECT count(*) FROM {outbox}") == [(201,)]


async def wait_for_lock_request(outbox: Outbox) -> None:
    """Until somebody waits for the outbox; the server is asked again as fast as it answers."""
    waiting = "SELECT count(*) FROM pg_locks WHERE relation = {outbox_literal}::regclass AND NOT granted"
    async with asyncio.timeout(20), connected(outbox.admin_dsn) as observer:
        while not await observer.fetchval(outbox.names.format(waiting)):
            continue


async def test_a_migration_that_cannot_get_its_lock_names_the_holder(outbox: Outbox) -> None:
    """An open transaction by its process id; the migration has changed nothing."""
    async with connected(outbox.app_dsn) as writer:
        await writer.execute(outbox.names.format("BEGIN; INSERT INTO {outbox} (topic) VALUES ('t')"))
        with pytest.raises(SourceUnavailable, match=f"locked by pid {writer.get_server_pid()}"):
            await run(outbox.owner, migrations=[*FILES, NEXT], wait_seconds=0.3)
    assert (await check(outbox.owner)).state == "current"


async def test_a_prepared_transaction_that_holds_the_outbox_is_named(
    outbox_factory: OutboxFactory, any_postgres: Postgres
) -> None:
    """It has no process; its name is what the operator needs (FIELD.md B13)."""
    outbox = outbox_factory(server=any_postgres)
    async with connected(outbox.app_dsn) as writer:
        await writer.execute(outbox.names.format("BEGIN; INSERT INTO {outbox} (topic) VALUES ('t')"))
        await writer.execute(f"PREPARE TRANSACTION 'orphan-{outbox.name}'")
        try:
            with pytest.raises(SourceUnavailable, match=f"prepared transaction 'orphan-{outbox.name}'"):
                await run(outbox.owner, migrations=[*FILES, NEXT], wait_seconds=0.3)
        finally:
            await writer.execute(f"ROLLBACK PREPARED 'orphan-{outbox.name}'")


async def test_a_pod_that_waits_for_another_says_so(outbox: Outbox) -> None:
    """The other one may be waiting for a table itself."""
    async with connected(outbox.owner_dsn) as other:
        await other.execute(f"BEGIN; SELECT pg_advisory_xact_lock({outbox.names.advisory_key('migrate')})")
        with pytest.raises(SourceUnavailable, match="another process is migrating"):
            await run(outbox.owner, wait_seconds=0.3)


async def test_through_a_transaction_pooler(pgbouncer: PgBouncer) -> None:
    """Nothing of a migration lives in a session."""
    database = Database.model_validate({"dsn": pgbouncer.dsn, "partitioned": True})
    assert (await check(database)).state == "behind"
    assert len(await run(database)) == len(FILES)
    assert await run(database) == []
    assert (await check(database)).state == "current"


async def test_check_says_behind_current_and_ahead(outbox: Outbox) -> None:
    """Behind is for `--check` and stops `relay run`; ahead is an older pod in a rolling deploy and stops nobody."""
    assert (await check(outbox.owner)).state == "current"
    assert (await check(outbox.owner, migrations=[*FILES, NEXT])).state == "behind"
    await run(outbox.owner, migrations=[*FILES, NEXT])
    result = await check(outbox.owner)
    assert (result.state, result.version, result.latest, result.pending) == ("ahead", 5, 4, ())
    assert await run(outbox.owner) == []
    await require_current(outbox.database)


async def test_a_missing_schema_stops_with_the_next_command(outbox_factory: OutboxFactory) -> None:
    """`relay run` before `relay migrate`."""
    outbox = outbox_factory(migrated=False)
    with pytest.raises(SchemaMismatch, match="is behind") as caught:
        await require_current(outbox.owner)
    assert "relay migrate" in caught.value.hint


@pytest.mark.parametrize(
    "foreign",
    ["CREATE TABLE {outbox} (id int)", "CREATE VIEW {outbox} AS SELECT 1", "CREATE TABLE {migration} (id int)"],
)
async def test_a_foreign_table_is_left_alone(outbox_factory: OutboxFactory, foreign: str) -> None:
    """Something of that name exists, and `relay migrate` did not make it."""
    outbox = outbox_factory(migrated=False)
    outbox.execute(foreign)
    outbox.execute("GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO PUBLIC")
    before = dump(outbox)
    for call in (run, plan, check):
        with pytest.raises(SchemaMismatch, match=r'"public"\."outbox') as caught:
            await call(outbox.owner)
        assert "database.table" in caught.value.hint
    assert dump(outbox) == before


async def test_an_outbox_that_was_dropped_is_not_made_again_in_silence(outbox: Outbox) -> None:
    """Its record says it exists; a new one would start at number 1 again."""
    outbox.execute("DROP TABLE {outbox}")
    with pytest.raises(SchemaMismatch, match="it is gone"):
        await run(outbox.owner)


async def test_a_changed_file_is_noticed(outbox: Outbox) -> None:
    """A migration that was applied must be the one that this version has."""
    changed = [*FILES[:2], Migration(2, FILES[2].name, FILES[2].template + "-- edited\n"), *FILES[3:]]
    with pytest.raises(SchemaMismatch, match=r"another migration 0002 \(relay\)"):
        await check(outbox.owner, migrations=changed)


@pytest.mark.parametrize(
    ("made", "asked", "message"),
    [
        ({}, {"payload": "bytea"}, "is json, database.payload says bytea"),
        ({"payload": "jsonb"}, {"payload": "json"}, "is jsonb, database.payload says json"),
        ({}, {"partitioned": True}, "is not partitioned, database.partitioned says true"),
        ({"partitioned": True}, {"partitioned": False}, "is partitioned, database.partitioned says false"),
    ],
)
async def test_options_that_cannot_change_are_refused(
    outbox_factory: OutboxFactory, made: dict[str, Any], asked: dict[str, Any], message: str
) -> None:
    """The catalog says how it was made; the hint says which setting fits."""
    outbox = outbox_factory(**made)
    with pytest.raises(SchemaMismatch, match=message) as caught:
        await run(outbox.owner.model_copy(update=asked))
    assert next(iter(asked)) in caught.value.hint


async def test_notify_can_be_turned_off_and_on(outbox: Outbox) -> None:
    """The one option that may change: the trigger is disabled and enabled."""
    off = outbox.owner.model_copy(update={"notify": False})
    assert (await check(off)).pending == ("notify off",)
    assert [step.name for step in await run(off)] == ["notify off"]
    assert (await check(off)).state == "current"
    assert [step.name for step in await run(outbox.owner)] == ["notify on"]


async def test_a_role_without_rights_is_told_so(outbox_factory: OutboxFactory) -> None:
    """The relay's role may not migrate."""
    outbox = outbox_factory(migrated=False)
    with pytest.raises(PermissionMissing) as caught:
        await run(outbox.database)
    assert "owner" in caught.value.hint


@pytest.mark.parametrize(
    ("dsn", "error"),
    [
        ("postgresql://test_owner:hunter2@127.0.0.1:1/x", SourceUnavailable),
        ("postgresql://test_owner:hunter2@127.0.0.1:1/x?sslmode=nonsense", InvalidConfig),
    ],
)
async def test_a_database_that_cannot_be_reached(dsn: str, error: type[Exception]) -> None:
    """One clear line, and the password stays out of it."""
    with pytest.raises(error) as caught:
        await run(Database.model_validate({"dsn": dsn}))
    assert "hunter2" not in str(caught.value)


async def test_a_database_that_does_not_exist(outbox: Outbox) -> None:
    """A typing mistake in the URL, not an outage to wait for."""
    with pytest.raises(InvalidConfig, match="does not exist"):
        await check(Database.model_validate({"dsn": outbox.server.dsn("nosuchdatabase")}))


async def test_a_standby_is_named(outbox_factory: OutboxFactory) -> None:
    """Here: a database that is read-only; the error is the same."""
    outbox = outbox_factory(migrated=False)
    outbox.execute(f"ALTER DATABASE {outbox.name} SET default_transaction_read_only = on")
    with pytest.raises(SourceUnavailable, match="must reach the primary"):
        await run(outbox.owner)
