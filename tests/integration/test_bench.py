"""One tiny run of what `relay bench` is made of; a benchmark itself is no test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from relay.bench.brokers import Target
from relay.bench.contender import ContenderFailed, Running, raw
from relay.bench.databases import connected, filled, scratch
from relay.bench.watch import Watch
from relay.bench.workload import Workload

if TYPE_CHECKING:
    from tests.servers.postgres import Postgres


async def test_a_backlog_is_watched_until_its_last_row_is_settled(postgres: Postgres) -> None:
    """The smallest run of all parts: fill, copy, raw loop in its process, watch, drop."""
    target = Target("null", {}, "bench")
    workload = Workload(6_000, "batched", keys=10, lanes=8)
    async with (
        filled(postgres.superuser_dsn, workload) as template,
        scratch(postgres.superuser_dsn, template) as dsn,
        connected(dsn) as connection,
    ):
        assert await connection.fetchval("SELECT max(lane) FROM outbox") < 8
        assert await connection.fetchval("SELECT count(DISTINCT key) FROM outbox") == 10
        watch = await Watch.on(connection)
        async with raw(dsn, target).running() as running:
            drain = await watch.drained(running)
        assert await connection.fetchval("SELECT count(*) FROM outbox") == 0
    assert 0 < drain.events < 6_000
    assert drain.cpu_us > 0
    assert drain.server_cpu_us > 0


async def test_a_contender_that_ends_is_an_error_with_its_words(postgres: Postgres) -> None:
    async with raw("postgresql://nobody@127.0.0.1:1/x", Target("null", {}, "bench")).running() as running:
        with pytest.raises(ContenderFailed, match=r"(?s)raw loop ended with 1.*Connect"):
            await _ended(running)


async def _ended(running: Running) -> None:
    await running.ended()
    running.check()
