"""The operator's views count right, and cost the same whatever lies in the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncpg
import orjson
import psycopg
import pytest

from relay.maintenance import views

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.outbox import Outbox, OutboxFactory

Plan = dict[str, Any]


@pytest.fixture
async def connection(outbox: Outbox) -> AsyncIterator[Any]:
    """As the relay's role: the views need no other rights."""
    made = await asyncpg.connect(outbox.relay_dsn)
    yield made
    await made.close()


def fill(outbox: Outbox, events: int) -> None:
    with psycopg.connect(outbox.app_dsn) as app:
        app.execute(
            f"INSERT INTO outbox (topic, key, payload) SELECT 't' || n % 3, 'k' || n, '1' FROM generate_series(1, {events}) n"
        )


def nodes(plan: Plan) -> Iterator[Plan]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


async def explained(connection: Any, sql: str) -> Plan:
    async with views.along_indexes(connection):
        answer: Plan = orjson.loads(await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}"))[0][
            "Plan"
        ]
    return answer


def buffers(plan: Plan) -> int:
    return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])


# --- plans ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("partitioned", [False, True])
async def test_the_backlog_is_read_along_the_index_of_what_is_not_settled(
    outbox_factory: OutboxFactory, *, analyzed: bool, partitioned: bool
) -> None:
    """No sequential scan and no sort below the limit, with fresh statistics and with none."""
    outbox = outbox_factory(partitioned=partitioned)
    fill(outbox, 30_000)
    if analyzed:
        outbox.execute("ANALYZE {outbox}")
    connection = await asyncpg.connect(outbox.relay_dsn)
    plan = await explained(connection, views.sql(outbox.names, views.BACKLOG))
    await connection.close()
    scans = [node for node in nodes(plan) if node.get("Relation Name", "").startswith("outbox")]
    assert scans
    assert {node["Node Type"] for node in scans} <= {"Index Scan", "Index Only Scan"}
    # Of a partition that was empty when it was analyzed, any index will do.
    assert all("lane" in node["Index Cond"] for node in scans if node["Actual Rows"])
    (limit,) = [node for node in nodes(plan) if node["Node Type"] == "Limit"]
    assert not [node for node in nodes(limit) if node["Node Type"] in {"Sort", "Incremental Sort"}]


async def test_a_larger_backlog_costs_no_more(connection: Any, outbox: Outbox) -> None:
    """Four times the rows, the same pages: the limit holds in each lane."""
    sql = views.sql(outbox.names, views.BACKLOG)
    fill(outbox, 20_000)
    outbox.execute("VACUUM ANALYZE {outbox}")
    small = buffers(await explained(connection, sql))
    fill(outbox, 60_000)
    outbox.execute("VACUUM ANALYZE {outbox}")
    assert buffers(await explained(connection, sql)) < small * 1.5


async def test_parked_rows_are_counted_along_an_index_up_to_the_limit(connection: Any, outbox: Outbox) -> None:
    outbox.execute(
        "INSERT INTO {parked} (seq, id, created_at, stored_at, lane, sink, topic, key)"
        " SELECT n, gen_random_uuid(), now(), now(), n % 64, CASE WHEN n <= 100 THEN 'small' ELSE 'big' END, 't', 'k' || n"
        " FROM generate_series(1, 30000) n"
    )
    outbox.execute("VACUUM ANALYZE {parked}")
    plan = await explained(connection, views.sql(outbox.names, views.PARKED))
    scans = [node for node in nodes(plan) if node.get("Relation Name") == "outbox_parked"]
    assert {node["Node Type"] for node in scans} <= {"Index Scan", "Index Only Scan"}
    assert max(node["Actual Rows"] for node in scans) <= views.PER_SINK_MAX
    counted = {count.sink: (count.events, count.at_least) for count in await views.parked(connection, outbox.names)}
    assert counted == {"small": (100, False), "big": (views.PER_SINK_MAX, True)}


# --- figures -------------------------------------------------------------------------------------------


