"""Connections to PostgreSQL: behind a pooler as without one, and what each of its errors means to the relay."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from relay.config import Database
from relay.database.pool import Pool
from relay.database.session import IDENTITY, SETTINGS
from relay.errors import InvalidConfig, PermissionMissing, SchemaMismatch, SourceUnavailable
from relay.types import TIMESTAMP_INFINITY, TIMESTAMP_MINUS_INFINITY
from tests.conftest import running
from tests.integration.pods import connected, pod, publish, until
from tests.outbox import RELAY
from tests.servers import postgres as servers
from tests.servers.pgbouncer import PgBouncer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from relay.demo.servers import Postgres
    from tests.conftest import MakeProxy
    from tests.outbox import Outbox

MOMENTS = {
    "infinity": TIMESTAMP_INFINITY,
    "-infinity": TIMESTAMP_MINUS_INFINITY,
    "0044-03-15 00:00:00+00 BC": -63_517_824_000_000_000,
    "20231-01-01 00:00:00+00": 576261475200000000,
    "1999-12-31 23:59:59.999999+00": 946_684_799_999_999,
}


@pytest.fixture
def pooler(outbox: Outbox) -> Iterator[PgBouncer]:
    """A pooler in transaction mode in front of `outbox`."""
    yield from running(lambda: PgBouncer(servers.Database(outbox.server, outbox.name)))


@pytest.fixture(params=["direct", "pooled"])
def section(request: pytest.FixtureRequest, outbox: Outbox) -> Database:
    """The relay's `[database]`, without and with a pooler in between."""
    if request.param == "direct":
        return outbox.database
    pooler: PgBouncer = request.getfixturevalue("pooler")
    return Database.model_validate({"dsn": pooler.dsn_of(RELAY)})


@asynccontextmanager
async def opened(section: Database) -> AsyncIterator[Pool]:
    pool = Pool(section, "outbox-relay")
    try:
        await pool.open()
        yield pool
    finally:
        await pool.close()


async def run(pool: Pool, *statements: str, error: type[Exception] | None = None) -> None:
    """Statements in one transaction, and a failure of ours at its end."""
    async with pool.transaction() as connection:
        for statement in statements:
            await connection.execute(statement)
        if error is not None:
            raise error


async def again(pool: Pool) -> None:
    """The pool works, after at most a failure for each connection that was cut."""
    async with asyncio.timeout(10):
        while True:
            try:
                assert await one(pool, "SELECT 1") == 1
                return
            except SourceUnavailable:
                pass


async def one(pool: Pool, sql: str, *arguments: Any) -> Any:
    return (await pool.fetch(sql, *arguments))[0][0]


async def test_statements_and_transactions_at_once(section: Database, outbox: Outbox) -> None:
    """A pooler is found out; more callers than connections all get their answers, committed or rolled back."""
    async with opened(section) as pool:
        assert pool.pooled == (section.dsn != outbox.database.dsn)
        insert = outbox.names.format("INSERT INTO {checkpoint} (name) VALUES ($1)")

        async def write(number: int) -> None:
            await pool.fetch(insert, f"single {number}")
            async with pool.transaction() as connection:
                await connection.execute(insert, f"kept {number}")
            with pytest.raises(ZeroDivisionError):
                await run(pool, insert.replace("$1", f"'rolled back {number}'"), error=ZeroDivisionError)

        await asyncio.gather(*(write(number) for number in range(30)))
        rows = {row[0].rsplit(" ", 1)[0] for row in outbox.execute("SELECT name FROM {checkpoint}")}
        assert rows == {"single", "kept"}
        assert outbox.execute("SELECT count(*) FROM {checkpoint}") == [(60,)]


async def test_every_statement_has_the_relays_settings(section: Database, outbox: Outbox) -> None:
    """Whatever the role's defaults are; and decisions see what was committed before their second statement."""
    outbox.execute(
        f"ALTER ROLE {RELAY} IN DATABASE {outbox.name} SET default_transaction_isolation = 'repeatable read'"
    )
    outbox.execute(f"ALTER ROLE {RELAY} IN DATABASE {outbox.name} SET enable_bitmapscan = on")
    async with opened(section) as pool:
        for name, value in SETTINGS.items():
            assert await one(pool, "SELECT current_setting($1)", name) == value
        assert await one(pool, "SELECT current_setting('transaction_isolation')") == "read committed"
        async with pool.transaction() as connection:
            assert await connection.fetchval("SELECT current_setting('transaction_isolation')") == "read committed"


async def test_moments_go_both_ways(section: Database) -> None:
    """As microseconds since the Unix epoch, exactly; the ends of time are themselves (FIELD.md A5)."""
    async with opened(section) as pool:
        for text, moment in MOMENTS.items():
            assert await one(pool, f"SELECT '{text}'::timestamptz") == moment
            assert await one(pool, f"SELECT $1 = '{text}'::timestamptz", moment)
            assert await one(pool, f"SELECT ($1::timestamptz[])[2] = '{text}'", [0, moment])


