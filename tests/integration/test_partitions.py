"""Partitions are there before they are needed, whoever makes them, and inserts never wait for it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from relay.errors import PermissionMissing, SchemaMismatch
from relay.maintenance.partitions import ensure_ahead, list_partitions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from relay.demo.servers import Postgres
    from relay.maintenance.partitions import Partition
    from tests.outbox import Outbox, OutboxFactory


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


@pytest.fixture
def partitioned(outbox_factory: OutboxFactory) -> Outbox:
    """A partitioned outbox as `relay migrate` leaves it."""
    return outbox_factory(partitioned=True)


def assert_gapless(partitions: Sequence[Partition]) -> None:
    for earlier, later in pairwise(partitions):
        assert earlier.upper == later.lower


async def test_migrate_makes_partitions_for_eight_weeks(partitioned: Outbox) -> None:
    """Weeks from Monday to Monday in UTC, around now and 8 weeks ahead, without a gap."""
    async with connected(partitioned.relay_dsn) as relay:
        partitions = await list_partitions(relay, partitioned.names)
    now = datetime.now(UTC)
    assert partitions[0].lower is not None
    assert partitions[0].lower <= now - timedelta(days=7)
    assert partitions[-1].upper is not None
    assert now + timedelta(weeks=8) <= partitions[-1].upper <= now + timedelta(weeks=9)
    assert_gapless(partitions)
    assert all(p.lower and p.upper and p.upper - p.lower == timedelta(days=7) for p in partitions)
    assert all(p.lower and (p.lower.weekday(), p.lower.hour) == (0, 0) for p in partitions)


async def test_the_relay_keeps_them_ahead(partitioned: Outbox) -> None:
    """With its own role, which owns nothing; a second call finds nothing to do; another step joins on."""
    names = partitioned.names
    async with connected(partitioned.relay_dsn) as relay:
        assert await ensure_ahead(relay, names) == []
        before = await list_partitions(relay, names)
        made = await ensure_ahead(relay, names, step="day", ahead=timedelta(weeks=10))
        assert 7 <= len(made) <= 21
        assert await ensure_ahead(relay, names, step="day", ahead=timedelta(weeks=10)) == []
        back_to_weeks = await ensure_ahead(relay, names, step="week", ahead=timedelta(weeks=20))
        after = await list_partitions(relay, names)
    assert len(after) == len(before) + len(made) + len(back_to_weeks)
    assert_gapless(after)


async def test_a_time_zone_of_the_session_changes_nothing(partitioned: Outbox) -> None:
    """Ranges are of UTC, and the text in which PostgreSQL prints them is read as it was written."""
    async with connected(partitioned.relay_dsn) as relay:
        await relay.execute("SET timezone = 'Pacific/Auckland'; SET datestyle = 'German, DMY'")
        assert await ensure_ahead(relay, partitioned.names) == []
        await ensure_ahead(relay, partitioned.names, ahead=timedelta(weeks=30))
        assert_gapless(await list_partitions(relay, partitioned.names))


async def test_after_a_long_absence_the_present_is_covered(partitioned: Outbox) -> None:
    """When even the last range is in the past, ranges go on from this week; nothing is written to the past."""
    names = partitioned.names
    async with connected(partitioned.relay_dsn) as relay:
        for partition in await list_partitions(relay, names):
            partitioned.execute(f"DROP TABLE {names.relation(partition.name.removeprefix(names.table))}")
        partitioned.execute(
            "CREATE TABLE old PARTITION OF {outbox} FOR VALUES FROM ('2020-01-01 00:00Z') TO ('2020-01-08 00:00Z')"
        )
        await ensure_ahead(relay, names)
        partitions = await list_partitions(relay, names)
    assert len(partitions) in (10, 11)
    assert partitions[1].lower is not None
    assert datetime.now(UTC) - timedelta(days=7) < partitions[1].lower <= datetime.now(UTC)


async def test_many_pods_at_once(partitioned: Outbox) -> None:
    """One makes them, the others come back at once; nothing fails and nothing is made twice."""
    names = partitioned.names

    async def pod() -> Sequence[str]:
        async with connected(partitioned.relay_dsn) as relay:
            return await ensure_ahead(relay, names, step="day", ahead=timedelta(days=80))

    made = await asyncio.gather(*(pod() for _ in range(8)))
    everything = [name for names_of_pod in made for name in names_of_pod]
    assert len(everything) == len(set(everything)) > 0
    async with connected(partitioned.relay_dsn) as relay:
        assert_gapless(await list_partitions(relay, names))


async def test_inserts_never_wait(partitioned: Outbox) -> None:
    """An open writer delays no partition, and an attach that has not committed delays no writer."""
    names = partitioned.names
    insert = names.format("INSERT INTO {outbox} (topic) VALUES ('t')")
    async with (
        connected(partitioned.app_dsn) as writer,
        connected(partitioned.app_dsn) as second_writer,
        connected(partitioned.relay_dsn) as relay,
    ):
        await writer.execute(f"BEGIN; {insert}")
        transaction = relay.transaction()
        await transaction.start()
        assert await ensure_ahead(relay, names, ahead=timedelta(weeks=12))
        await second_writer.execute("SET lock_timeout = '1s'")
        await second_writer.execute(insert)
        await writer.execute(insert)
        await transaction.commit()
        await writer.execute("COMMIT")
    assert partitioned.execute("SELECT count(*) FROM {outbox}") == [(3,)]


async def test_a_partition_is_like_the_outbox(outbox_factory: OutboxFactory, any_postgres: Postgres) -> None:
    """Same columns, constraints and indexes, the relay's rights, and storage that suits a queue; on each version."""
    outbox = outbox_factory(server=any_postgres, partitioned=True)
    names = outbox.names
    async with connected(outbox.relay_dsn) as relay:
        partition = names.relation((await list_partitions(relay, names))[0].name.removeprefix(names.table))
        made = await ensure_ahead(relay, names, ahead=timedelta(weeks=9, days=1))
    for child in (partition, made[-1]):
        assert outbox.execute(
            "SELECT count(*), bool_and(i.inhparent IS NOT NULL) FROM pg_index x"
            " LEFT JOIN pg_inherits i ON i.inhrelid = x.indexrelid"
            f" WHERE x.indrelid = '{child}'::regclass"
        ) == [(3, True)]
        assert outbox.execute(
            f"SELECT count(*) FROM pg_constraint WHERE conrelid = '{child}'::regclass AND contype = 'c'"
        ) == [(1,)]
        (options,) = outbox.execute(f"SELECT reloptions FROM pg_class WHERE oid = '{child}'::regclass")[0]
        assert "vacuum_truncate=false" in options
        for right in ("SELECT", "DELETE"):
            assert outbox.execute(f"SELECT has_table_privilege('test_relay', '{child}', '{right}')") == [(True,)]
        assert outbox.execute(f"SELECT has_column_privilege('test_relay', '{child}', 'published_at', 'UPDATE')") == [
            (True,)
        ]
        assert outbox.execute(f"SELECT has_any_column_privilege('test_app', '{child}', 'INSERT')") == [(False,)]


