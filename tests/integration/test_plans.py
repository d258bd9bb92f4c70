"""Plans of the hot queries under the relay's own settings: index range scans, whatever the statistics say.

Stale statistics (analysed while empty, then filled), fresh ones, and those of a backlog of one key: then every row of the
table seems to be in the lane that is asked for, and the primary key looks good enough for all 64. With the values known and without.
"""

from __future__ import annotations

import json
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

from relay.config import Database
from relay.database.names import Names
from relay.database.pool import Pool
from relay.sources.polling.contracts import Cursor
from relay.sources.polling.outbox import PostgresOutbox
from relay.stores.outbox_rows import PostgresSettler
from relay.types import TIMESTAMP_INFINITY, TIMESTAMP_MINUS_INFINITY, Lease
from tests.integration.pods import SINK, Pod, pod

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.outbox import Outbox, OutboxFactory

LANES: Final = "ARRAY(SELECT generate_series(0, 63))::smallint[]"
ZEROS: Final = "array_fill(0::bigint, ARRAY[64])"
LIMITS: Final = "array_fill(31, ARRAY[64])"
SEQS: Final = "ARRAY(SELECT generate_series(4000, 4999)::bigint)"
KEYS: Final = "ARRAY['k1', 'k2']"


def fill(outbox: Outbox, rows: int = 5_000, keys: int = 500) -> None:
    outbox.execute(
        f"INSERT INTO {{outbox}} (topic, key, payload) SELECT 't', 'k' || n % {keys}, '{{}}' FROM generate_series(1, {rows}) n"
    )
    if "partitioned" in outbox.options:
        outbox.execute("UPDATE {outbox} SET stored_at = stored_at + interval '1 day' * (seq % 50)")
    if keys > 1:
        outbox.execute("UPDATE {outbox} SET published_at = now() WHERE seq < 2000")
    outbox.execute(
        "INSERT INTO {parked} (sink, seq, lane, id, topic, key, payload, created_at, stored_at, retry_at)"
        f" SELECT '{SINK}', n, n % 64, gen_random_uuid(), 't', 'k' || n % 500, '', now(), now(),"
        f" CASE WHEN n <= 500 THEN now() END FROM generate_series(1, {rows}) n"
    )
    outbox.execute(
        "INSERT INTO {dead_letter} (sink, seq, lane, id, topic, key, created_at, stored_at, kind, reason, holds)"
        f" SELECT '{SINK}', n, n % 64, gen_random_uuid(), 't', 'k' || n % 500, now(), now(), 'rejected', 'r', n % 50 = 0"
        f" FROM generate_series(1, {rows}) n"
    )


def analyze(outbox: Outbox) -> None:
    for table in ("outbox", "parked", "dead_letter"):
        outbox.execute(f"ANALYZE {{{table}}}")


@asynccontextmanager
async def filled(outbox: Outbox, statistics: str) -> AsyncIterator[Pod]:
    """Tables of 5,000 rows with fresh statistics, or with those of empty tables; `one lane`: fresh, one key, nothing settled."""
    for table in ("outbox", "parked", "dead_letter", "lease"):
        outbox.execute(f"ALTER TABLE {{{table}}} SET (autovacuum_enabled = off)") if (
            table != "outbox" or "partitioned" not in outbox.options
        ) else None
    if statistics == "stale":
        analyze(outbox)
    fill(outbox, keys=1 if statistics == "one lane" else 500)
    if statistics != "stale":
        analyze(outbox)
    async with pod(outbox) as one:
        yield one


async def plan(one: Pod, sql: str, *arguments: str, generic: bool) -> list[dict[str, Any]]:
    """All nodes of a statement's plan, as the relay's sessions plan it."""
    async with one.pool.transaction() as connection:
        await connection.execute(f"SET LOCAL plan_cache_mode = force_{'generic' if generic else 'custom'}_plan")
        # asyncpg hands the values over apart from the statement; here they have to be in it
        await connection.execute(f"PREPARE hot AS {sql}")
        values = [await connection.fetchval(f"SELECT quote_literal(({value})::text)") for value in arguments]
        explained = await connection.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE hot({', '.join(values)})")
        await connection.execute("DEALLOCATE hot")
    return list(nodes(json.loads(explained)[0]["Plan"]))


def nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from nodes(child)


def scans(found: list[dict[str, Any]], table: str) -> set[tuple[str, str]]:
    """How a table (or a partition of it) is read: kind of scan and index."""
    return {
        (
            node["Node Type"],
            re.sub(r"_\d{8}_|_idx$", lambda match: "_" * (match[0][-1] == "_"), node.get("Index Name", "")),
        )
        for node in found
        if node["Node Type"] != "ModifyTable" and re.fullmatch(rf"{table}(_\d{{8}})?", node.get("Relation Name", ""))
    }


def crawled(found: list[dict[str, Any]]) -> set[str]:
    """Tables that are read whole. A sequence is one row, and has no index."""
    return {node["Relation Name"] for node in found if node["Node Type"] == "Seq Scan"} - {"outbox_seq_seq"}


def kinds(found: list[dict[str, Any]]) -> set[str]:
    return {node["Node Type"] for node in found}


