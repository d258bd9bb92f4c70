"""The contract between a source of events and the pipeline.

A source hands messages over with `Intake.submit` as fast as `Intake` has room, and learns through
`Ledger` when the pipeline is done with each one. It never publishes and never decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.types import Lease, Message

__all__ = ["Intake", "Ledger", "Source"]


class Intake(Protocol):
    """The pipeline, seen from a source."""

    async def room(self) -> tuple[int, int]:
        """Wait until there is room worth a read. Returns free events and free bytes (each 1 or more)."""

    def submit(self, messages: Sequence[Message]) -> None:
        """Take messages, in database order for each key. Never waits: the source asked for room first."""

    async def adopt(self, leases: Sequence[Lease]) -> None:
        """Load what is held in newly claimed lanes. Returns before anything of them may be submitted."""

    async def drained(self, lease: Lease) -> None:
        """Wait until nothing that was read under this lease is in flight."""

    def abandon(self, lease: Lease) -> None:
        """Forget what is held for a lane that is lost or handed over."""


class Ledger(Protocol):
    """The source, seen from the pipeline."""

    def done(self, messages: Sequence[Message]) -> None:
        """These are settled, parked or buried (all committed), or dropped because their lease is lost.

        Called exactly once for each submitted message, whatever the number of sinks.
        """


class Source(Ledger, Protocol):
    """Reads events until it is told to stop."""

    async def run(self) -> None:
        """Read and submit until `stop`; raises StopError when it cannot go on without a person."""

    def stop(self) -> None:
        """Stop reading; what was submitted is still reported through `done`."""
