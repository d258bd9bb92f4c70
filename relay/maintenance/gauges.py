"""Gauges that come from the database: backlog by topic, parked deliveries by sink.

Brought up to date before a scrape and at most every ten seconds, so that a pod that nobody scrapes asks
nothing, and fifty that are scraped ask little.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from relay.maintenance import views

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractAsyncContextManager

    from relay.database.names import Names
    from relay.telemetry.metrics import Metrics

    Acquire: TypeAlias = Callable[[], AbstractAsyncContextManager[Any]]

__all__ = ["ClusterGauges"]

_INTERVAL_SECONDS: Final = 10.0


class ClusterGauges:
    """`acquire` lends a connection, inside a transaction or not; `sinks` are the configured names."""

    def __init__(self, acquire: Acquire, names: Names, metrics: Metrics, sinks: Iterable[str]) -> None:
        self._acquire, self._names, self._metrics = acquire, names, metrics
        self._sinks = tuple(sinks)
        self._next = 0.0
        self._turn = asyncio.Lock()

    async def refresh(self) -> None:
        """Ask the database, unless that was done a moment ago. Raises what the driver raises; the gauges then stay."""
        async with self._turn:
            if time.monotonic() < self._next:
                return
            async with self._acquire() as connection:
                backlog = await views.backlog(connection, self._names)
                parked = await views.parked(connection, self._names)
            self._metrics.backlog((t.topic, t.events, t.oldest_age_seconds) for t in backlog.topics)
            self._show_parked({count.sink: count.events for count in parked})
            self._next = time.monotonic() + _INTERVAL_SECONDS

    def _show_parked(self, parked: dict[str, int]) -> None:
        for name in self._sinks:
            self._metrics.sink(name).parked_events.set(parked.pop(name, 0))
        if parked:  # rows of sinks that were renamed or removed: nobody delivers them
            self._metrics.sink("").parked_events.set(sum(parked.values()))
