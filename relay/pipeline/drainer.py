"""Brings parked events back: looks for heads whose time has come and sends each key's rows in order.

One drainer for each sink, in cycles: read runs, send them through the same workers as everything
else, record what became of them. A sink that is down is probed with a single run.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from relay.pipeline.runs import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from relay.pipeline.pipe import Pipe
    from relay.store import ParkedRun
    from relay.types import Lease, Message

__all__ = ["Drainer"]

_HEADS_MAX: Final = 128
_FOLLOWERS_MAX: Final = 64
_LOOK_SECONDS: Final = 5.0
"""Between looks when nothing of ours is known to be due: a retried dead letter is noticed within it."""

_LIST_SECONDS: Final = 0.5
"""Between attempts to list the held keys of a full lane, which costs more than a cycle."""


class Drainer:
    """Empties `outbox_parked` for one sink and the lanes that this pod owns."""

    def __init__(
        self, pipe: Pipe, leases: Callable[[], Sequence[Lease]], put: Callable[[Sequence[Message]], None]
    ) -> None:
        self._pipe, self._leases, self._put = pipe, leases, put
        self._list_at = 0.0
        self._changed = asyncio.Condition()
        self._lanes: set[Lease] = set()
        """Lanes whose rows are read, on their way, or not recorded yet."""

    async def run(self) -> None:
        """Drain until cancelled."""
        while True:
            await self._rest()
            if leases := self._own():
                await self._cycle(leases)

    async def left(self, lease: Lease) -> None:
        """Wait until no rows of this lane are on their way, and what became of them is recorded."""
        async with self._changed:
            await self._changed.wait_for(lambda: lease not in self._lanes)

    async def _rest(self) -> None:
        self._pipe.parked.clear()
        if (now := asyncio.get_running_loop().time()) >= self._list_at:
            await self._pipe.list_held()
            self._list_at = now + _LIST_SECONDS
        leases = self._own()
        due = await self._pipe.next_due(leases) if leases else None
        await self._wait(min(_LOOK_SECONDS, due) if due is not None else _LOOK_SECONDS)
        # During an outage something is parked all the time, which is no reason to try a row before the circuit would.
        while (pause := self._pipe.circuit.pause()) > 0:
            self._pipe.parked.clear()
            await self._wait(pause)

    async def _wait(self, seconds: float) -> None:
        if seconds > 0:
            try:
                async with asyncio.timeout(seconds):
                    await self._pipe.parked.wait()
            except TimeoutError:
                pass

    async def _cycle(self, leases: Sequence[Lease]) -> None:
        try:
            await self._touch(leases)
            found = await self._pipe.due(leases, 1 if self._pipe.circuit.is_open else _HEADS_MAX, _FOLLOWERS_MAX)
            runs = [Run(parked.messages) for parked in found]
            await self._touch([run.lease for run in runs])
            if runs:
                await self._send(found, runs)
        finally:
            await self._touch(())

    async def _touch(self, leases: Iterable[Lease]) -> None:
        self._lanes = set(leases)
        async with self._changed:
            self._changed.notify_all()

    async def _send(self, found: Sequence[ParkedRun], runs: Sequence[Run]) -> None:
        pipe = self._pipe
        for parked, run in zip(found, runs, strict=True):
            pipe.runs.add(run, parked.messages)
            self._put(parked.messages)
        try:
            await self._ended(runs)
        finally:
            pipe.runs.clear()
        await pipe.finish(runs)

    async def _ended(self, runs: Sequence[Run]) -> None:
        while any(run.open and not run.lease.lost for run in runs):
            self._pipe.run_ended.clear()
            await self._pipe.run_ended.wait()

    def _own(self) -> list[Lease]:
        return [lease for lease in self._leases() if not lease.lost]
