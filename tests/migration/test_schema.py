"""What the tables themselves promise, on every supported version where it matters."""

from __future__ import annotations

import asyncio
import subprocess
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg
import psycopg
import pytest
from psycopg import errors

from relay.migrate import check, load, run
from relay.types import LANES
from tests.outbox import run_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from relay.demo.servers import Postgres
    from tests.outbox import Outbox, OutboxFactory


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


def insert(outbox: Outbox, columns: str, *values: Any) -> None:
    """One row, as the application."""
    marks = ", ".join(["%s"] * len(values))
    with psycopg.connect(outbox.app_dsn) as connection:
        connection.execute(outbox.names.format(f"INSERT INTO {{outbox}} ({columns}) VALUES ({marks})").encode(), values)


# --- ids -----------------------------------------------------------------------------------------


def test_ids_are_uuid_v7(outbox_factory: OutboxFactory, any_postgres: Postgres) -> None:
    """Version, variant and time are right, times rise, and the rest differs: by the default and by the function."""
    outbox = outbox_factory(server=any_postgres)
    before = time.time()
    ids: list[UUID] = [row[0] for row in outbox.execute("SELECT {uuidv7}() FROM generate_series(1, 5000)")]
    after = time.time()
    insert(outbox, "topic", "t")
    ids += [row[0] for row in outbox.execute("SELECT id FROM {outbox}")]
    assert {(i.version, i.variant) for i in ids} == {(7, "specified in RFC 4122")}
    milliseconds = [i.int >> 80 for i in ids]
    assert milliseconds == sorted(milliseconds)
    # The servers' clock is this machine's.
    assert before * 1000 - 1 <= milliseconds[0] <= milliseconds[-2] <= after * 1000 + 1
    assert len(set(ids)) == len(ids)
    assert len({i.int & (2**62 - 1) for i in ids}) == len(ids), "the random part repeats"
    fractions = {i.int >> 64 & 0xFFF for i in ids}
    assert len(fractions) > 500, "the 12 bits after the version count parts of the millisecond"


def test_publish_returns_the_id_it_was_given_or_made(outbox: Outbox) -> None:
    """All arguments by position and by name; only topic and payload are required."""
    given = UUID(int=5)
    with psycopg.connect(outbox.app_dsn) as app:
        rows = [
            app.execute(query.encode()).fetchone()
            for query in (
                "SELECT outbox_publish('a', '1')",
                f"""SELECT outbox_publish('b', NULL, 'k', '{{"h":1}}', '{given}')""",
                "SELECT outbox_publish(topic => 'c', payload => '3', headers => NULL)",
            )
        ]
    stored = outbox.execute("SELECT id, topic, key, payload, headers FROM {outbox} ORDER BY seq")
    assert [row[0] for row in stored] == [row[0] for row in rows if row]
    assert stored[1] == (given, "b", "k", None, {"h": 1})
    assert [row[1:] for row in stored[::2]] == [("a", None, 1, None), ("c", None, 3, None)]


# --- columns -------------------------------------------------------------------------------------


def test_lanes_belong_to_keys(outbox: Outbox) -> None:
    """One lane for a key, all lanes in use, and events without a key spread by id."""
    outbox.execute("INSERT INTO {outbox} (topic, key) SELECT 't', 'key' || n % 1000 FROM generate_series(1, 2000) n")
    outbox.execute("INSERT INTO {outbox} (topic) SELECT 't' FROM generate_series(1, 2000) n")
    assert outbox.execute(
        "SELECT max(c) FROM (SELECT count(DISTINCT lane) c FROM {outbox} WHERE key IS NOT NULL GROUP BY key) g"
    ) == [(1,)]
    for condition in ("key IS NULL", "key IS NOT NULL"):
        lanes = outbox.execute(f"SELECT lane FROM {{outbox}} WHERE {condition} GROUP BY lane ORDER BY lane")
        assert lanes == [(lane,) for lane in range(LANES)]


def test_every_lane_has_its_lease(outbox: Outbox) -> None:
    """The rows exist from the start: claiming never inserts."""
    assert outbox.execute("SELECT lane, owner, epoch FROM {lease} ORDER BY lane") == [
        (n, None, 0) for n in range(LANES)
    ]


@pytest.mark.parametrize(
    "created_at",
    ["infinity", "-infinity", "0044-03-15 12:00:00 BC", "20231-01-01 00:00:00+00", "4713-01-01 00:00:00 BC"],
)
@pytest.mark.parametrize("partitioned", [False, True], ids=["plain", "partitioned"])
def test_any_timestamp_is_accepted(outbox_factory: OutboxFactory, created_at: str, partitioned: bool) -> None:
    """The application's clock decides nothing, not even the partition (FIELD.md A5)."""
    outbox = outbox_factory(partitioned=partitioned)
    insert(outbox, "topic, created_at", "t", created_at)
    assert outbox.execute(f"SELECT created_at = '{created_at}', stored_at - now() < '1 min' FROM {{outbox}}") == [
        (True, True)
    ]


