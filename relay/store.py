"""The contracts of the tables that a pod writes: leases, parked events, settled rows.

`relay.stores` implements them on PostgreSQL, `tests/simulation` in memory; one contract suite runs on
both. Every method may raise SourceUnavailable (try again). Deciding methods (`park`, `finish`, `bury`)
lock the lease rows FOR SHARE in their own transaction, compare owner and epoch, and raise LeaseLost
without any effect when one does not match (PROTOCOLS.md rule 2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from relay.types import Lease, Message

__all__ = [
    "Burial",
    "HeldKey",
    "LeaseStore",
    "Membership",
    "Parked",
    "ParkedRun",
    "ParkingStore",
    "RunResult",
    "Settler",
]


@dataclass(frozen=True, slots=True)
class Membership:
    """What a pod sees when it looks: who lives, and who owns which lane at which epoch."""

    members: frozenset[str]
    owners: Mapping[int, tuple[str | None, int]]


class LeaseStore(Protocol):
    """Ownership of lanes (PROTOCOLS.md rules 1 to 3)."""

    async def renew(self, ttl_seconds: float) -> None:
        """Say that this pod lives for another `ttl_seconds` by the server's clock."""

    async def look(self) -> Membership:
        """Who lives and who owns what; one cheap read."""

    async def claim(self, count: int, owned: Collection[int]) -> Sequence[Lease]:
        """Take up to `count` lanes that are free, dead pods', or this pod's own without being among `owned`."""

    async def release(self, leases: Iterable[Lease]) -> None:
        """Hand lanes over. Leases of an older epoch are left alone."""

    async def leave(self) -> None:
        """Release everything and say that this pod is gone."""


class Settler(Protocol):
    """Marks rows as delivered (or deletes them), after the last sink's confirmation."""

    async def settle(self, messages: Sequence[Message]) -> None:
        """Settle the events of these messages. Idempotent; needs no fence. Returns when it is committed."""


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A key that has parked rows, or waits behind a dead letter. `key` None: too many to list, all of the lane."""

    sink: str
    lane: int
    key: str | None


@dataclass(frozen=True, slots=True)
class Parked:
    """One event to park. `delay_seconds` is used if it becomes the head of its key, else it waits behind it."""

    message: Message
    delay_seconds: float = 0.0
    attempts: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Burial:
    """One event that becomes a dead letter of a sink ('' when no route took it)."""

    message: Message
    sink: str
    kind: str
    reason: str
    attempts: int
    holds: bool


@dataclass(frozen=True, slots=True)
class ParkedRun:
    """Parked rows to send now: consecutive rows of one key, or a single one without a key.

    `complete`: nothing else is parked for the key, so it can be freed after them.
    """

    messages: Sequence[Message]
    complete: bool


@dataclass(slots=True)
class RunResult:
    """What became of one run: consecutive parked rows of one key (or one row without a key), in order.

    `confirmed` rows leave the table. `failed`, if any, is the row after them: it is retried after
    `delay_seconds` with `attempts` counted, or buried. What follows waits behind it, or becomes the
    head at once when nothing failed or the burial does not hold.
    """

    lease: Lease
    key: str | None
    confirmed: list[Message] = field(default_factory=list)
    failed: Message | None = None
    delay_seconds: float = 0.0
    attempts: int = 0
    error: str | None = None
    burial: Burial | None = None


class ParkingStore(Protocol):
    """Events that cannot go now while others must (PROTOCOLS.md rules 4 to 7)."""

    async def held(self, leases: Sequence[Lease]) -> Sequence[HeldKey]:
        """All keys of these lanes that have parked rows or a dead letter that holds, for every sink."""

    async def park(self, sink: str, entries: Sequence[Parked], settle: Sequence[Message]) -> None:
        """Park events of one sink, in this order, and settle rows, in one transaction.

        An event that is parked for the sink already (same seq) stays as it is.
        """

    async def bury(self, entries: Sequence[Burial], settle: Sequence[Message]) -> None:
        """Write dead letters of events that were never parked, and settle rows, in one transaction."""

    async def due(self, sink: str, leases: Sequence[Lease], heads: int, followers: int) -> Sequence[ParkedRun]:
        """Runs that may be tried now: heads whose time has come, each with up to `followers` rows behind it.

        Bounded in bytes as well; a head comes however large it is.
        """

    async def finish(self, sink: str, results: Sequence[RunResult]) -> set[tuple[int, str | None]]:
        """Record what became of runs, in one transaction. Returns the (lane, key) that are still held."""

    async def next_due(self, sink: str, leases: Sequence[Lease]) -> float | None:
        """Seconds until the next head's time comes (0 when it has), None when nothing is parked."""
