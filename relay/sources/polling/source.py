"""The polling source: reads by lane, as often as it is worth it, and never a row twice.

What it owns: the loop that asks for room, reads, hands over, and rests. Ownership of lanes, the bell and the
SQL are beside it. Promises kept here: order per key (a read always covers everything unsettled above
a floor below which nothing can appear), bounded memory (it reads only what the pipeline has room
for), near-zero idle cost (it sleeps when the cluster does).
"""

from __future__ import annotations

import asyncio
import random
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from relay.errors import SourceUnavailable
from relay.floor import Horizon, Sample
from relay.retry import Backoff
from relay.sources.polling.contracts import Bell, Cursor, Outbox, Page
from relay.sources.polling.lane import LaneReader
from relay.telemetry.logs import get_logger
from relay.types import LANES, Lease, Message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from relay.config import Polling
    from relay.source import Intake
    from relay.telemetry.metrics import Metrics

__all__ = ["PollingSource"]

_log = get_logger(__name__)

_LEASE: Final = attrgetter("lease")

_SAMPLE_SECONDS: Final = 0.1
"""Between looks at the lock table: it costs the server more than a read of one lane."""
_AWAKE_SECONDS: Final = 0.15
"""Without an event before the cluster may sleep: a producer's next event should not need a NOTIFY."""
_FULL_SECONDS: Final = 0.005
_SWEEP_SHARE: Final = 50
"""A sweep takes at most one part in this many of the time, however long it crawls."""
_BACK_SECONDS: Final = (0.05, 2.0)