@pytest.fixture(params=["stale", "fresh", "one lane"])
def statistics(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("generic", [False, True], ids=["custom", "generic"])
async def test_plans_of_a_plain_outbox(outbox: Outbox, statistics: str, generic: bool) -> None:
    """Reads go along the pending index in its order, settles along the primary key, decisions along theirs."""
    async with filled(outbox, statistics) as one:
        reader, parking = one.reader, one.parking
        server = "'server'"

        async def of(sql: str, *arguments: str) -> list[dict[str, Any]]:
            return await plan(one, sql, *arguments, generic=generic)

        for sql, more in ((reader._read_sql, [ZEROS]), (reader._below_sql, [])):
            read = await of(sql, LANES, ZEROS, LIMITS, *more)
            assert scans(read, "outbox") <= {
                ("Index Scan", "outbox_pending"),
                ("Index Only Scan", "outbox_pending"),
            }
            assert scans(read, "outbox")
            assert not {"Sort", "Incremental Sort", "Hash Join"} & kinds(read)
        whole = await of(reader._read_all_sql, LANES, ZEROS, "1000", "2000")
        assert scans(whole, "outbox") == {("Index Scan", "outbox_pkey")}
        assert not {"Sort", "Incremental Sort"} & kinds(whole)
        payload = await of(reader._payload_sql, "4000", server)
        assert scans(payload, "outbox") == {("Index Scan", "outbox_pkey")}

        for how in ("delete", "keep"):
            settler = PostgresSettler(one.pool, outbox.names, how, partitioned=False)
            settle = await of(settler._sql, SEQS, server)
            assert scans(settle, "outbox") == {("Index Scan", "outbox_pkey")}
            assert crawled(settle) == set()

        held = await of(parking._held_sql, f"ARRAY['{SINK}']", LANES, "1000")
        assert scans(held, "outbox_parked") == {("Index Only Scan", "outbox_parked_key")}
        if statistics == "fresh":  # read once for each claim
            assert scans(held, "outbox_dead_letter") == {("Index Scan", "outbox_dead_letter_holds")}
        due = await of(parking._due_sql, f"'{SINK}'", LANES, "64", "64", "16000000", "256000")
        assert ("Index Scan", "outbox_parked_due") in scans(due, "outbox_parked")
        assert not [n for n in due if n.get("Index Name") == "outbox_parked_key" and n["Alias"].startswith("p")]
        next_due = await of(parking._next_due_sql, f"'{SINK}'", LANES)
        assert scans(next_due, "outbox_parked") == {("Index Scan", "outbox_parked_due")}
        promote = await of(parking._promote_sql, f"'{SINK}'", "ARRAY[1, 2]::smallint[]", KEYS)
        assert {index for _, index in scans(promote, "outbox_parked")} <= {"outbox_parked_key", "outbox_parked_pkey"}
        for found in (held, due, next_due, promote):
            assert crawled(found) == set()


@pytest.mark.parametrize("settle", ["delete", "keep"])
async def test_plans_of_a_partitioned_outbox(outbox_factory: OutboxFactory, statistics: str, settle: str) -> None:
    """Each partition by its own pending index; a settle looks into the partitions of its rows only."""
    outbox = outbox_factory(partitioned=True)
    async with filled(outbox, statistics) as one:
        partitions = outbox.execute("SELECT count(*) FROM pg_inherits WHERE inhparent = {outbox_literal}::regclass")[0][
            0
        ]
        assert partitions > 8
        reader = PostgresOutbox(one.pool, outbox.names, outbox.database)
        for sql, more in ((reader._read_sql, [ZEROS, "'-infinity'", "'infinity'"]), (reader._below_sql, [])):
            read = await plan(one, sql, LANES, ZEROS, LIMITS, *more, generic=False)
            assert crawled(read) == set()
            assert len(scans(read, "outbox")) == 1  # every partition in the same way
            assert scans(read, "outbox") <= {(kind, "outbox_lane_seq") for kind in ("Index Scan", "Index Only Scan")}
        sql = PostgresSettler(one.pool, outbox.names, settle, partitioned=True)._sql  # type: ignore[arg-type]
        today = await plan(one, sql, SEQS, "'server'", "now()", "now() + interval '1 minute'", generic=False)
        touched = {n["Relation Name"] for n in today if re.fullmatch(r"outbox_\d{8}", n.get("Relation Name", ""))}
        assert len(touched) == 1
        assert scans(today, "outbox") == {("Index Scan", "outbox_pkey")}
        assert crawled(today) == set()


async def test_a_read_leaves_out_partitions_that_nothing_new_can_be_in(outbox_factory: OutboxFactory) -> None:
    """Rule 10: neither those made ahead nor those before the floor cost a poll anything."""
    outbox = outbox_factory(partitioned=True)
    async with filled(outbox, "fresh") as one:
        sql = PostgresOutbox(one.pool, outbox.names, outbox.database)._read_sql

        async def partitions(since: str, until: str) -> int:
            read = await plan(one, sql, LANES, ZEROS, LIMITS, ZEROS, since, until, generic=False)
            return len({n["Relation Name"] for n in read if re.fullmatch(r"outbox_\d{8}", n.get("Relation Name", ""))})

        assert await partitions("'-infinity'", "'infinity'") > 8
        assert 1 <= await partitions("now() - interval '1 hour'", "now() + interval '1 day'") <= 2


def test_a_poll_of_a_partitioned_outbox_is_bounded_by_what_the_floor_says() -> None:
    """The reader passes the bounds once a floor is known, and none when a lane is read from its start."""
    section = Database.model_validate({"dsn": "postgres://x/y", "partitioned": True})
    reader = PostgresOutbox(Pool(section, "test"), Names(), section)
    reader._server_at = 1_700_000_000_000_000
    lease = Lease(3, 1)
    known, unknown = Cursor(lease, 7, 10, since=1_600_000_000_000_000), Cursor(lease, 0, 10)
    assert reader._bounds([known]) == (1_599_996_400_000_000, 1_700_086_400_000_000)
    assert reader._bounds([known, unknown]) == (TIMESTAMP_MINUS_INFINITY, TIMESTAMP_INFINITY)
