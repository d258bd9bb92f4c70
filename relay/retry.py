"""Retry, set aside, dead-letter or stop: the one place that decides (pure).

| what happened                          | decision                                        | attempt counted |
|----------------------------------------|-------------------------------------------------|-----------------|
| confirmed                              | SETTLE                                          | -               |
| rejected                               | DEAD_LETTER                                     | yes             |
| unavailable, this message alone        | PARK with backoff; DEAD_LETTER at `attempts_max` | yes            |
| ... and an operator has to act         | PARK with the longest backoff                   | no              |
| unavailable, the whole sink            | WAIT for the sink                               | no              |
| deferred                               | REQUEUE                                         | no              |

Errors: `SourceUnavailable` and `SinkUnavailable` are tried again; `MessageRejected` is a dead letter;
`StopError` and everything unknown stop the relay.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from relay.errors import MessageRejected, SinkUnavailable, SourceUnavailable
from relay.sink import Outcome, Status

if TYPE_CHECKING:
    import random

__all__ = ["Backoff", "Decision", "ErrorPolicy", "decide", "policy"]


class Decision(Enum):
    """What to do with one message after its outcome."""

    SETTLE = "settle"
    DEAD_LETTER = "dead_letter"
    PARK = "park"
    WAIT = "wait"
    REQUEUE = "requeue"


def decide(outcome: Outcome, attempts: int, attempts_max: int) -> Decision:
    """The table above. `attempts` is what was counted before this outcome."""
    match outcome.status:
        case Status.CONFIRMED:
            return Decision.SETTLE
        case Status.REJECTED:
            return Decision.DEAD_LETTER
        case Status.DEFERRED:
            return Decision.REQUEUE
    if outcome.sink_down:
        return Decision.WAIT
    if not outcome.misconfigured and attempts + 1 >= attempts_max:
        return Decision.DEAD_LETTER
    return Decision.PARK


class ErrorPolicy(Enum):
    """What to do after an exception."""

    RETRY = "retry"
    DEAD_LETTER = "dead_letter"
    STOP = "stop"


def policy(error: BaseException) -> ErrorPolicy:
    """The line on errors above; unknown means stop, because going on could lose something."""
    match error:
        case SourceUnavailable() | SinkUnavailable():
            return ErrorPolicy.RETRY
        case MessageRejected():
            return ErrorPolicy.DEAD_LETTER
        case _:
            return ErrorPolicy.STOP


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with jitter over the upper half: pods never retry in step, none retries at once."""

    base_seconds: float
    cap_seconds: float
    rng: random.Random

    def delay(self, failures: int) -> float:
        """Seconds to wait after the given number of failures (1 or more)."""
        # 2**63 would overflow nothing, but there is no point in going on after the cap
        ceiling: float = min(self.cap_seconds, self.base_seconds * 2.0 ** min(failures - 1, 32))
        return ceiling * self.rng.uniform(0.5, 1.0)
