"""What the polling source needs from PostgreSQL; also implemented in memory, for the simulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from relay.types import TIMESTAMP_MINUS_INFINITY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from relay.types import Lease, Message

__all__ = ["Bell", "Cursor", "Mark", "Outbox", "Page"]


@dataclass(frozen=True, slots=True)
class Cursor:
    """Read up to `limit` unsettled rows of a lane above `floor`, all of which were stored after `since`.

    `since` is by the server's clock, in microseconds since the Unix epoch.
    """

    lease: Lease
    floor: int
    limit: int
    since: int = TIMESTAMP_MINUS_INFINITY


@dataclass(frozen=True, slots=True)
class Mark:
    """The server at the time of a read: its incarnation, the last number that the sequence gave out, its clock."""

    server: str
    last_value: int
    at: int = 0


@dataclass(frozen=True, slots=True)
class Page:
    """Rows of one read, by lane, each lane in order of `seq`.

    `last`: the row with the highest number, or None.
    `withheld`: sizes by seq of rows whose payload was too large to come along; fetch them one by one.
    """

    rows: Mapping[Lease, Sequence[Message]]
    mark: Mark
    withheld: Mapping[int, int] = field(default_factory=dict)
    last: Message | None = None


class Outbox(Protocol):
    """Reads of the outbox. Every method may raise SourceUnavailable."""

    async def read(self, cursors: Sequence[Cursor], durable: int = 0) -> Page:
        """One read with one snapshot, returned once all that it saw is durable (PROTOCOLS.md rule 10b).

        Every row up to number `durable` is known to be so already. Nothing of a lane that has another owner in
        that snapshot: what the new owner has parked would be missing, and what is behind it would go too early.
        """

    async def read_all(self, leases: Sequence[Lease], floor: int, limit: int, durable: int = 0) -> Page:
        """The same for a pod that owns every lane: up to `limit` rows above one floor, in order of `seq`.

        One range of one index instead of 64. Nothing is returned once one of the leases is another pod's.
        """

    async def payload(self, message: Message) -> bool:
        """Fetch a withheld payload into the message. False: the row is gone."""

    async def holders(self) -> AbstractSet[str] | None:
        """Virtual transactions that hold ROW EXCLUSIVE on the outbox now. None: the floor must not be used.

        Returns once all that was committed before is durable: whoever is not among the holders any more.
        """

    async def below(self, cursors: Sequence[Cursor]) -> Mapping[Lease, Sequence[int]]:
        """Unsettled numbers at or below each cursor's floor: the slow sweep beside the floor."""


class Bell(Protocol):
    """Sleep and wake-up of the whole cluster (PROTOCOLS.md rule 9).

    Never raises: without a direct connection `sleep` answers False and `wait` is only a timer.
    """

    async def busy(self) -> None:
        """Say that this pod has work, so that nobody lets the cluster sleep. Cheap when said before."""

    async def sleep(self) -> bool:
        """Try to let the cluster sleep. True: producers notify from now on; read once more, then wait."""

    async def wake(self) -> None:
        """End the sleep that this pod let the cluster into, telling the others."""

    async def wait(self, seconds: float) -> str:
        """Wait for a notification. Returns what ended the wait: notify, timeout, reconnect, ring."""

    def ring(self) -> None:
        """End a wait of this pod: it has new lanes, or stops."""
