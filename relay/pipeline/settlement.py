"""From the last sink's outcome to a settled row.

Confirmed events are settled in batches as large as what has gathered while the last one was being
committed. An event is reported to the source exactly once, after the commit, or when it is dropped
because its lease was lost: then its row stays, and the new owner sends it (promise 1).
"""

from __future__ import annotations

import asyncio
from operator import attrgetter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.pipeline.budget import Budget
    from relay.pipeline.recovery import Recovery
    from relay.source import Ledger
    from relay.store import Settler
    from relay.telemetry.metrics import Metrics
    from relay.types import Message

__all__ = ["Settlement"]

_BATCH_MAX: Final = 5_000
_LINGER_SECONDS: Final = 0.003
"""At a low rate: one commit for a few events instead of one each. Nobody waits for it."""
_LINGER_BELOW: Final = 200
_OUTSTANDING: Final = attrgetter("outstanding")


class Settlement:
    """Counts the sinks of each event down and settles what all of them are done with."""

    def __init__(self, settler: Settler, ledger: Ledger, budget: Budget, metrics: Metrics, recovery: Recovery) -> None:
        self._settler, self._ledger, self._budget, self._metrics = settler, ledger, budget, metrics
        self._recovery = recovery
        self._ready: list[Message] = []
        self._wake = asyncio.Event()

    def confirmed(self, messages: Sequence[Message]) -> None:
        """One sink has these. Never-parked messages only: parked rows are finished by their run."""
        if not any(map(_OUTSTANDING, messages)):
            self._ready.extend(messages)
        else:
            self._ready.extend([message for message in messages if _last(message)])
        if self._ready:
            self._wake.set()

    def settles_with(self, messages: Sequence[Message]) -> list[Message]:
        """Those for which this sink is the last one: their rows are settled by the same transaction."""
        return [
            m for m in messages if m.outstanding is None or (m.outstanding.sinks == 1 and not m.outstanding.dropped)
        ]

    def decided(self, messages: Sequence[Message], settled: Sequence[Message]) -> None:
        """One sink has parked or buried these, committed; `settled` are those whose row went with it."""
        with_row = {id(message) for message in settled}
        done = []
        for message in messages:
            if id(message) in with_row:
                done.append(message)
            elif _last(message):
                self._ready.append(message)  # another sink confirmed while this one decided
                self._wake.set()
        self._finish(done)

    def dropped(self, messages: Sequence[Message]) -> None:
        """One sink gave these up because their lease is lost. Their rows stay for the new owner."""
        done = []
        for message in messages:
            if (outstanding := message.outstanding) is None:
                done.append(message)
                continue
            outstanding.dropped = True
            outstanding.sinks -= 1
            if outstanding.sinks == 0:
                done.append(message)
        self._finish(done)

    async def run(self) -> None:
        """Settle until cancelled."""
        while True:
            await self._wake.wait()
            if len(self._ready) < _LINGER_BELOW:
                await asyncio.sleep(_LINGER_SECONDS)
            batch, self._ready = self._ready[:_BATCH_MAX], self._ready[_BATCH_MAX:]
            if not self._ready:
                self._wake.clear()
            await self._settle(batch)

    async def _settle(self, batch: list[Message]) -> None:
        # A confirmed event is settled whoever owns its lane by now: that decides nothing (PROTOCOLS.md 2).
        rows = batch
        if any(map(_OUTSTANDING, batch)):
            rows = [m for m in batch if m.outstanding is None or not m.outstanding.dropped]
        if rows:
            await self._recovery.until_done("settle", lambda: self._settler.settle(rows))
            self._metrics.settled.inc(len(rows))
        self._finish(batch)

    def _finish(self, messages: Sequence[Message]) -> None:
        if messages:
            self._ledger.done(messages)
            self._budget.release(messages)


def _last(message: Message) -> bool:
    if (outstanding := message.outstanding) is None:
        return True
    outstanding.sinks -= 1
    return outstanding.sinks == 0
