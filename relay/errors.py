"""The errors an operator can tell apart.

Three answers exist to a fault: try again (`SourceUnavailable`, `SinkUnavailable`), give up on one
message (`MessageRejected`), or stop the relay and say what to do (`StopError` and its subclasses).
`relay.retry` is the one place that turns an error into one of the three. Messages name the slot,
topic, sink or event id; never payloads or secrets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "InvalidConfig",
    "LeaseLost",
    "MessageRejected",
    "PermissionMissing",
    "RelayError",
    "SchemaMismatch",
    "SinkUnavailable",
    "SlotLost",
    "SourceUnavailable",
    "StopError",
]


class RelayError(Exception):
    """Base of every error that this package raises on purpose."""


class SourceUnavailable(RelayError):
    """PostgreSQL cannot be reached or refused for now; retried with backoff."""


class SinkUnavailable(RelayError):
    """A broker cannot be reached or refused for now; retried, nobody's attempts are counted."""


class MessageRejected(RelayError):
    """This one message can never be delivered to this sink; it becomes a dead letter."""


class LeaseLost(RelayError):
    """Another pod owns these lanes by now, so this pod may decide nothing about them (PROTOCOLS.md 2)."""

    def __init__(self, lanes: Iterable[int]) -> None:
        self.lanes = frozenset(lanes)
        super().__init__(f"lanes owned by another pod: {', '.join(map(str, sorted(self.lanes)))}")


class StopError(RelayError):
    """The relay cannot go on without a person. `hint` names the next command or setting."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class InvalidConfig(StopError):
    """A setting is missing, unknown, of the wrong type, or contradicts another."""


class SchemaMismatch(StopError):
    """The tables are missing, behind, ahead, or not ours."""


class PermissionMissing(StopError):
    """A role lacks a right. Names the right and the statement that grants it."""


class SlotLost(StopError):
    """The replication slot is gone or invalid and cannot be recovered without a decision."""
