"""Which lanes this pod owns: heartbeat, fair share, hand-over, and knowing when its time is over.

PROTOCOLS.md rules 1 to 3. The local deadline is counted from *before* the renewal was sent, by the event
loop's clock; past it everything read under the leases is dropped before it is published. A pod that
is frozen past its deadline may still publish what it holds: that only repeats, it decides nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from relay.errors import SourceUnavailable
from relay.lanes import surplus, target
from relay.telemetry.logs import get_logger
from relay.types import LANES, Lease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from relay.config import Leases
    from relay.source import Intake
    from relay.store import LeaseStore, Membership
    from relay.telemetry.metrics import Metrics

__all__ = ["LaneUser", "Ownership"]

_log = get_logger(__name__)

_LOOK_SECONDS: Final = 1.0
_LOOK_SECONDS_PER_POD: Final = 0.1
"""Pods look in turn: with many of them somebody looks every tenth of a second, and each one seldom."""
_HAND_OVER_SECONDS: Final = 5.0
"""For what is in flight to be settled before a lane is handed over anyway (its sink may be down)."""


class LaneUser(Protocol):
    """The source, seen from ownership."""

    def gain(self, leases: Iterable[Lease]) -> None:
        """Read these lanes."""

    def lose(self, leases: Iterable[Lease]) -> None:
        """These are gone."""

    async def quiet(self, lease: Lease) -> None:
        """Stop reading and wait until nothing is in flight."""


class Ownership:
    """Keeps the pod's lanes until cancelled; `leave` gives all of them up in good order."""

    def __init__(
        self, pod: str, store: LeaseStore, user: LaneUser, intake: Intake, options: Leases, metrics: Metrics
    ) -> None:
        self._pod, self._store, self._user, self._intake = pod, store, user, intake
        self._options, self._metrics = options, metrics
        self._owned: dict[int, Lease] = {}
        self._leaving: set[Lease] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._deadline = 0.0
        self._renewed_at: float | None = None
        self._look_again = asyncio.Event()
        self._going = False
        self.members = 1
        self.on_beat: Callable[[], None] = lambda: None
        """Called after each beat, whether the database answered or not: the loop is alive."""

    @property
    def lanes(self) -> int:
        """Number of lanes owned now."""
        return len(self._owned)

    def look(self) -> None:
        """Look at once instead of at the next beat."""
        self._look_again.set()

    def renew(self) -> None:
        """Renew the heartbeat at once: what it says of this pod has changed."""
        self._renewed_at = None
        self._look_again.set()

    async def run(self) -> None:
        """Beat until cancelled."""
        watch = asyncio.create_task(self._watch_deadline(), name="lease deadline")
        failing = False
        try:
            while True:
                self._look_again.clear()
                try:
                    await self._beat()
                    if failing:
                        _log.info("heartbeat works again")
                    failing = False
                except SourceUnavailable as error:
                    if not failing:
                        _log.warning("heartbeat failed", error=str(error), seconds_left=round(self._left(), 1))
                    failing = True
                self.on_beat()
                await self._rest()
        finally:
            watch.cancel()
            for task in self._tasks:
                task.cancel()

    async def leave(self, seconds: float) -> None:
        """Hand everything over: wait for what is in flight for so long, then drop it, and say goodbye."""
        self._going = True
        leases = list(self._owned.values())
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(self._settle_down(lease) for lease in leases))
        except TimeoutError:
            _log.warning("some events are not settled, they will be sent again", lanes=len(leases))
        self._drop(leases)
        await self._store.leave()

    # -- beats -----------------------------------------------------------------------------------

    async def _beat(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._renewed_at is None or now - self._renewed_at >= self._options.ttl_seconds / 3:
            self._renewed_at = now  # before the call: `renew` may ask for one more meanwhile, and is not overheard
            try:
                await self._store.renew(self._options.ttl_seconds)
            except BaseException:
                self._renewed_at = None
                raise
            self._deadline = now + self._options.ttl_seconds - self._options.margin_seconds
        view = await self._store.look()
        self.members = max(len(view.members), 1)
        self._check(view)
        if not self._going:
            self._hand_over(view)
            await self._claim(view)
            await self._release_strays(view)

    async def _rest(self) -> None:
        interval = min(max(_LOOK_SECONDS, _LOOK_SECONDS_PER_POD * self.members), self._options.ttl_seconds / 3)
        try:
            async with asyncio.timeout(interval):
                await self._look_again.wait()
        except TimeoutError:
            pass

    def _check(self, view: Membership) -> None:
        """Drop what is not ours any more."""
        lost = [
            lease
            for lease in self._owned.values()
            if lease.lost or view.owners.get(lease.lane) != (self._pod, lease.epoch)
        ]
        if lost:
            self._metrics.leases_lost.inc(len(lost))
            _log.warning("lanes lost", lanes=sorted(lease.lane for lease in lost))
            self._drop(lost)

    def _hand_over(self, view: Membership) -> None:
        staying = [lane for lane, lease in self._owned.items() if lease not in self._leaving]
        given = surplus(staying, target(self._pod, view.members))
        if given:
            _log.info("handing lanes over", lanes=len(given), staying=len(staying) - len(given), pods=len(view.members))
        for lane in given:
            lease = self._owned[lane]
            self._leaving.add(lease)
            task = asyncio.create_task(self._release(lease), name=f"hand over lane {lane}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _claim(self, view: Membership) -> None:
        wanted = target(self._pod, view.members) - len(self._owned)
        if wanted <= 0 or not self._any_free(view):
            return
        leases = await self._store.claim(wanted, self._owned.keys())
        if not leases:
            return
        await self._intake.adopt(leases)
        self._owned.update((lease.lane, lease) for lease in leases)
        self._user.gain(leases)
        _log.info("lanes claimed", count=len(leases), owned=len(self._owned), pods=self.members)

    async def _release_strays(self, view: Membership) -> None:
        """Free lanes that are in this pod's name only: given up past a deadline, or a release that got lost.

        Everybody else sees a living owner, so without this nobody would ever read them again.
        """
        strays = [
            Lease(lane, epoch)
            for lane, (owner, epoch) in view.owners.items()
            if owner == self._pod and lane not in self._owned
        ]
        if strays:
            await self._store.release(strays)

    def _any_free(self, view: Membership) -> bool:
        if len(view.owners) < LANES:
            return True
        return any(
            owner is None or owner not in view.members or (owner == self._pod and lane not in self._owned)
            for lane, (owner, _epoch) in view.owners.items()
        )

    # -- giving up -------------------------------------------------------------------------------

    async def _release(self, lease: Lease) -> None:
        try:
            async with asyncio.timeout(_HAND_OVER_SECONDS):
                await self._settle_down(lease)
        except TimeoutError:
            _log.warning("lane handed over with events in flight, they will be sent again", lane=lease.lane)
        if self._owned.get(lease.lane) is not lease:
            return
        self._drop([lease])
        try:
            await self._store.release([lease])
        except SourceUnavailable:
            pass  # the next claim takes it, ours or another pod's: nobody reads it meanwhile
        else:
            _log.debug("lane handed over", lane=lease.lane)

    async def _settle_down(self, lease: Lease) -> None:
        await self._user.quiet(lease)
        await self._intake.drained(lease)

    def _drop(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            lease.lost = True
            self._intake.abandon(lease)
            self._leaving.discard(lease)
            if self._owned.get(lease.lane) is lease:
                del self._owned[lease.lane]
        self._user.lose(leases)

    def _left(self) -> float:
        return self._deadline - asyncio.get_running_loop().time()

    async def _watch_deadline(self) -> None:
        while True:
            if self._owned and self._left() <= 0:
                self._metrics.leases_lost.inc(len(self._owned))
                _log.warning("no heartbeat for too long, lanes given up", lanes=len(self._owned))
                self._drop(list(self._owned.values()))
            await asyncio.sleep(max(self._left(), 0.05) if self._owned else self._options.margin_seconds / 2)