async def test_names_that_need_quoting(outbox_factory: OutboxFactory) -> None:
    """FIELD.md A7, in the one place that builds SQL inside the server."""
    outbox = outbox_factory(partitioned=True, schema="My.'App", table="Out\"Bo%sx'")
    async with connected(outbox.relay_dsn) as relay:
        made = await ensure_ahead(relay, outbox.names, ahead=timedelta(weeks=12))
        assert_gapless(await list_partitions(relay, outbox.names))
    assert made[0].startswith('"My.\'App"."Out""Bo%sx\'_20')
    async with connected(outbox.app_dsn) as app:
        await app.execute(outbox.names.format("INSERT INTO {outbox} (topic) VALUES ('t')"))


@pytest.mark.parametrize(
    ("step", "ahead"), [("2 days", "8 weeks"), ("1 day", "2 years"), ("1 day", "-1 day"), ("1 day", None)]
)
async def test_the_function_refuses_other_arguments(partitioned: Outbox, step: str, ahead: str | None) -> None:
    """It runs with the owner's rights, so the relay's role must not be able to flood the catalog with it."""
    async with connected(partitioned.relay_dsn) as relay:
        with pytest.raises(asyncpg.InvalidParameterValueError):
            await relay.fetch(
                partitioned.names.format("SELECT {ensure_partitions}($1::text::interval, $2::text::interval)"),
                step,
                ahead,
            )


async def test_the_application_may_not_make_partitions(partitioned: Outbox) -> None:
    """Functions are PUBLIC by default; this one is not. The error names the grant."""
    async with connected(partitioned.app_dsn) as app:
        with pytest.raises(PermissionMissing) as caught:
            await ensure_ahead(app, partitioned.names)
    assert "GRANT EXECUTE ON FUNCTION" in caught.value.hint


async def test_a_plain_outbox_has_none(outbox: Outbox) -> None:
    """Listing is empty, making is a mistake that is named."""
    async with connected(outbox.relay_dsn) as relay:
        assert await list_partitions(relay, outbox.names) == []
        with pytest.raises(SchemaMismatch, match="not partitioned"):
            await ensure_ahead(relay, outbox.names)
