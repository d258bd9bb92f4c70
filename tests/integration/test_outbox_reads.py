"""Reading the outbox on PostgreSQL: what a read returns, how much of it, and when it may be handed on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psycopg
import pytest

from relay.demo.servers import Postgres
from relay.sources.polling.contracts import Cursor
from relay.store import Parked
from relay.types import TIMESTAMP_INFINITY, TIMESTAMP_MINUS_INFINITY, Lease
from tests.conftest import running
from tests.integration.pods import Timer, connected, lane_of, pod, publish, source_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from relay.types import Message
    from tests.outbox import Outbox, OutboxFactory


@pytest.fixture(scope="module")
def postgres_with_a_lazy_wal_writer() -> Iterator[Postgres]:
    """Asynchronous commits stay in memory for 10 s."""
    yield from running(lambda: Postgres(settings={"wal_writer_delay": "10s", "autovacuum": "off"}))


async def test_a_lane_that_was_lost_shows_nothing(outbox: Outbox) -> None:
    """Its new owner has parked the key's first event, and the old one does not know yet that it is taken for dead."""
    async with pod(outbox, "old") as old, pod(outbox, "new") as new:
        old.session_key = 1  # nobody holds that lock: the session has ended
        before = await old.join()
        await publish(outbox, ("k", "{}"))
        (first,) = await old.read(list(before.values()))
        leases = await new.join()
        (taken,) = await new.read(list(leases.values()))
        assert taken.id == first.id
        await new.parking.park("main", [Parked(taken)], [taken])
        await publish(outbox, ("k", "{}"))
        assert await old.read(list(before.values())) == []
        assert len(await new.read(list(leases.values()))) == 1


@pytest.mark.parametrize("payload", ["json", "jsonb", "text", "bytea"])
async def test_an_event_arrives_as_it_was_inserted(outbox_factory: OutboxFactory, payload: str) -> None:
    """Text of json and text byte for byte, jsonb as PostgreSQL prints it, bytea raw; NULL and empty are not the same."""
    outbox = outbox_factory(payload=payload)
    text = r'{"s":"\u0000\ud800",  "n":1234567890123456789012}'
    given: dict[str, list[str | bytes | None]] = {
        "json": [text, "null", None],
        "jsonb": ['{"b": 1.50,"a":1234567890123456789012}', "null", None],
        "text": [text, "", None],
        "bytea": [bytes(range(256)), b"", None],
    }
    printed = {'{"b": 1.50,"a":1234567890123456789012}': '{"a": 1234567890123456789012, "b": 1.50}'}
    async with pod(outbox) as one, connected(outbox.app_dsn) as app:
        leases = await one.join()
        for value in given[payload]:
            await app.execute(
                outbox.names.format("INSERT INTO {outbox} (topic, key, payload) VALUES ('t', 'k', $1)"), value
            )
        expected = [
            value if value is None or isinstance(value, bytes) else printed.get(value, value).encode()
            for value in given[payload]
        ]
        messages = await one.read(list(leases.values()))
        assert [message.payload for message in messages] == expected
        assert {(m.topic, m.key, m.destination, m.headers, m.parked) for m in messages} == {("t", "k", "t", None, None)}


async def test_moments_are_exact_or_infinite(outbox: Outbox) -> None:
    """Years BC, years after 9999 and infinity pass as microseconds since the Unix epoch (FIELD.md A5)."""
    given = {
        "infinity": TIMESTAMP_INFINITY,
        "-infinity": TIMESTAMP_MINUS_INFINITY,
        "0044-03-15 00:00:00+00 BC": -63_517_824_000_000_000,
        "20231-01-01 00:00:00+00": 576261475200000000,
        "2026-01-01 00:00:00.123456+00": 1_767_225_600_123_456,
    }
    async with pod(outbox) as one, connected(outbox.app_dsn) as app:
        leases = await one.join()
        for moment in given:
            await app.execute(
                outbox.names.format(f"INSERT INTO {{outbox}} (topic, key, created_at) VALUES ('t', 'k', '{moment}')")
            )
        messages = await one.read(list(leases.values()))
        expected = [
            row[0]
            for row in outbox.execute(
                "SELECT CASE WHEN isfinite(created_at) THEN (extract(epoch FROM created_at) * 1000000)::bigint END"
                " FROM {outbox} ORDER BY seq"
            )
        ]
        assert [m.created_at for m in messages] == [
            infinite if exact is None else exact for infinite, exact in zip(given.values(), expected, strict=True)
        ]
        assert messages[0].created_at == TIMESTAMP_INFINITY
        assert messages[1].created_at == TIMESTAMP_MINUS_INFINITY
        assert all(abs(m.stored_at / 1e6 - time.time()) < 60 for m in messages)