async def test_a_whole_pod_works_behind_a_pooler(outbox: Outbox, pooler: PgBouncer) -> None:
    """Claim, read, park, due, finish, settle: nothing needs a session."""
    section = Database.model_validate({"dsn": pooler.dsn_of(RELAY)})
    async with pod(outbox, database=section) as pooled:
        leases = await pooled.join()
        await publish(outbox, ("k", "{}"), ("j", "{}"))
        messages = await pooled.read(list(leases.values()))
        await pooled.settler.settle(messages[:1])
        assert [m.seq for m in await pooled.read(list(leases.values()))] == [2]
        assert await pooled.reader.holders() == set()
        await pooled.leases.leave()


async def test_a_cancelled_call_leaves_no_transaction_behind(outbox: Outbox) -> None:
    """The connection goes back clean: what comes after it on the same one is committed."""
    async with opened(outbox.database) as pool:
        for _ in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05), pool.transaction() as connection:
                    await connection.execute("SELECT pg_sleep(30)")
        await pool.fetch(outbox.names.format("INSERT INTO {checkpoint} (name) VALUES ('kept')"))
        assert outbox.execute("SELECT name FROM {checkpoint}") == [("kept",)]
        idle = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{outbox.name}' AND state LIKE 'idle in%'"
        assert outbox.execute(idle) == [(0,)]


async def test_a_cancelled_call_does_not_wait_for_a_server_that_is_silent(outbox: Outbox, proxy: MakeProxy) -> None:
    """The path to the server swallows everything: a stop ends in its grace period all the same (promise 7)."""
    wall = await proxy(outbox.server.host, outbox.server.port)
    section = Database.model_validate({"dsn": f"postgresql://{RELAY}@{wall.host}:{wall.port}/{outbox.name}"})
    async with opened(section) as pool:
        await pool.fetch("SELECT 1")
        wall.swallow_replies()
        for call in (run, one):
            seen = wall.bytes_swallowed
            task = asyncio.create_task(call(pool, "SELECT 1"))
            await wall.wait_until(partial(lambda seen: wall.bytes_swallowed > seen, seen))
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=5)
            assert done, "a cancelled call waits for the server"
            await wall.heal()
            await again(pool)
            wall.swallow_replies()


# --- errors ----------------------------------------------------------------------------------------


async def test_a_missing_right_is_named(section: Database, outbox: Outbox) -> None:
    outbox.execute(f"REVOKE SELECT ON {{lease}} FROM {RELAY}")
    async with opened(section) as pool:
        with pytest.raises(PermissionMissing, match="outbox_lease") as caught:
            await pool.fetch(outbox.names.format("SELECT FROM {lease}"))
        assert "relay migrate --roles" in caught.value.hint


@pytest.mark.parametrize("sql", ["SELECT FROM nowhere", "SELECT nothing", "SELECT nobody()", "SELECT FROM no.where"])
async def test_missing_objects_are_a_mismatch_of_the_schema(section: Database, sql: str) -> None:
    async with opened(section) as pool:
        with pytest.raises(SchemaMismatch) as caught:
            await pool.fetch(sql)
        assert "relay migrate" in caught.value.hint


async def test_a_missing_database_is_a_wrong_setting(outbox: Outbox) -> None:
    with pytest.raises(InvalidConfig, match="does not exist"):
        async with opened(Database.model_validate({"dsn": outbox.server.dsn("nowhere", RELAY)})):
            pass


async def test_an_unknown_role_is_a_refused_login(outbox: Outbox) -> None:
    with pytest.raises(PermissionMissing, match="refused the login") as caught:
        async with opened(Database.model_validate({"dsn": outbox.server.dsn(outbox.name, "stranger")})):
            pass
    assert "database.dsn" in caught.value.hint


async def test_a_refused_connection_is_tried_again(outbox: Outbox, proxy: MakeProxy) -> None:
    """Nobody listens, or the connection is cut in the middle of it: later, not never."""
    wall = await proxy(outbox.server.host, outbox.server.port)
    section = Database.model_validate({"dsn": f"postgresql://{RELAY}@{wall.host}:{wall.port}/{outbox.name}"})
    async with opened(section) as pool:
        await pool.fetch("SELECT 1")
        wall.cut()
        for _ in range(3):
            with pytest.raises(SourceUnavailable):
                await pool.fetch("SELECT 1")
        await wall.heal()
        assert await one(pool, "SELECT 1") == 1


