"""`relay bench memory`: resident memory of a pod while idle, and the most through a backlog in one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.bench.brokers import prepare
from relay.bench.databases import filled
from relay.bench.growth import appearing
from relay.bench.report import Report, Table
from relay.bench.workload import Workload

if TYPE_CHECKING:
    from relay.bench.rig import Rig

__all__ = ["memory"]

_COLUMNS = ("backlog", "idle MB", "peak MB", "events/s")


async def memory(rig: Rig, *, events: int) -> Report:
    """A full drain of `events` rows that one transaction inserted."""
    await prepare(rig.target)
    async with filled(rig.server, Workload(events, topic=rig.target.topic)) as dsn:
        cost = await appearing(rig, dsn)
    row = (f"{events:,} rows in one transaction", cost.rss_before_mb, cost.rss_peak_mb, cost.events / cost.seconds)
    return rig.report(
        f"memory {rig.target.sink}", Table(f"memory → {rig.target.sink}", _COLUMNS, (row,), bars="peak MB")
    )
