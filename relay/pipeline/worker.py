"""One FIFO and the loop that empties it: batches as large as what is waiting, one at a time.

A key always comes to the same worker, so its order is the order of the queue. What could not be sent
goes back to the *front*; what may not be sent is set aside and never blocks the queue (PROTOCOLS.md 6).
"""

from __future__ import annotations

import asyncio
from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from relay.pipeline.circuit import Admission
from relay.pipeline.publishing import all_confirmed, publish
from relay.retry import Decision, decide
from relay.sink import CONFIRMED, Outcome, unavailable
from relay.store import Burial, Parked

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from relay.pipeline.pipe import Pipe
    from relay.types import Message

__all__ = ["Worker"]

_SIZE: Final = attrgetter("size")
_LEASE: Final = attrgetter("lease")


class Worker:
    """Takes messages of its keys to one sink."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._front: deque[Message] = deque()
        self._queue: deque[Message] = deque()
        self._waiting = asyncio.Event()
        self._in_hand: list[Message] | None = None

    def put(self, messages: Iterable[Message]) -> None:
        """Append to the queue. Bounded by the pipeline's budget."""
        self._queue.extend(messages)
        self._waiting.set()

    def put_back(self, messages: Iterable[Message]) -> None:
        """Put messages before everything else, in order: they were taken earlier than all that is left here.

        While this worker has events in hand that it may have to look at once more, they go before those
        too: they waited for a key of which the worker has newer events in hand.
        """
        if self._in_hand is not None:
            self._in_hand.extend(messages)
        else:
            self._front.extendleft(reversed(list(messages)))
            self._waiting.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._waiting.wait()
            if batch := self._take():
                await self._step(batch)

    def _take(self) -> list[Message]:
        options = self._pipe.options
        source = self._front or self._queue
        if len(source) <= options.batch_events_max and sum(map(_SIZE, source)) <= options.batch_bytes_max:
            batch = list(source)
            source.clear()
        else:
            batch = _head(source, options.batch_events_max, options.batch_bytes_max)
        if not self._front and not self._queue:
            self._waiting.clear()
        return batch

    async def _step(self, batch: list[Message]) -> None:
        batch = await self._sift(batch)
        if not batch:
            return
        circuit = self._pipe.circuit
        if not circuit.is_open:
            await self._publish(batch)
            return
        admission = await circuit.admit(self._pipe.park_outage_at)
        if admission is Admission.GIVE_UP:
            self._give_up(batch)
            return
        try:
            if batch := self._own(batch):  # the wait may have been long
                await self._publish(batch)
        finally:
            if admission is Admission.PROBE and circuit.is_open:
                await circuit.abandon()

    async def _publish(self, batch: list[Message]) -> None:
        pipe = self._pipe
        pipe.metrics.batch_events.observe(len(batch))
        outcomes = await publish(pipe.name, pipe.sink, batch)
        if all_confirmed(outcomes):
            pipe.confirmed(batch)
            if pipe.circuit.is_open:
                await pipe.answered()
            return
        await self._conclude(batch, outcomes)

    # -- what may not be sent --------------------------------------------------------------------

    async def _sift(self, batch: list[Message]) -> list[Message]:
        """What may be sent now. Drops what is not ours any more, sets aside what is held."""
        pipe = self._pipe
        batch = self._own(batch)
        if not pipe.holds and not pipe.runs and not pipe.circuit.is_open:
            return batch
        direct = [message for message in batch if message.parked is None]
        resent = [message for message in batch if message.parked is not None and pipe.runs.of(message)]
        if pipe.parks_everything:
            self._hold_lanes(direct)
        if pipe.holds and direct:
            direct = await self._set_aside(direct)
        return resent + direct

    async def _set_aside(self, direct: list[Message]) -> list[Message]:
        self._in_hand = []
        try:
            free, again = await self._pipe.set_aside(direct)
        finally:
            older, self._in_hand = self._in_hand, None
        self.put_back([*older, *again])
        return free

    def _own(self, batch: list[Message]) -> list[Message]:
        """What is still ours to send; the rest is dropped, and its new owner sends it."""
        if not any(lease is not None and lease.lost for lease in set(map(_LEASE, batch))):
            return batch
        self._drop([message for message in batch if message.lease is not None and message.lease.lost])
        return [message for message in batch if message.lease is None or not message.lease.lost]

    def _hold_lanes(self, messages: Sequence[Message]) -> None:
        for lease in {message.lease for message in messages if message.lease is not None}:
            self._pipe.holds.hold(lease, None)

    def _give_up(self, batch: list[Message]) -> None:
        """The outage has become too long to wait for: runs end, the rest comes back to be parked."""
        direct = []
        for message in batch:
            if message.parked is None:
                direct.append(message)
            elif run := self._pipe.runs.of(message):
                self._pipe.fail_run(run, message, unavailable(self._pipe.circuit.reason), dead=False, counted=False)
        self._front.extendleft(reversed(direct))
        self._waiting.set()

    def _drop(self, messages: Sequence[Message]) -> None:
        self._pipe.settlement.dropped([message for message in messages if message.parked is None])
        for message in messages:
            if message.parked is not None and (run := self._pipe.runs.of(message)):
                run.fail()
        self._pipe.runs.closed()

    # -- outcomes --------------------------------------------------------------------------------

    async def _conclude(self, batch: Sequence[Message], outcomes: Sequence[Outcome]) -> None:
        pipe = self._pipe
        conclusion = _Conclusion(pipe)
        # First what succeeded: a run must know its confirmed rows before a later row of it fails.
        if confirmed := [message for message, outcome in zip(batch, outcomes, strict=True) if outcome is CONFIRMED]:
            pipe.confirmed(confirmed)
            conclusion.answered = True
        for message, outcome in zip(batch, outcomes, strict=True):
            if outcome is not CONFIRMED:
                conclusion.add(message, outcome)
        # What goes back does so before anything is awaited: it is older than all that is queued.
        self._front.extendleft(reversed(conclusion.back))
        if conclusion.back:
            self._waiting.set()
        if conclusion.down is None or conclusion.answered:
            await pipe.answered()
        if conclusion.down is not None:
            await pipe.down(conclusion.down)
        if conclusion.dead:
            await pipe.bury(conclusion.dead)
        if conclusion.parked:
            await pipe.park(conclusion.parked)
            pipe.metrics.retries.inc(len(conclusion.parked))