async def test_the_backlog_is_what_is_not_settled(connection: Any, outbox: Outbox) -> None:
    fill(outbox, 300)
    outbox.execute("UPDATE {outbox} SET published_at = now() WHERE topic = 't0'")
    found = await views.backlog(connection, outbox.names)
    assert {topic.topic: topic.events for topic in found.topics} == {"t1": 100, "t2": 100}
    assert (found.events, found.events_max, found.at_least) == (200, 200, False)


async def test_the_oldest_age_is_by_the_servers_clock_and_survives_odd_dates(connection: Any, outbox: Outbox) -> None:
    """FIELD.md A5: `created_at` belongs to the application and may be infinity; the age comes from `stored_at`."""
    with psycopg.connect(outbox.app_dsn) as app:
        for created in ("infinity", "-infinity", "0044-03-15 BC", "20231-01-01"):
            app.execute("INSERT INTO outbox (topic, payload, created_at) VALUES ('t', '1', %s)", [created])
    outbox.execute("UPDATE {outbox} SET stored_at = now() - interval '90 seconds' WHERE created_at = 'infinity'")
    (topic,) = (await views.backlog(connection, outbox.names)).topics
    assert topic.events == 4
    assert 90 <= topic.oldest_age_seconds < 150


async def test_an_empty_outbox_has_empty_figures(connection: Any, outbox: Outbox) -> None:
    found = await views.overview(connection, outbox.names)
    assert (found.backlog.events, found.backlog.oldest_age_seconds, found.backlog.topics) == (0, 0.0, ())
    assert (found.parked, found.dead, found.dead_at_least) == ((), (), False)
    assert [(member.pod, len(member.lanes)) for member in found.members] == [(None, 64)]


async def test_dead_letters_are_counted_by_sink_and_kind(connection: Any, outbox: Outbox) -> None:
    outbox.execute(
        "INSERT INTO {dead_letter} (seq, id, created_at, stored_at, lane, sink, topic, kind, reason, holds)"
        " SELECT n, gen_random_uuid(), now(), now(), 0, CASE WHEN n < 4 THEN 'main' ELSE '' END, 't',"
        " CASE WHEN n < 4 THEN 'rejected' ELSE 'unrouted' END, 'r', n = 1 FROM generate_series(1, 5) n"
    )
    found = [
        (count.sink, count.kind, count.events, count.holding) for count in await views.dead(connection, outbox.names)
    ]
    assert found == [("", "unrouted", 2, 0), ("main", "rejected", 3, 1)]


async def test_names_with_capitals_and_quotes_work(outbox_factory: OutboxFactory) -> None:
    """FIELD.md A7."""
    outbox = outbox_factory(schema="My.App", table='Out""Box')
    outbox.execute("INSERT INTO {outbox} (topic, payload) VALUES ('t', '1')")
    connection = await asyncpg.connect(outbox.relay_dsn)
    assert (await views.overview(connection, outbox.names)).backlog.events == 1
    assert (await views.traffic(connection, outbox.names)).at > 0
    await connection.close()


async def test_traffic_counts_what_was_stored_and_settled(connection: Any, outbox: Outbox) -> None:
    before = await views.traffic(connection, outbox.names)
    fill(outbox, 30)
    outbox.execute("DELETE FROM {outbox} WHERE topic = 't1'")
    outbox.execute("SELECT pg_stat_force_next_flush()")
    after = await views.traffic(connection, outbox.names)
    while (after.stored - before.stored, after.settled - before.settled) != (
        30,
        10,
    ):  # backends report when they are idle
        after = await views.traffic(connection, outbox.names)
    assert after.rates(before)[0] > after.rates(before)[1] > 0


async def test_the_views_fit_into_a_transaction_of_the_caller(connection: Any, outbox: Outbox) -> None:
    """A pool that begins by itself, as behind a transaction pooler; the caller's other queries come after."""
    outbox.execute("INSERT INTO {member} (pod, expires_at, started_at) VALUES ('a', now(), '2026-01-02 03:04:05+00')")
    fill(outbox, 3)
    await connection.execute("BEGIN")
    found = await views.overview(connection, outbox.names)
    await connection.execute("COMMIT")
    assert found.backlog.events == 3
    assert found.members[0].started_at == "2026-01-02T03:04:05Z"
    assert await connection.fetchval("SHOW enable_seqscan") == "on"
