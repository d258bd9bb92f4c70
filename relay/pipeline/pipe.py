"""What the workers of one sink share: its circuit, its holds, its runs, and the decisions that are written.

Parking, burying and finishing go through here, one at a time for each sink: a key is freed and its
events are parked under the same lock, so no event can be parked behind a key that has just been freed
(PROTOCOLS.md rule 5).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from relay.pipeline.circuit import Circuit
from relay.pipeline.holds import Holds, HoldState
from relay.pipeline.runs import Run, Runs
from relay.sink import Outcome, Sink, Status
from relay.store import Burial, Parked, ParkedRun, ParkingStore
from relay.telemetry.logs import get_logger
from relay.telemetry.metrics import FailureKind, Metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from relay.pipeline.decisions import Decisions
    from relay.pipeline.recovery import Recovery
    from relay.pipeline.router import Target
    from relay.pipeline.settlement import Settlement
    from relay.retry import Backoff
    from relay.types import Lease, Message

__all__ = ["Pipe", "PipeOptions"]

_log = get_logger(__name__)

_STORED_AT: Final = attrgetter("stored_at")
_PARKED: Final = attrgetter("parked")

_AFTER_OUTAGE_SECONDS: Final = 0.5
"""Until the next look at a run that an outage ended; the circuit decides when it is really tried."""


@dataclass(frozen=True, slots=True)
class PipeOptions:
    """Limits of one sink's workers. `park_outage_after_seconds` None: an outage blocks, nothing is parked for it."""

    batch_events_max: int
    batch_bytes_max: int
    attempts_max: int
    park_outage_after_seconds: float | None