def test_json_is_kept_letter_by_letter(outbox: Outbox) -> None:
    """NUL and half pairs as escapes, digits beyond any float, spaces and repeated names (FIELD.md A1)."""
    payload = '{"s":"\\u0000\\ud800","n":1234567890123456789012,"d":0.123456789012345678901,"e":1e1000,  "e": 2}'
    insert(outbox, "topic, payload", "t", payload)
    assert outbox.execute("SELECT payload::text FROM {outbox}") == [(payload,)]


@pytest.mark.parametrize("headers", ["[1]", '"text"', "5", "null"])
def test_headers_are_an_object(outbox: Outbox, headers: str) -> None:
    """Anything else could not be delivered as headers; the constraint's name says so."""
    with pytest.raises(errors.CheckViolation, match="outbox_headers_object"):
        insert(outbox, "topic, headers", "t", headers)


def test_numbers_are_handed_out_one_by_one(outbox: Outbox) -> None:
    """CACHE 1: with a cache a later transaction could take a lower number (PROTOCOLS.md 8, 13)."""
    assert outbox.execute("SELECT seqcache FROM pg_sequence WHERE seqrelid = {outbox_seq_literal}::regclass") == [(1,)]
    assert outbox.execute(
        "SELECT pg_get_serial_sequence({outbox_literal}, 'seq')::regclass = {outbox_seq_literal}::regclass"
    ) == [(True,)]


def test_parked_and_dead_share_their_numbers(outbox: Outbox) -> None:
    """A delivery keeps its place when it moves between the two (PROTOCOLS.md 4)."""
    columns = "sink, seq, lane, id, topic, created_at, stored_at"
    values = "'s', {n}, 0, gen_random_uuid(), 't', now(), now()"
    outbox.execute(f"INSERT INTO {{parked}} ({columns}) VALUES ({values.format(n=1)})")
    outbox.execute(
        f"INSERT INTO {{dead_letter}} ({columns}, kind, reason) VALUES ({values.format(n=2)}, 'rejected', 'r')"
    )
    outbox.execute(f"INSERT INTO {{parked}} ({columns}) VALUES ({values.format(n=3)})")
    assert outbox.execute("SELECT number FROM {parked} UNION ALL SELECT number FROM {dead_letter} ORDER BY 1") == [
        (1,),
        (2,),
        (3,),
    ]
    with pytest.raises(errors.UniqueViolation):
        outbox.execute(f"INSERT INTO {{parked}} ({columns}) VALUES ({values.format(n=1)})")


def test_order_comes_from_the_database_and_not_from_ids(outbox: Outbox) -> None:
    """Ids of a clock that is five minutes off, or of another kind, change no number (FIELD.md B9)."""
    for n, skewed in enumerate(["ffffffff-ffff-7fff-bfff-ffffffffffff", "00000000-0000-7000-8000-000000000000"]):
        insert(outbox, "id, topic, key", skewed, f"t{n}", "k")
    assert outbox.execute("SELECT topic FROM {outbox} ORDER BY seq") == [("t0",), ("t1",)]


@pytest.mark.parametrize("partitioned", [False, True], ids=["plain", "partitioned"])
def test_a_backlog_is_read_by_its_index(outbox_factory: OutboxFactory, partitioned: bool) -> None:
    """Unsettled rows of a lane in order: no sort, no scan of the table."""
    outbox = outbox_factory(partitioned=partitioned)
    outbox.execute("INSERT INTO {outbox} (topic, key) SELECT 't', n::text FROM generate_series(1, 20000) n")
    outbox.execute("ANALYZE {outbox}")
    plan = outbox.execute(
        "EXPLAIN SELECT seq FROM {outbox} WHERE lane = 5 AND published_at IS NULL AND seq > 100 ORDER BY seq LIMIT 100"
    )
    text = "\n".join(row[0] for row in plan)
    assert "_lane_seq_idx" in text or "outbox_pending" in text, text
    if not partitioned:
        assert "Sort" not in text


# --- waking --------------------------------------------------------------------------------------


async def test_a_producer_notifies_only_while_the_doorman_sleeps(
    outbox_factory: OutboxFactory, any_postgres: Postgres
) -> None:
    """Silent while K is free, one notification per commit while it is held, silent again after (PROTOCOLS.md 9)."""
    outbox = outbox_factory(server=any_postgres)
    names = outbox.names
    received: asyncio.Queue[str] = asyncio.Queue()
    async with (
        asyncio.timeout(30),
        connected(outbox.relay_dsn) as doorman,
        connected(outbox.relay_dsn) as listener,
    ):
        await listener.add_listener(names.channel, lambda *args: received.put_nowait(args[3]))

        async def heard() -> int:
            # Notifications arrive in order of commit, so a mark of our own shows that all before it were heard.
            await doorman.execute(names.format("SELECT pg_notify({channel_name}, 'mark')"))
            count = 0
            while await received.get() != "mark":
                count += 1
            return count

        insert(outbox, "topic", "t")
        assert await heard() == 0
        assert await doorman.fetchval("SELECT pg_try_advisory_lock($1)", names.lock_key)
        insert(outbox, "topic", "t")
        with psycopg.connect(outbox.app_dsn) as app:
            app.execute(names.format("INSERT INTO {outbox} (topic) SELECT 't' FROM generate_series(1, 50)").encode())
            app.execute(names.format("SELECT {publish}('t', NULL)").encode())
        assert await heard() == 2
        await doorman.execute(f"SELECT pg_advisory_unlock({names.lock_key})")
        insert(outbox, "topic", "t")
        assert await heard() == 0


