"""Whether the loops of this pod are alive, and whether it can do its work now.

Two questions with two answers, because an orchestrator acts on them differently (FIELD.md F7):

- *live*: every loop has beaten within its limit and none has died. A broker or database that is down
  does not fail it: a restart would not bring it back.
- *ready*: connected to PostgreSQL, not draining, and at least one sink takes messages. A broker that is
  down at the start leaves the pod live and not ready until the broker is there.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relay.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Health", "LoopState", "SinkState"]


@dataclass(slots=True)
class LoopState:
    """One loop: when it has last said that it is alive, and how long it may be silent."""

    limit_seconds: float
    beaten_at: float
    death: str | None = None


@dataclass(frozen=True, slots=True)
class SinkState:
    """Whether a sink takes messages now; `reason` says why not, without secrets."""

    up: bool = False
    misconfigured: bool = False
    reason: str = "not tried yet"


class Health:
    """What the loops report and the probes read. `clock` is monotonic seconds."""

    def __init__(self, sinks: tuple[str, ...] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loops: dict[str, LoopState] = {}
        self._source_problem: str | None = "not connected yet"
        self._draining = False
        self.sinks: dict[str, SinkState] = dict.fromkeys(sinks, SinkState())

    @contextmanager
    def running(self, name: str, limit_seconds: float) -> Iterator[None]:
        """Watch the loop inside: it has to `beat(name)` at least every `limit_seconds`.

        Leaving normally or by cancellation ends the watch. An exception marks the loop as dead, which
        fails liveness for good, and goes on.
        """
        self._loops[name] = LoopState(limit_seconds, self._clock())
        try:
            yield
        except Exception as error:
            self._loops[name].death = redact(f"{type(error).__name__}: {error}")
            raise
        except BaseException:
            self._loops.pop(name, None)
            raise
        self._loops.pop(name, None)

    def beat(self, name: str) -> None:
        """The loop is alive. A loop that nobody watches (it ended meanwhile) is ignored."""
        if (loop := self._loops.get(name)) is not None:
            loop.beaten_at = self._clock()

    def source_connected(self) -> None:
        """The source can read the outbox."""
        self._source_problem = None

    def source_lost(self, reason: str) -> None:
        """The source cannot read the outbox now."""
        self._source_problem = redact(reason)

    def sink_up(self, name: str) -> None:
        """The sink took messages or answered a ping."""
        self.sinks[name] = SinkState(up=True, reason="")

    def sink_down(self, name: str, reason: str, *, misconfigured: bool = False) -> None:
        """The sink takes nothing now. `misconfigured`: an operator has to act."""
        self.sinks[name] = SinkState(up=False, misconfigured=misconfigured, reason=redact(reason))

    def drain(self) -> None:
        """The pod is stopping: not ready any more, still live."""
        self._draining = True

    def not_live_because(self) -> tuple[str, ...]:
        """Why the pod should be restarted; empty while it is live."""
        now = self._clock()
        return tuple(problem for name, loop in self._loops.items() if (problem := _problem(name, loop, now)))

    def not_ready_because(self) -> tuple[str, ...]:
        """Why the pod delivers nothing now; empty while it is ready."""
        problems = []
        if self._draining:
            problems.append("draining")
        if self._source_problem is not None:
            problems.append(f"source: {self._source_problem}")
        if self.sinks and not any(sink.up for sink in self.sinks.values()):
            problems += [f"sink {name}: {sink.reason}" for name, sink in self.sinks.items()]
        return tuple(problems)


def _problem(name: str, loop: LoopState, now: float) -> str | None:
    if loop.death is not None:
        return f"loop {name} died: {loop.death}"
    silent = now - loop.beaten_at
    if silent > loop.limit_seconds:
        return f"loop {name} has been silent for {silent:.1f} s, its limit is {loop.limit_seconds:g} s"
    return None
