"""One lane while this pod reads it: what is in flight, where its floor is, how much to ask for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from relay.types import TIMESTAMP_MINUS_INFINITY

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from relay.types import Lease, Message

__all__ = ["LaneReader"]

_LIMIT_MIN: Final = 8


class LaneReader:
    """Filters what a read returns down to what is new.

    A read re-reads whatever is in flight above the floor. A row that was settled while a read was on its
    way may still be in that read's snapshot, so it is remembered until the read is over.
    """

    __slots__ = ("_idle", "_reading", "_settled", "floor", "in_flight", "lease", "limit", "since", "stopped")

    def __init__(self, lease: Lease, limit: int) -> None:
        self.lease = lease
        self.floor = 0
        self.since = TIMESTAMP_MINUS_INFINITY
        """Server's clock when the number of the floor had been given out: what lies above it was stored later."""
        self.limit = limit
        self.stopped = False
        self.in_flight: set[int] = set()
        self._settled: set[int] = set()
        self._reading = False
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        """A read starts."""
        self._reading = True

    def end(
        self, rows: Sequence[Message], limit: int, stable: int, stable_at: int = TIMESTAMP_MINUS_INFINITY
    ) -> list[Message]:
        """A read with this limit returned these rows. Returns the new ones, which are in flight from now on.

        `stable` and `stable_at` are the horizon from before the read began (relay.floor).
        """
        new = self.take(rows)
        self._adapt(len(rows), limit)
        if len(rows) < limit or stable <= rows[-1].seq:
            self.rise(stable, stable_at)
        else:
            self.rise(rows[-1].seq, rows[-1].stored_at)
        return new

    def take(self, rows: Sequence[Message]) -> list[Message]:
        """The read is over and returned these rows of the lane. Returns the new ones, in flight from now on."""
        self._reading = False
        if self.stopped:  # on its way to another pod, which reads these rows itself
            self.cancel()
            return []
        known = self.in_flight
        new = [row for row in rows if row.seq not in known] if known else list(rows)
        if self._settled:
            self._forget(self._settled)
            self._settled = set()
        if new:
            known.update([row.seq for row in new])
            self._idle.clear()
        return new

    def reset(self) -> None:
        """Read from the start again."""
        self.floor, self.since = 0, TIMESTAMP_MINUS_INFINITY

    def rise(self, floor: int, at: int) -> None:
        """Nothing unknown can appear up to this number, which had been given out by the server's time `at`."""
        if not self.stopped and floor > self.floor:
            self.floor, self.since = floor, at

    def cancel(self) -> None:
        """The read failed or was thrown away."""
        self._reading = False
        self._forget(self._settled)
        self._settled = set()

    def done(self, seqs: Iterable[int]) -> None:
        """The pipeline is done with these."""
        if self._reading:
            self._settled.update(seqs)
        else:
            self._forget(seqs)

    def _forget(self, seqs: Iterable[int]) -> None:
        self.in_flight.difference_update(seqs)
        if not self.in_flight:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until nothing is in flight. Only meaningful after `stopped`."""
        await self._idle.wait()

    def _adapt(self, returned: int, limit: int) -> None:
        if returned >= limit:
            self.limit = max(self.limit, limit) * 2
        elif returned < limit // 4:
            self.limit = max(self.limit // 2, _LIMIT_MIN)
