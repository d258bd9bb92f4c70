"""How far up the sequence a reader may skip (pure; PROTOCOLS.md rule 8).

"Not settled" is the only cursor that is safe by itself: a transaction may commit late with a lower
number, and a later event of the same key, inserted after that commit, must not be read without it.
But a read from the very start crawls over the dead index entries of everything delivered while
somebody holds an old snapshot. So a reader skips what lies below a *floor*, and the floor rises only
over numbers that no transaction can still bring in:

1. sample `last_value` of the sequence, and after it the holders of ROW EXCLUSIVE on the outbox: whoever
   took a number up to `last_value` had the lock before, so it is among the holders or it has ended;
2. once every one of those holders has ended (a lock is released after its transaction became visible),
   a read that starts later sees every number up to `last_value` that was ever committed;
3. such a read moves the lane's floor up to `last_value`, or to the last row that its limit let through.

A sample counts only when the WAL is flushed up to where it was taken: a crash could otherwise hand the
same numbers out again, below the floor. All of it lives in memory, for one claim on one server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

__all__ = ["Horizon", "Sample"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the server, taken in this order.

    `server`      identity of the server's incarnation (start time and timeline)
    `last_value`  of the outbox's sequence
    `holders`     virtual transactions that hold ROW EXCLUSIVE on the outbox or a partition of it
    `at`          the server's clock when `last_value` was read, in microseconds since the Unix epoch
    """

    server: str
    last_value: int
    holders: AbstractSet[str]
    at: int = 0


class Horizon:
    """The highest number up to which no open transaction can bring in a row any more.

    `stable` may be used by a read that *starts* after it was returned, and only if `server` is who answers it:
    a promoted standby gives the same numbers out again. Numbers above it were given out after `stable_at`, by
    the server's clock.
    """

    __slots__ = ("_candidate", "_candidate_at", "_waiting", "server", "stable", "stable_at")

    def __init__(self) -> None:
        self.stable = self.stable_at = 0
        self.server = ""
        self._candidate = self._candidate_at = 0
        self._waiting: frozenset[str] = frozenset()

    def observe(self, sample: Sample) -> bool:
        """Take a durable sample. Returns False when the server changed: the caller resets its floors."""
        if sample.server != self.server:
            first = self.server == ""
            self.server = sample.server
            self.stable = self.stable_at = 0
            self._begin(sample)
            self._promote(sample)
            return first
        self._waiting &= sample.holders
        self._promote(sample)
        return True

    def _promote(self, sample: Sample) -> None:
        if self._waiting:
            return
        self.stable, self.stable_at = self._candidate, self._candidate_at
        self._begin(sample)
        if not self._waiting:
            self.stable, self.stable_at = self._candidate, self._candidate_at

    def _begin(self, sample: Sample) -> None:
        self._candidate, self._candidate_at = sample.last_value, sample.at
        self._waiting = frozenset(sample.holders)