class Pipe:
    """One sink, seen from its workers and its drainer."""

    def __init__(
        self,
        name: str,
        sink: Sink,
        options: PipeOptions,
        *,
        parking: ParkingStore,
        decisions: Decisions,
        settlement: Settlement,
        recovery: Recovery,
        retry: Backoff,
        outage: Backoff,
        metrics: Metrics,
        target: Callable[[str], Target | None],
        on_change: Callable[[Circuit], None],
    ) -> None:
        self.name, self.sink, self.options = name, sink, options
        self.settlement, self.recovery, self.retry = settlement, recovery, retry
        self.metrics = metrics.sink(name)
        self.metrics.up.set(1)
        self.circuit = Circuit(outage)
        self.holds = Holds()
        self.lock = asyncio.Lock()
        self.parked = asyncio.Event()
        """Set when something was parked, or may be due: wakes the drainer."""
        self.run_ended = asyncio.Event()
        self.runs = Runs(self.run_ended.set)
        self.requeue: Callable[[Sequence[Message]], None] = lambda _messages: None
        """Gives messages back to the front of their workers' queues; set by whoever makes the workers."""
        self._reopened = 0
        self._still_full: Lease | None = None
        self._parking, self._decisions = parking, decisions
        self._target, self._on_change = target, on_change

    # -- the sink's state ----------------------------------------------------------------------

    @property
    def parks_everything(self) -> bool:
        """True once the outage has lasted so long that the other sinks must not wait for this one."""
        at = self.park_outage_at
        return at is not None and asyncio.get_running_loop().time() >= at

    @property
    def park_outage_at(self) -> float | None:
        """Loop time from which everything is parked; None when the sink is up or alone."""
        if self.circuit.down_since is None or self.options.park_outage_after_seconds is None:
            return None
        return self.circuit.down_since + self.options.park_outage_after_seconds

    async def answered(self) -> None:
        """The sink said something about single messages: it is there."""
        if await self.circuit.succeed():
            self.metrics.up.set(1)
            self.metrics.misconfigured.set(0)
            self.parked.set()
            self._on_change(self.circuit)
            _log.info("sink is back", sink=self.name)

    async def down(self, outcome: Outcome) -> None:
        """The sink takes nothing."""
        began = await self.circuit.fail(outcome.reason, misconfigured=outcome.misconfigured)
        self.metrics.misconfigured.set(outcome.misconfigured)
        if began:
            self.metrics.up.set(0)
            self._on_change(self.circuit)
            event = "sink refuses this relay, waiting for an operator" if outcome.misconfigured else "sink is down"
            _log.warning(event, sink=self.name, reason=outcome.reason)

    # -- outcomes ------------------------------------------------------------------------------

    def confirmed(self, messages: Sequence[Message]) -> None:
        """The broker has these: settle the rows, or move their runs on. In order, before anything is awaited."""
        self.metrics.confirmed(list(map(_STORED_AT, messages)), time.time_ns() // 1_000)
        direct = messages
        if any(map(_PARKED, messages)):
            direct = [message for message in messages if message.parked is None]
            for message in messages:
                if message.parked is not None and (run := self.runs.of(message)):
                    run.confirmed(message)
            self.runs.closed()
        if direct:
            self.settlement.confirmed(direct)

    def fail_run(self, run: Run, message: Message, outcome: Outcome, *, dead: bool, counted: bool) -> None:
        """A parked row was not confirmed. `counted`: against its attempts; otherwise the sink itself was down."""
        result = run.fail()
        result.failed = message
        result.attempts = message.attempts + counted
        result.error = outcome.reason
        result.delay_seconds = self.delay(result.attempts, outcome) if counted else _AFTER_OUTAGE_SECONDS
        if dead:
            result.burial = self.burial(message, outcome)
        self.runs.closed()

    def delay(self, attempts: int, outcome: Outcome) -> float:
        """Seconds until the next attempt. An operator's mistake is looked at at the slowest pace."""
        return self.retry.cap_seconds if outcome.misconfigured else self.retry.delay(max(attempts, 1))

    def burial(self, message: Message, outcome: Outcome) -> Burial:
        """The dead letter of a message."""
        kind = "rejected" if outcome.status is Status.REJECTED else "attempts"
        target = self._target(message.topic)
        holds = message.key is not None and target is not None and target.holds
        return Burial(message, self.name, kind, outcome.reason, message.attempts + 1, holds)

    # -- decisions, written under the lock -----------------------------------------------------

    async def set_aside(self, messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
        """Park events whose key is held. Returns those that may go, and those to look at once more.

        The latter when keys were freed while this waited for the lock: what had waited for them comes
        back to the worker (`requeue`) and is older.
        """
        if not (kept := [message for message in messages if self.holds.state(message) is not HoldState.FREE]):
            return list(messages), []
        free = [message for message in messages if self.holds.state(message) is HoldState.FREE]
        reopened = self._reopened
        async with self.lock:
            if self._reopened != reopened:
                return free, kept
            held = self._sort(kept)
            if held:
                await self._decisions.park(self.name, [Parked(message) for message in held])
                self.parked.set()
        return free, []

    async def park(self, entries: Sequence[Parked]) -> None:
        """Park events that failed; their keys are held already.

        And once more under the lock: a run of the same key (a dead letter that somebody retried) may have
        freed it in between, or a list of the lane's held keys that does not have it yet.
        """
        async with self.lock:
            self._hold([entry.message for entry in entries])
            await self._decisions.park(self.name, entries)
        self.parked.set()

    async def bury(self, entries: Sequence[Burial]) -> None:
        """Write dead letters of events that came directly. Keys that they hold are held once more, as in `park`."""
        async with self.lock:
            self._hold([entry.message for entry in entries if entry.holds])
            await self._decisions.bury(entries)

    async def finish(self, runs: Sequence[Run]) -> None:
        """Record what became of runs, free the keys that have nothing left, and let go what waited."""
        async with self.lock:
            still = await self._decisions.finish(self.name, [run.result for run in runs])
            self._reopened += 1
            for run in runs:
                if run.key is not None and not run.lease.lost:
                    self.requeue(self.holds.reopen(run.lease, run.key, held=(run.lease.lane, run.key) in still))

    async def due(self, leases: Sequence[Lease], heads: int, followers: int) -> Sequence[ParkedRun]:
        """Runs to try now. Their keys are held, or closing if nothing is left behind the run."""
        async with self.lock:
            found = await self.recovery.until_done(
                "read parked", lambda: self._parking.due(self.name, leases, heads, followers)
            )
            for run in found:
                self._address(run.messages)
                head = run.messages[0]
                if head.key is None or head.lease is None:
                    continue
                if run.complete:
                    self.holds.close(head.lease, head.key)
                else:
                    self.holds.hold(head.lease, head.key)
        return found

    async def next_due(self, leases: Sequence[Lease]) -> float | None:
        """Seconds until something is due; None when nothing is parked."""
        return await self.recovery.until_done("look at parked", lambda: self._parking.next_due(self.name, leases))

    async def list_held(self) -> None:
        """Replace holds of whole lanes by their keys, where those are few enough by now.

        Ends with the first lane that has too many still, and goes on behind it the next time: after a long
        outage this runs before each of many cycles, and the other lanes are no emptier.
        """
        async with self.lock:
            for lease in [] if self.parks_everything else self._whole_lanes():
                held = await self.recovery.until_done("load held keys", lambda lease=lease: self._parking.held([lease]))  # type: ignore[misc]
                own = [entry.key for entry in held if entry.sink == self.name]
                keys = [key for key in own if key is not None]
                if len(keys) < len(own):
                    self._still_full = lease
                    return
                self._reopened += 1
                self.holds.list_keys(lease, keys)

    # -- inside ----------------------------------------------------------------------------------

    def _whole_lanes(self) -> list[Lease]:
        """Lanes that are held as a whole, those behind the last full one first."""
        lanes = self.holds.whole()
        start = lanes.index(self._still_full) + 1 if self._still_full in lanes else 0
        return lanes[start:] + lanes[:start]

    def _address(self, messages: Sequence[Message]) -> None:
        """Parked rows have no destination: it is the route's, as it is now."""
        for message in messages:
            if (target := self._target(message.topic)) is not None:
                message.destination = target.destination(message.topic, message.key)

    def _hold(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if message.key is not None and message.lease is not None:
                self.holds.hold(message.lease, message.key)

    def _sort(self, messages: Iterable[Message]) -> list[Message]:
        held = []
        for message in messages:
            if self.holds.state(message) is HoldState.CLOSING:
                self.holds.wait(message)
            else:
                held.append(message)
        return held

    def count(self, outcome: Outcome, events: int = 1) -> None:
        """Count failed attempts by kind."""
        kind = FailureKind.REJECTED if outcome.status is Status.REJECTED else FailureKind.UNAVAILABLE
        if outcome.misconfigured:
            kind = FailureKind.MISCONFIGURED
        elif outcome.sink_down:
            kind = FailureKind.SINK_DOWN
        self.metrics.failed(kind, events)
