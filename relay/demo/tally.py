"""What the shop did and what the consumer saw, side by side (pure).

The shop reports each transaction after it ended, the consumer each entry of the stream. Numbers of a
customer's orders are counted by the database in the same transaction, so what is committed is 1, 2, 3, ...
without a gap: the consumer needs nobody's word to know whether something is missing, too early or invented.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["BUCKET_SECONDS", "Arrival", "Tally", "percentile"]

BUCKET_SECONDS: Final = 0.5
"""Width of one step of the charts."""
_RECENT: Final = 600
_CALM_MAX: Final = 500_000  # latencies that are kept: hours of `--keep`


@dataclass(frozen=True, slots=True)
class Arrival:
    """One entry of the stream as its consumer read it.

    `id` is the event's; `customer` and `number` say which order it is; `committed_at` was written into the
    payload just before the commit; both times are seconds since the Unix epoch.
    """

    id: str
    customer: str
    number: int
    committed_at: float
    arrived_at: float


class Tally:
    """Counts both sides. An event may arrive before the shop has heard that its commit succeeded."""

    def __init__(self) -> None:
        self.committed = 0
        self.rolled_back: set[str] = set()
        self.seen: set[str] = set()
        self.repeats = 0
        self.in_order = 0
        self.out_of_order: list[Arrival] = []
        self.longest_wait = 0.0
        self.commits_by_bucket: Counter[int] = Counter()
        self.arrivals_by_bucket: Counter[int] = Counter()
        self._waiting: dict[str, float] = {}
        self._last_number: dict[str, int] = {}
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._calm: deque[float] = deque(maxlen=_CALM_MAX)
        self._calm_since: float | None = 0.0

    # -- the shop's side -------------------------------------------------------------------------

    def commit(self, event: str, at: float) -> None:
        """A transaction with this event was committed."""
        self.committed += 1
        self.commits_by_bucket[int(at / BUCKET_SECONDS)] += 1
        if event not in self.seen:
            self._waiting[event] = at

    def roll_back(self, event: str) -> None:
        """A transaction with this event was rolled back."""
        self.rolled_back.add(event)

    # -- the consumer's side ---------------------------------------------------------------------

    def arrive(self, arrival: Arrival) -> None:
        """The consumer read an entry."""
        self.arrivals_by_bucket[int(arrival.arrived_at / BUCKET_SECONDS)] += 1
        if arrival.id in self.seen:
            self.repeats += 1
            return
        self.seen.add(arrival.id)
        self._waiting.pop(arrival.id, None)
        self._measure(arrival)
        expected = self._last_number.get(arrival.customer, 0) + 1
        self._last_number[arrival.customer] = max(arrival.number, expected - 1)
        if arrival.number == expected:
            self.in_order += 1
        else:
            self.out_of_order.append(arrival)

    def _measure(self, arrival: Arrival) -> None:
        wait = arrival.arrived_at - arrival.committed_at
        self._recent.append(wait)
        self.longest_wait = max(self.longest_wait, wait)
        if self._calm_since is not None and arrival.committed_at >= self._calm_since:
            self._calm.append(wait)

    # -- moments on purpose ----------------------------------------------------------------------

    def disturb(self) -> None:
        """Something is broken on purpose from now on: what is delivered meanwhile says nothing about latency."""
        self._calm_since = None

    def calm(self, now: float) -> None:
        """Everything works again."""
        self._calm_since = now

    # -- results ---------------------------------------------------------------------------------

    @property
    def customers(self) -> int:
        """Customers of whom something arrived."""
        return len(self._last_number)

    @property
    def waiting(self) -> int:
        """Committed, as far as the shop knows, and not arrived."""
        return len(self._waiting)

    @property
    def rolled_back_seen(self) -> int:
        """Rolled back and delivered all the same: must be 0."""
        return len(self.rolled_back & self.seen)

    def oldest_age(self, now: float) -> float:
        """Seconds that the oldest order has been waiting for."""
        return max(0.0, now - next(iter(self._waiting.values()), now))

    def recent_latency(self) -> tuple[float, float] | None:
        """p50 and p99 of the last hundreds of arrivals, in seconds."""
        return _p50_p99(self._recent)

    def calm_latency(self) -> tuple[float, float] | None:
        """p50 and p99 of the whole run, in seconds, but for the moments that were disturbed on purpose."""
        return _p50_p99(self._calm)

    def problems(self, truth: Collection[str]) -> list[str]:
        """What is wrong, against the ids that the database itself says were committed; nothing: all is well."""
        committed = set(truth)
        found = [
            (len(committed - self.seen), "committed orders did not arrive"),
            (self.rolled_back_seen, "rolled back orders arrived"),
            (len(self.seen - committed - self.rolled_back), "orders arrived that nobody committed"),
            (len(self.out_of_order), "orders arrived out of their customer's order"),
        ]
        return [f"{count:,} {what}" for count, what in found if count]


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted values are."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _p50_p99(values: Collection[float]) -> tuple[float, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return percentile(ordered, 0.5), percentile(ordered, 0.99)