async def test_a_read_keeps_to_its_cursors(outbox: Outbox) -> None:
    """Only the lanes asked for, above each one's floor, in order, up to each one's limit; settled rows never."""
    async with pod(outbox, settle="keep") as one:
        leases = await one.join()
        await publish(outbox, *[("k", "{}")] * 5, ("other", "{}"))
        lane, other = lane_of(outbox, "k"), lane_of(outbox, "other")
        assert lane != other
        page = await one.reader.read([Cursor(leases[lane], 0, 3)])
        first = list(page.rows[leases[lane]])
        assert len(first) == 3
        assert [row.seq for row in first] == sorted(row.seq for row in first)
        assert set(page.rows) == {leases[lane]}
        assert page.mark.last_value == 6
        assert page.mark.server == leases[lane].server
        await one.settler.settle(first[:1])
        page = await one.reader.read([Cursor(leases[lane], first[1].seq, 9), Cursor(leases[other], 0, 9)])
        assert [row.seq for row in page.rows[leases[lane]]] == [3, 4, 5]
        assert [row.seq for row in page.rows[leases[other]]] == [6]
        assert [row.seq for row in await one.read([leases[lane]])] == [2, 3, 4, 5]


async def test_a_sequence_that_was_never_used_has_given_out_nothing(outbox: Outbox) -> None:
    """`last_value` of a fresh sequence is the number that it will give out: 1 would put the first event below the floor."""
    async with pod(outbox) as one:
        leases = await one.join()
        page = await one.reader.read([Cursor(leases[0], 0, 1)])
        assert page.mark.last_value == 0
        await publish(outbox, ("k", "{}"))
        page = await one.reader.read([Cursor(leases[0], 0, 1)])
        assert page.mark.last_value == 1


@pytest.mark.parametrize("text", ["incompressible", "compressible"])
async def test_a_large_payload_is_withheld_and_fetched_alone(outbox: Outbox, text: str) -> None:
    """Nothing large comes with a read, however small it is on disk; its size is told, and it comes whole."""
    async with pod(outbox) as one, connected(outbox.app_dsn) as app:
        leases = await one.join()
        source = "repeat('x', 1000000)" if text == "compressible" else "string_agg(md5(n::text), '')"
        await app.execute(
            outbox.names.format(
                f"INSERT INTO {{outbox}} (topic, key, payload) SELECT 't', 'k', to_json({source})"
                " FROM generate_series(1, 31250) n" + (" LIMIT 1" if text == "compressible" else "")
            )
        )
        await publish(outbox, ("k", '{"small":1}'))
        lease = leases[lane_of(outbox, "k")]
        page = await one.reader.read([Cursor(lease, 0, 9)])
        large, small = page.rows[lease]
        assert (large.payload, small.payload) == (None, b'{"small":1}')
        assert set(page.withheld) == {large.seq}
        assert page.withheld[large.seq] == pytest.approx(1_000_002, rel=0.1)
        assert await one.reader.payload(large)
        assert large.payload is not None
        assert len(large.payload) == 1_000_002


async def test_a_withheld_payload_of_a_row_that_is_gone_is_not_invented(outbox: Outbox) -> None:
    """Settled by somebody, or the number belongs to another server's event by now: there is nothing to send."""
    async with pod(outbox) as one:
        leases = await one.join()
        await publish(outbox, ("k", "{}"))
        (message,) = await one.read(list(leases.values()))
        assert message.lease is not None
        message.payload, lease = None, message.lease
        message.lease = Lease(lease.lane, lease.epoch, "1.0/00000009")
        assert not await one.reader.payload(message)
        message.lease = lease
        assert await one.reader.payload(message)
        await one.settler.settle([message])
        assert not await one.reader.payload(message)


async def test_settling_names_the_server_and_is_idempotent(outbox_factory: OutboxFactory) -> None:
    """Numbers of another incarnation settle nothing; again settles nothing more; `keep` keeps the row."""
    for settle in ("delete", "keep"):
        outbox = outbox_factory()
        async with pod(outbox, settle=settle) as one:
            leases = await one.join()
            await publish(outbox, ("k", "{}"), ("j", "{}"))
            first, second = await one.read(list(leases.values()))
            assert second.lease is not None
            lease, second.lease = second.lease, Lease(second.lane, second.lease.epoch, "1.0/00000009")
            await one.settler.settle([first, second])
            second.lease = lease
            assert [row.seq for row in await one.read(list(leases.values()))] == [second.seq]
            moments = "SELECT seq, published_at FROM {outbox} ORDER BY seq"
            before = outbox.execute(moments)
            await one.settler.settle([first])
            assert outbox.execute(moments) == before
            assert [row[0] for row in before] == ([2] if settle == "delete" else [1, 2])


async def test_partitioned_rows_are_read_and_settled(outbox_factory: OutboxFactory) -> None:
    """The same in a partitioned outbox, several days in one batch."""
    outbox = outbox_factory(partitioned=True)
    async with pod(outbox) as one:
        leases = await one.join()
        await publish(outbox, *[("k", "{}")] * 3)
        outbox.execute("UPDATE {outbox} SET stored_at = stored_at + interval '20 days' WHERE seq = 2")
        messages = await one.read(list(leases.values()))
        assert [message.seq for message in messages] == [1, 2, 3]
        await one.settler.settle(messages[:2])
        assert [message.seq for message in await one.read(list(leases.values()))] == [3]


