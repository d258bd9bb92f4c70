"""`relay bench growth`: is the cost of an event the same whatever the backlog, the lanes, the keys?

Here the relay runs first and the backlog becomes visible at one moment, by the commit of one transaction that
copies it from a side table: so a thousand events can be measured as well as a million.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from relay.bench.accounts import Sessions
from relay.bench.brokers import prepare
from relay.bench.contender import relay
from relay.bench.databases import connected, filled
from relay.bench.ports import free_port
from relay.bench.report import Report, Table
from relay.bench.watch import Watch
from relay.bench.workload import Workload

if TYPE_CHECKING:
    import asyncpg

    from relay.bench.contender import Running
    from relay.bench.rig import Rig

__all__ = ["Cost", "appearing", "growth"]

_ASIDE: Final = """
CREATE TABLE aside AS SELECT id, topic, key, payload, headers, seq FROM outbox ORDER BY seq;
TRUNCATE outbox
"""
_APPEAR: Final = "INSERT INTO outbox (id, topic, key, payload, headers) SELECT id, topic, key, payload, headers FROM aside ORDER BY seq"
_COLUMNS = ("case", "events/s", "relay CPU µs/event", "server's CPU µs/event", "both", "of the first", "peak RSS MB")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one backlog cost from the moment that it was visible until it was settled."""

    events: int
    seconds: float
    cpu_seconds: float
    server_cpu_seconds: float
    rss_before_mb: float
    rss_peak_mb: float

    def us(self, seconds: float) -> float:
        """Microseconds for each event."""
        return seconds * 1e6 / self.events


async def growth(rig: Rig, *, largest: int, events: int) -> Report:
    """Backlogs up to `largest`; lanes, keys and an old snapshot with `events` each."""
    topic = rig.target.topic
    sizes = [size for size in (1_000, 10_000, 100_000, 1_000_000, 10_000_000) if size <= largest]
    backlogs = [(f"{size:,} rows", Workload(size, topic=topic), False) for size in sizes]
    shapes = [
        ("64 lanes, 1,000 keys", Workload(events, topic=topic), False),
        ("1 lane", Workload(events, lanes=1, topic=topic), False),
        ("100 keys", Workload(events, keys=100, topic=topic), False),
        ("100,000 keys", Workload(events, keys=100_000, topic=topic), False),
        ("beside an old snapshot", Workload(events, topic=topic), True),
    ]
    tables = []
    for title, cases in (("Backlog, one transaction", backlogs), (f"{events:,} events each", shapes)):
        costs = [(name, await _case(rig, workload, old_snapshot=old)) for name, workload, old in cases]
        rows = tuple(_row(name, cost, costs[0][1]) for name, cost in costs)
        tables.append(Table(f"{title} → {rig.target.sink}", _COLUMNS, rows, bars="both"))
    return rig.report(f"growth {rig.target.sink}", *tables)


async def _case(rig: Rig, workload: Workload, *, old_snapshot: bool) -> Cost:
    await prepare(rig.target)
    async with filled(rig.server, workload) as dsn, AsyncExitStack() as stack:
        if old_snapshot:
            other = await stack.enter_async_context(connected(dsn))
            await other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        return await appearing(rig, dsn)


async def appearing(rig: Rig, dsn: str) -> Cost:
    """Let the backlog of a filled database appear before a relay that is awake and has nothing to do."""
    async with connected(dsn) as connection:
        await connection.execute(_ASIDE, timeout=None)
        async with relay(dsn, rig.target, free_port()).running() as running:
            await running.ready()
            return await _drain(connection, running)


async def _drain(connection: asyncpg.Connection[Any], running: Running) -> Cost:
    before = running.rss_mb()
    sessions = Sessions(connection)
    transaction = connection.transaction()
    await transaction.start()
    inserted = await connection.execute(_APPEAR, timeout=None)
    watch = await Watch.on(connection)
    await sessions.begin()
    cpu = running.cpu_seconds()
    await transaction.commit()
    began = time.monotonic()
    await watch.last_settled(running)
    return Cost(
        int(inserted.split()[-1]),
        time.monotonic() - began,
        running.cpu_seconds() - cpu,
        await sessions.seconds(),
        before,
        running.rss_mb(peak=True),
    )


def _row(name: str, cost: Cost, first: Cost) -> tuple[str | float, ...]:
    def both(some: Cost) -> float:
        return some.us(some.cpu_seconds + some.server_cpu_seconds)

    return (
        name,
        cost.events / cost.seconds,
        cost.us(cost.cpu_seconds),
        cost.us(cost.server_cpu_seconds),
        both(cost),
        both(cost) / both(first) if both(first) else 0.0,
        cost.rss_peak_mb,
    )