async def test_the_doorman_cannot_fall_asleep_over_an_open_insert(outbox: Outbox) -> None:
    """An uncommitted producer holds K shared, so it is seen before the doorman sleeps."""
    async with connected(outbox.app_dsn) as app, connected(outbox.relay_dsn) as doorman:
        await app.execute(outbox.names.format("BEGIN; INSERT INTO {outbox} (topic) VALUES ('t')"))
        assert not await doorman.fetchval("SELECT pg_try_advisory_lock($1)", outbox.names.lock_key)
        await app.execute("COMMIT")
        assert await doorman.fetchval("SELECT pg_try_advisory_lock($1)", outbox.names.lock_key)


@pytest.mark.parametrize(("notify", "refused"), [(True, True), (False, False)])
async def test_prepared_transactions_need_notify_off(
    outbox_factory: OutboxFactory, notify: bool, refused: bool
) -> None:
    """PostgreSQL refuses PREPARE TRANSACTION after a NOTIFY; `database.notify = false` is the way out."""
    outbox = outbox_factory(notify=notify)
    async with connected(outbox.relay_dsn) as doorman, connected(outbox.app_dsn) as app:
        await doorman.execute(f"SELECT pg_advisory_lock({outbox.names.lock_key})")
        await app.execute(outbox.names.format("BEGIN; INSERT INTO {outbox} (topic) VALUES ('t')"))
        prepare = f"PREPARE TRANSACTION '{outbox.name}'"
        if refused:
            with pytest.raises(asyncpg.FeatureNotSupportedError):
                await app.execute(prepare)
        else:
            await app.execute(prepare)
            await app.execute(f"COMMIT PREPARED '{outbox.name}'")
    assert outbox.execute("SELECT count(*) FROM {outbox}") == [(0 if refused else 1,)]


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitioned", [False, True], ids=["plain", "partitioned"])
def test_names_that_need_quoting(outbox_factory: OutboxFactory, any_postgres: Postgres, partitioned: bool) -> None:
    """Mixed case, dots, quotes, braces, dollars, backslashes, comments and line breaks (FIELD.md A7)."""
    outbox = outbox_factory(
        server=any_postgres, schema="My.App {schema}\"'", table='Out""Box\'{lease}\\ $$--\n/*', partitioned=partitioned
    )
    insert(outbox, "topic", "t")
    with psycopg.connect(outbox.app_dsn) as app:
        app.execute(outbox.names.format("SELECT {publish}('t', NULL)").encode())
    assert outbox.execute("SELECT count(*) FROM {outbox}") == [(2,)]


async def test_two_outboxes_in_one_database(outbox: Outbox) -> None:
    """Each has its own tables, lock and channel."""
    second = outbox.owner.model_copy(update={"table": "outbox_two"})
    assert len(await run(second)) == len(load())
    third = outbox.owner.model_copy(update={"schema_": "outbox"})
    await run(third)
    assert [(await check(d)).state for d in (outbox.owner, second, third)] == ["current"] * 3


# --- upgrades of the server ----------------------------------------------------------------------


@pytest.mark.parametrize("partitioned", [False, True], ids=["plain", "partitioned"])
def test_a_dump_of_17_works_on_18(
    outbox_factory: OutboxFactory,
    postgres_of_version: Callable[[int], Postgres],
    postgres: Postgres,
    partitioned: bool,
) -> None:
    """The default for ids is our own function on every version, so nothing changes its meaning with the server."""
    old = outbox_factory(server=postgres_of_version(17), partitioned=partitioned)
    new = outbox_factory(server=postgres, partitioned=partitioned, migrated=False)
    outbox_factory(server=postgres)  # makes the roles that the dump grants to
    insert(old, "topic", "before")
    dump = subprocess.run(
        [postgres.bin / "pg_dump", "--format=custom", f"--dbname={old.admin_dsn}"], check=True, capture_output=True
    )
    subprocess.run(
        [postgres.bin / "pg_restore", "--exit-on-error", f"--dbname={new.admin_dsn}"], input=dump.stdout, check=True
    )
    assert run_async(check(new.database)).state == "current"
    assert run_async(run(new.owner)) == []
    insert(new, "topic", "after")
    stored = new.execute("SELECT topic, id FROM {outbox} ORDER BY seq")
    assert [row[0] for row in stored] == ["before", "after"]
    assert stored[1][1].version == 7
