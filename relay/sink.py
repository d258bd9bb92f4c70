"""The contract of a sink. `relay.sinks.*` implement it; `relay.testing.sink_contract` holds each to it.

Confirmed means confirmed (DESIGN.md 2.3): `CONFIRMED` is returned only after the broker itself has
said that it has the message. A timeout is *unknown*, which is `unavailable`, never confirmed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.types import Message

__all__ = ["CONFIRMED", "DEFERRED", "Outcome", "Sink", "Status", "rejected", "unavailable"]


class Status(Enum):
    """What became of one message."""

    CONFIRMED = "confirmed"
    """The broker has it."""
    REJECTED = "rejected"
    """It can never succeed here: too large, illegal topic. It becomes a dead letter."""
    UNAVAILABLE = "unavailable"
    """Not now, or nobody knows. It is tried again."""
    DEFERRED = "deferred"
    """Not attempted, because an earlier message of the same key in this batch was not confirmed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one message, and for a failure why (no payloads, no secrets).

    `sink_down` with UNAVAILABLE: the whole sink cannot take anything now. Nobody's attempts are
    counted and the sink is tried again with backoff. Without it the failure is this message's (or
    its destination's) own: an attempt is counted and its key is set aside.

    `misconfigured` with UNAVAILABLE: an operator has to act (password, ACL, missing exchange);
    events wait, the state is shown as such, nothing is dead-lettered for it.
    """

    status: Status
    reason: str = ""
    sink_down: bool = False
    misconfigured: bool = False


CONFIRMED: Final = Outcome(Status.CONFIRMED)
DEFERRED: Final = Outcome(Status.DEFERRED, "an earlier event of its key failed")


def rejected(reason: str) -> Outcome:
    """This message can never be delivered here."""
    return Outcome(Status.REJECTED, reason)


def unavailable(reason: str, *, sink_down: bool = False, misconfigured: bool = False) -> Outcome:
    """Try again: this message alone, or (`sink_down`) everything."""
    return Outcome(Status.UNAVAILABLE, reason, sink_down, misconfigured)


@runtime_checkable
class Sink(Protocol):
    """A broker, seen from the relay. One instance serves one `[sinks.<name>]` section.

    `publish` is called concurrently by up to `concurrency` workers. A key always comes from the same
    worker, so two concurrent batches never share a key.
    """

    @property
    def concurrency(self) -> int:
        """How many batches it wants in flight at once (1 or more). Also its number of workers."""

    async def open(self) -> None:
        """Build clients and check options. Never needs the broker to be up.

        Raises InvalidConfig for options that can never work (unknown codec, unreadable certificate).
        """

    async def ping(self) -> None:
        """One cheap round trip that proves the broker would take messages now.

        Raises SinkUnavailable (try again) or PermissionMissing / InvalidConfig (an operator must act).
        Used by `relay check` and by readiness.
        """

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        """Send a batch and say what became of each message: same length, same order.

        - Messages with an equal, non-None key are delivered in batch order. Once one of them is not
          confirmed, the later ones of that key in the batch are not delivered: they are DEFERRED (or
          failed with the same cause). Other keys go on.
        - Messages with key None have no order.
        - Bounded in time by the sink's own deadline; what has no answer by then is `unavailable`, and
          the sink makes sure that nothing of the abandoned batch is still sent later.
        - Raises nothing but CancelledError; after a cancellation the outcome is unknown and no bytes of
          the batch are sent any more.
        - Holds no memory for the batch after it returns.
        """

    async def close(self) -> None:
        """Drop connections without flushing; idempotent; done within a second or two, broker up or down."""