async def test_the_sweep_sees_what_lies_below_a_floor(outbox: Outbox) -> None:
    async with pod(outbox) as one:
        leases = await one.join()
        await publish(outbox, *[("k", "{}")] * 4)
        lease = leases[lane_of(outbox, "k")]
        assert await one.reader.below([Cursor(lease, 2, 9)]) == {lease: [1, 2]}
        assert await one.reader.below([Cursor(lease, 3, 1)]) == {lease: [1]}
        assert await one.reader.below([Cursor(lease, 0, 9)]) == {}


async def test_a_read_returns_only_what_a_crash_cannot_take_back(
    postgres_with_a_lazy_wal_writer: Postgres, outbox_factory: OutboxFactory
) -> None:
    """Rows of asynchronous commits are visible at once, and flushed 10 s later: the read flushes (rule 10b)."""
    outbox = outbox_factory(server=postgres_with_a_lazy_wal_writer)
    async with pod(outbox) as one, connected(outbox.app_dsn) as app, connected(outbox.admin_dsn) as observer:
        leases = await one.join()
        await app.execute("SET synchronous_commit = off")
        lease = leases[lane_of(outbox, "k")]
        for number in range(1, 4):
            await app.execute(outbox.names.format("INSERT INTO {outbox} (topic, key) VALUES ('t', 'k')"))
            written = await observer.fetchval("SELECT pg_current_wal_insert_lsn()::text")
            flushed = await observer.fetchval("SELECT pg_current_wal_flush_lsn() >= $1::text::pg_lsn", written)
            assert not flushed, "the producer's commit was flushed before the read: this test shows nothing"
            page = await one.reader.read([Cursor(lease, 0, 9)])
            assert await observer.fetchval("SELECT pg_current_wal_flush_lsn() >= $1::text::pg_lsn", written)
            assert len(page.rows[lease]) == number


async def test_the_source_hands_on_only_what_a_crash_cannot_take_back(
    postgres_with_a_lazy_wal_writer: Postgres, outbox_factory: OutboxFactory
) -> None:
    """Also when the floor has risen over numbers, and a flush for them is left out; a look at the locks flushes too."""
    outbox = outbox_factory(server=postgres_with_a_lazy_wal_writer)
    async with pod(outbox) as one, connected(outbox.app_dsn) as app, connected(outbox.admin_dsn) as observer:
        source, sink, _ = source_of(one, Timer())
        source.gain((await one.join()).values())
        await app.execute("SET synchronous_commit = off")
        flushed: list[bool] = []
        submit = sink.submit

        async def insert() -> str:
            await app.execute(outbox.names.format("INSERT INTO {outbox} (topic, key) VALUES ('t', 'k')"))
            return str(await observer.fetchval("SELECT pg_current_wal_insert_lsn()::text"))

        is_flushed = "SELECT pg_current_wal_flush_lsn() >= $1::text::pg_lsn"
        for _ in range(5):
            written = await insert()
            assert not await observer.fetchval(is_flushed, written)
            with psycopg.connect(outbox.admin_dsn, autocommit=True) as at_once:

                def look(messages: Sequence[Message]) -> None:
                    flushed.extend(
                        at_once.execute(is_flushed.replace("$1", "%s").encode(), [written]).fetchone() == (True,)  # noqa: B023
                        for _ in messages
                    )
                    submit(messages)

                sink.submit = look  # type: ignore[method-assign]
                for _ in range(2):
                    source._sampled_at = -1e9
                    await source._read(100, 1_000_000)
                    await sink.settled()
        assert flushed == [True] * 5
        written = await insert()
        await one.reader.holders()
        assert await observer.fetchval(is_flushed, written)


async def test_a_pod_that_owns_all_lanes_reads_them_in_one_range(outbox: Outbox) -> None:
    """By number and not by lane, the same rows; and nothing any more once one of the lanes is another pod's."""
    async with pod(outbox) as one:
        leases = list((await one.join()).values())
        await publish(outbox, *[(f"k{number}", "{}") for number in range(40)])
        page = await one.reader.read_all(leases, 5, 30)
        assert page.last is not None
        assert page.last.seq == 35
        assert sorted(row.seq for rows in page.rows.values() for row in rows) == list(range(6, 36))
        assert all(row.lease is lease and row.lane == lease.lane for lease, rows in page.rows.items() for row in rows)
        assert all([row.seq for row in rows] == sorted(row.seq for row in rows) for rows in page.rows.values())
        outbox.execute("UPDATE {lease} SET epoch = epoch + 1, owner = 'other' WHERE lane = 7")
        assert (await one.reader.read_all(leases, 5, 30)).rows == {}