def _head(source: deque[Message], events_max: int, bytes_max: int) -> list[Message]:
    """What fits into a batch; the first message always does."""
    batch: list[Message] = []
    for _ in range(min(events_max, len(source))):
        bytes_max -= source[0].size
        if bytes_max < 0 and batch:
            break
        batch.append(source.popleft())
    return batch


class _Conclusion:
    """Sorts the outcomes of one batch, and holds keys at once so that their followers are set aside."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self.back: list[Message] = []
        self.dead: list[Burial] = []
        self.parked: list[Parked] = []
        self.down: Outcome | None = None
        self.answered = False

    def add(self, message: Message, outcome: Outcome) -> None:
        decision = decide(outcome, message.attempts, self._pipe.options.attempts_max)
        if decision is Decision.REQUEUE:
            self.back.append(message)
            return
        self._pipe.count(outcome)
        if decision is Decision.WAIT:
            self.down = outcome
        else:
            self.answered = True
        if message.parked is not None:
            self._of_a_run(message, outcome, decision)
        elif decision is Decision.WAIT:
            self.back.append(message)
        elif decision is Decision.DEAD_LETTER:
            self._bury(message, outcome)
        else:
            self._park(message, outcome)

    def _of_a_run(self, message: Message, outcome: Outcome, decision: Decision) -> None:
        if run := self._pipe.runs.of(message):
            dead = decision is Decision.DEAD_LETTER
            counted = decision is not Decision.WAIT and not outcome.misconfigured
            self._pipe.fail_run(run, message, outcome, dead=dead, counted=counted)

    def _bury(self, message: Message, outcome: Outcome) -> None:
        burial = self._pipe.burial(message, outcome)
        if burial.holds and message.lease is not None:
            self._pipe.holds.hold(message.lease, message.key)
        self.dead.append(burial)

    def _park(self, message: Message, outcome: Outcome) -> None:
        if message.key is not None and message.lease is not None:
            self._pipe.holds.hold(message.lease, message.key)
        attempts = message.attempts + (not outcome.misconfigured)
        self.parked.append(Parked(message, self._pipe.delay(attempts, outcome), attempts, outcome.reason))