async def test_a_terminated_session_is_replaced(section: Database, outbox: Outbox) -> None:
    """The call that meets it fails for now; the next one has another session."""
    async with opened(section) as pool:
        with pytest.raises(SourceUnavailable):
            await pool.fetch("SELECT pg_terminate_backend(pg_backend_pid())")
        async with asyncio.timeout(10):
            while True:
                try:
                    assert await one(pool, "SELECT 1") == 1
                    break
                except SourceUnavailable:
                    pass


async def test_a_server_that_became_read_only_is_left(outbox: Outbox) -> None:
    """A demoted primary refuses writes on sessions that it still has: they are dropped, and new ones ask for a primary."""
    async with opened(outbox.database) as pool:
        write = outbox.names.format("INSERT INTO {checkpoint} (name) VALUES ('x')")
        before = await one(pool, "SELECT pg_backend_pid()")
        with pytest.raises(SourceUnavailable, match="ReadOnly"):
            await run(pool, "SET TRANSACTION READ ONLY", write)
        assert await one(pool, "SELECT pg_backend_pid()") != before
        outbox.execute(f"ALTER ROLE {RELAY} IN DATABASE {outbox.name} SET default_transaction_read_only = on")
        with pytest.raises(SourceUnavailable):
            async with opened(outbox.database):
                pass
        outbox.execute(f"ALTER ROLE {RELAY} IN DATABASE {outbox.name} RESET default_transaction_read_only")


async def test_locks_and_timeouts_are_tried_again(section: Database, outbox: Outbox) -> None:
    async with opened(section) as pool, connected(outbox.admin_dsn) as locking, locking.transaction():
        await locking.execute(outbox.names.format("LOCK TABLE {lease}"))
        for statement in (
            "SET LOCAL lock_timeout = '10ms'",
            "SET LOCAL statement_timeout = '10ms'",
        ):
            with pytest.raises(SourceUnavailable):
                await run(pool, statement, outbox.names.format("SELECT FROM {lease}"))


async def test_an_altered_table_costs_at_most_one_repetition(section: Database, outbox: Outbox) -> None:
    """Plans of open sessions are outdated by a migration: never a stop, and the next call works (FIELD.md B16)."""
    async with opened(section) as pool:
        outbox.execute("CREATE TABLE {schema}.altered (a int, b int)")
        outbox.execute(f"GRANT SELECT ON {{schema}}.altered TO {RELAY}")
        sql = outbox.names.format("SELECT * FROM {schema}.altered")
        for change in ("ADD COLUMN c int", "ALTER COLUMN a TYPE bigint", "DROP COLUMN b", "RENAME COLUMN c TO d"):
            for _ in range(7):  # often enough for a generic plan
                await pool.fetch(sql)
                async with pool.transaction() as connection:
                    await connection.fetch(sql)
            outbox.execute(f"ALTER TABLE {{schema}}.altered {change}")
            try:
                async with pool.transaction() as connection:
                    await connection.fetch(sql)
            except SourceUnavailable:
                async with pool.transaction() as connection:
                    await connection.fetch(sql)
            await pool.fetch(sql)


# --- servers of its own ------------------------------------------------------------------------------


async def test_a_wrong_password_and_a_standby(own_postgres: Postgres, outbox_factory: Any, proxy: MakeProxy) -> None:
    """A password is a person's business; a standby is left for the primary that will come, which is another server."""
    outbox = outbox_factory(server=own_postgres)
    hba = own_postgres.data / "pg_hba.conf"
    own_postgres.execute(f"ALTER ROLE {RELAY} PASSWORD 'right'")
    own_postgres.execute("CREATE TABLE hba (line text)")
    trusting = hba.read_text()
    hba.write_text(f"host all {RELAY} all scram-sha-256\n" + trusting)
    own_postgres.execute("SELECT pg_reload_conf()")
    section = Database.model_validate({"dsn": own_postgres.dsn(outbox.name, RELAY, "wrong")})
    await until(lambda: refused(section))  # once the postmaster has read the file
    async with opened(Database.model_validate({"dsn": own_postgres.dsn(outbox.name, RELAY, "right")})) as pool:
        assert await one(pool, "SELECT 1") == 1
        own_postgres.stop()
        hba.write_text(trusting)
        (own_postgres.data / "standby.signal").touch()
        own_postgres.start()
        with pytest.raises(SourceUnavailable):
            await run(pool, "SELECT 1")  # on the session that was cut, or on one to a standby
    with pytest.raises(SourceUnavailable):
        async with opened(outbox.database):
            pass
    own_postgres.execute("SELECT pg_promote()")
    async with opened(outbox.database) as pool:
        assert (await one(pool, f"SELECT {IDENTITY}")).endswith("/00000002")


async def refused(section: Database) -> bool:
    try:
        async with opened(section):
            return False
    except PermissionMissing as error:
        return "password" in str(error) and "wrong" not in str(error)
