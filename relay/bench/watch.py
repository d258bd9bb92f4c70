"""When the first and the last event of a backlog were settled, seen from the table and almost for free.

The first and last row of each lane are looked up by primary key: 128 index probes a look, whatever the size
of the backlog. The contender's own counters would not do: the raw loop has none.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from relay.bench.accounts import Sessions
from relay.errors import RelayError

if TYPE_CHECKING:
    import asyncpg

    from relay.bench.contender import Running

__all__ = ["Drain", "TooFew", "Watch"]

_LOOK_SECONDS: Final = 0.01
_PENDING: Final = "SELECT count(*) FROM outbox WHERE seq = ANY($1::bigint[]) AND published_at IS NULL"
_ANY: Final = "SELECT EXISTS (SELECT FROM outbox WHERE published_at IS NULL)"
_ALL: Final = "SELECT count(*) FROM outbox WHERE published_at IS NULL"


@dataclass(frozen=True, slots=True)
class Drain:
    """One drain. `events` and `cpu_seconds` belong to `seconds`: what was settled before the first look is left out."""

    events: int
    seconds: float
    cpu_seconds: float
    server_cpu_seconds: float
    first_event_seconds: float
    rss_peak_mb: float

    @property
    def per_second(self) -> float:
        """Events per second of wall time."""
        return self.events / self.seconds

    @property
    def cpu_us(self) -> float:
        """Microseconds of CPU of the contender's process for each event."""
        return self.cpu_seconds * 1e6 / self.events

    @property
    def server_cpu_us(self) -> float:
        """Microseconds of CPU of the contender's sessions in PostgreSQL for each event."""
        return self.server_cpu_seconds * 1e6 / self.events


class TooFew(RelayError):
    """Everything was settled before the first look: take more events."""


class Watch:
    """Watches one database; made before the contender starts."""

    def __init__(self, connection: asyncpg.Connection[Any], first: list[int], last: list[int]) -> None:
        self._connection, self._first, self._last = connection, first, last

    @classmethod
    async def on(cls, connection: asyncpg.Connection[Any]) -> Watch:
        """Note the ends of each lane."""
        rows = await connection.fetch("SELECT min(seq), max(seq) FROM outbox WHERE published_at IS NULL GROUP BY lane")
        return cls(connection, [row[0] for row in rows], [row[1] for row in rows])

    async def drained(self, running: Running) -> Drain:
        """Wait for the first settled row, then for the last one."""
        while await self._pending(self._first) == len(self._first):
            running.check()
            await asyncio.sleep(_LOOK_SECONDS)
        first_at = time.monotonic()
        events = await self._connection.fetchval(_ALL)
        if not events:
            raise TooFew("everything was settled before the first look: take more --events")
        return await self._rest(running, events, first_at - running.started_at)

    async def last_settled(self, running: Running) -> None:
        """Wait until nothing is left."""
        while await self._pending(self._last) or await self._connection.fetchval(_ANY):
            running.check()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _rest(self, running: Running, events: int, first_event_seconds: float) -> Drain:
        sessions = Sessions(self._connection)
        await sessions.begin()
        began, cpu = time.monotonic(), running.cpu_seconds()
        await self.last_settled(running)
        seconds, cpu_seconds = time.monotonic() - began, running.cpu_seconds() - cpu
        return Drain(
            events, seconds, cpu_seconds, await sessions.seconds(), first_event_seconds, running.rss_mb(peak=True)
        )

    async def _pending(self, seqs: list[int]) -> int:
        found: int = await self._connection.fetchval(_PENDING, seqs)
        return found