class PollingSource:
    """Reads the lanes that `gain` gave it until `stop`."""

    def __init__(
        self, outbox: Outbox, bell: Bell, options: Polling, metrics: Metrics, rng: random.Random | None = None
    ) -> None:
        self._outbox, self._bell, self._options, self._metrics = outbox, bell, options, metrics
        self._rng = rng or random.Random()  # noqa: S311  # jitter, not secrets
        self._backoff = Backoff(*_BACK_SECONDS, self._rng)
        self._intake: Intake | None = None
        self._lanes: dict[Lease, LaneReader] = {}
        self._lanes_changed = asyncio.Event()
        self._stopping = False
        self._horizon = Horizon()
        self._sampled_at = self._swept_at = self._arrived_at = self._sleep_again_at = 0.0
        self._sweep_pause = options.sweep_interval_seconds
        self._interval = options.poll_interval_seconds
        self._mean_size = 1_024.0
        # By number only where settled rows are gone: kept ones would be walked over after each claim.
        self._by_number = options.settle == "delete"
        self.on_foreign_server: Callable[[], None] = lambda: None
        """Called when the lanes turn out to be another server's; ownership then looks at once."""
        self.on_connection: Callable[[str | None], None] = lambda _problem: None
        """Called with None when reads work, and with what is wrong when they stop working: readiness."""
        self._connected = False

    # -- ownership's side ------------------------------------------------------------------------

    def gain(self, leases: Iterable[Lease]) -> None:
        """Start reading these lanes. What is held in them has been loaded (PROTOCOLS.md rule 3)."""
        for lease in leases:
            self._lanes[lease] = LaneReader(lease, max(self._options.read_events_max // LANES, 1))
        self._metrics.lanes_owned.set(len(self._lanes))
        self._lanes_changed.set()
        self._bell.ring()

    def lose(self, leases: Iterable[Lease]) -> None:
        """Forget these lanes; their leases are lost, so what is in flight is dropped."""
        for lease in leases:
            self._lanes.pop(lease, None)
        self._metrics.lanes_owned.set(len(self._lanes))

    async def quiet(self, lease: Lease) -> None:
        """Stop reading a lane, and wait until nothing of it is in flight."""
        if (lane := self._lanes.get(lease)) is not None:
            lane.stopped = True
            await lane.idle()

    # -- the pipeline's side ---------------------------------------------------------------------

    def attach(self, intake: Intake) -> None:
        """Where messages go; once, before `run`."""
        self._intake = intake

    def done(self, messages: Sequence[Message]) -> None:
        """The pipeline is done with these."""
        for lease, group in groupby(messages, _LEASE):  # they mostly come lane by lane
            if (lane := self._lanes.get(lease)) is not None:
                lane.done([message.seq for message in group])

    # -- life ------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Read nothing more."""
        self._stopping = True
        self._lanes_changed.set()
        self._bell.ring()

    async def run(self) -> None:
        """Read until stopped."""
        failures = 0
        self._swept_at = asyncio.get_running_loop().time()
        while not self._stopping:
            try:
                await self._turn()
            except SourceUnavailable as error:
                failures += 1
                if failures == 1:
                    self._metrics.source_reconnects.inc()
                    _log.warning("database unavailable, reading again soon", error=str(error))
                self._connected = False
                self.on_connection(str(error))
                await asyncio.sleep(self._backoff.delay(failures))
            else:
                if failures:
                    _log.info("database is back, reading", failures=failures)
                failures = 0

    async def _turn(self) -> None:
        """Read once and rest as long as that suggests."""
        assert self._intake is not None
        if not self._readable():
            self._lanes_changed.clear()
            await self._lanes_changed.wait()
            return
        events, size = await self._intake.room()
        new, full = await self._read(events, size)
        if new:
            await self._bell.busy()
            self._arrived_at = asyncio.get_running_loop().time()
            self._interval = self._options.poll_interval_seconds
        if not full:
            await self._rest(idle=not new)
        elif not new:
            # A page full of what is in flight: there may be more behind it, so no sleep, but nothing to hurry for.
            await self._bell.wait(_FULL_SECONDS)

    def _readable(self) -> list[LaneReader]:
        return [lane for lane in self._lanes.values() if not lane.stopped and not lane.lease.lost]

    # -- reading ---------------------------------------------------------------------------------

    async def _read(self, events: int, size: int) -> tuple[int, bool]:
        """Read what there is room for. Returns how many events are new, and whether some lane's page was full."""
        lanes = self._readable()
        if not lanes:
            return 0, False
        events = min(events, self._options.read_events_max, max(int(size / self._mean_size), 1))
        read = self._read_whole if self._by_number and len(lanes) == LANES else self._read_lanes
        for lane in lanes:
            lane.begin()
        try:
            found = await read(lanes, events)
        except BaseException:
            for lane in lanes:
                lane.cancel()
            raise
        if found is None:
            return self._foreign(lanes)
        page, new, full = found
        self._metrics.read(len(new))
        await self._hand_over(new, page)
        await self._look_up(page, lanes)
        return len(new), full

    async def _read_lanes(self, lanes: Sequence[LaneReader], events: int) -> tuple[Page, list[Message], bool] | None:
        """A range of each lane. None: another server than the one that granted the lanes has answered."""
        cursors = self._cursors(lanes, events)
        stable, stable_at = self._stable(lanes)
        page = await self._outbox.read(cursors, durable=stable)
        if not self._answered_by_ours(page, lanes):
            return None
        new, full = [], False
        for lane, cursor in zip(lanes, cursors, strict=True):
            rows = page.rows.get(lane.lease, ())
            new += lane.end(rows, cursor.limit, stable, stable_at)
            full |= len(rows) >= cursor.limit
        return page, new, full

    async def _read_whole(self, lanes: Sequence[LaneReader], events: int) -> tuple[Page, list[Message], bool] | None:
        """All lanes in one range, by number: each lane is complete up to the last row of a full page."""
        stable, stable_at = self._stable(lanes)
        floor = min(lane.floor for lane in lanes)
        page = await self._outbox.read_all([lane.lease for lane in lanes], floor, events, durable=stable)
        if not self._answered_by_ours(page, lanes):
            return None
        full = sum(map(len, page.rows.values())) >= events
        if full and page.last is not None and page.last.seq < stable:
            stable, stable_at = page.last.seq, page.last.stored_at
        new = []
        for lane in lanes:
            new += lane.take(page.rows.get(lane.lease, ()))
            lane.rise(stable, stable_at)
        return page, new, full

    def _answered_by_ours(self, page: Page, lanes: Sequence[LaneReader]) -> bool:
        if not self._connected:
            self._connected = True
            self.on_connection(None)
        return all(lane.lease.server == page.mark.server for lane in lanes)

    def _stable(self, lanes: Sequence[LaneReader]) -> tuple[int, int]:
        """The horizon, unless it is still another server's than the one that granted these lanes."""
        horizon = self._horizon
        ours = all(lane.lease.server == horizon.server for lane in lanes)
        return (horizon.stable, horizon.stable_at) if ours else (0, 0)

    def _cursors(self, lanes: Sequence[LaneReader], events: int) -> list[Cursor]:
        wanted = sum(min(lane.limit, self._options.read_events_max) for lane in lanes)
        share = min(events / wanted, 1.0)
        for lane in lanes:
            lane.limit = min(lane.limit, self._options.read_events_max)
        return [Cursor(lane.lease, lane.floor, max(int(lane.limit * share), 1), lane.since) for lane in lanes]

    def _foreign(self, lanes: Sequence[LaneReader]) -> tuple[int, bool]:
        """Another server answered than the one that granted the lanes: its numbers mean something else."""
        for lane in lanes:
            lane.cancel()
            lane.lease.lost = True
        _log.warning("another server answers, claiming lanes anew", lanes=len(lanes))
        self.on_foreign_server()
        return 0, False

    async def _hand_over(self, new: list[Message], page: Page) -> None:
        assert self._intake is not None
        if new:
            mean = sum(message.size for message in new) / len(new)
            self._mean_size += (mean - self._mean_size) / 8
        if not page.withheld:
            self._intake.submit(new)
            return
        ready: list[Message] = []
        for message in new:
            if message.seq in page.withheld:
                self._intake.submit(ready)
                ready = []
                message.size += page.withheld[message.seq]
                await self._intake.room()
                if not await self._fetch(message):
                    # Settled by somebody else, who may have parked it: what is behind it must not go from here.
                    assert message.lease is not None
                    message.lease.lost = True
                    self.done([message])
                    continue
            ready.append(message)
        self._intake.submit(ready)

    async def _fetch(self, message: Message) -> bool:
        """Fetch a withheld payload, however long the database is away: the row is in flight already."""
        failures = 0
        while True:
            try:
                return await self._outbox.payload(message)
            except SourceUnavailable:
                failures += 1
                if message.lease is None or message.lease.lost:
                    return False
                await asyncio.sleep(self._backoff.delay(failures))

    # -- the floor -------------------------------------------------------------------------------

    async def _look_up(self, page: Page, lanes: Sequence[LaneReader]) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._sampled_at >= _SAMPLE_SECONDS:
            self._sampled_at = now
            holders = await self._outbox.holders()
            if holders is not None:
                self._horizon.observe(Sample(page.mark.server, page.mark.last_value, holders, page.mark.at))
        if now - self._swept_at >= self._sweep_pause:
            await self._sweep(lanes)

    async def _sweep(self, lanes: Sequence[LaneReader]) -> None:
        """Look below the floors, where nothing should be: the net below the rule."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for lane in lanes:  # what is settled meanwhile is still known when the answer comes
            lane.begin()
        try:
            found = await self._outbox.below(
                [Cursor(lane.lease, lane.floor, len(lane.in_flight) + 1) for lane in lanes]
            )
            unknown = {lane: [seq for seq in found.get(lane.lease, ()) if seq not in lane.in_flight] for lane in lanes}
        finally:
            for lane in lanes:
                lane.cancel()
        for lane, seqs in unknown.items():
            if seqs:
                lane.reset()
                self._metrics.floor_violations.inc(len(seqs))
                _log.error(
                    "unsettled rows below the floor, reading the lane from its start",
                    lane=lane.lease.lane,
                    seqs=seqs[:5],
                )
        self._swept_at = loop.time()
        self._sweep_pause = max(self._options.sweep_interval_seconds, (self._swept_at - began) * _SWEEP_SHARE)

    # -- resting ---------------------------------------------------------------------------------

    async def _rest(self, *, idle: bool) -> None:
        if not idle:
            await self._bell.wait(self._interval)
            return
        now = asyncio.get_running_loop().time()
        if now - self._arrived_at >= _AWAKE_SECONDS and now >= self._sleep_again_at:
            if await self._bell.sleep():
                await self._sleep()
                return
            self._sleep_again_at = now + _AWAKE_SECONDS
        self._interval = min(self._interval * 2, self._options.poll_interval_max_seconds)
        await self._bell.wait(self._interval)

    async def _sleep(self) -> None:
        """Producers notify from now on. Each time read once more first, because one may have committed just before."""
        assert self._intake is not None
        self._metrics.asleep.set(1)
        try:
            while not self._stopping:
                new, full = await self._read(*await self._intake.room())
                if new or full:
                    break
                cause = await self._bell.wait(self._options.fallback_interval_seconds * self._rng.uniform(0.5, 1.5))
                self._metrics.woke("fallback" if cause == "timeout" else cause)
                if cause != "timeout" or not await self._bell.sleep():
                    break
        finally:
            self._metrics.asleep.set(0)
            await self._bell.wake()
        self._arrived_at = asyncio.get_running_loop().time()
        self._interval = self._options.poll_interval_seconds
