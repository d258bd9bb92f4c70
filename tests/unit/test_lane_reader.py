"""A lane's reader against a model: nothing twice while it is in flight or on its way out, nothing left out."""

from __future__ import annotations

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from relay.sources.polling.lane import LaneReader
from relay.testing.messages import make_message
from relay.types import Lease, Message


def row(seq: int) -> Message:
    message = make_message("t")
    message.seq = seq
    return message


class Model(RuleBasedStateMachine):
    """A table with late commits; a read whose snapshot is taken somewhere between its begin and its end."""

    def __init__(self) -> None:
        super().__init__()
        self.lane = LaneReader(Lease(0, 1), 4)
        self.numbers = 0
        self.open: set[int] = set()
        """Numbers that were given out and are not visible yet."""
        self.table: set[int] = set()
        """Visible and not settled."""
        self.returned: list[int] = []
        self.flying: set[int] = set()
        self.reading = False
        self.snapshot: list[int] | None = None
        self.stable = self.floor = self.limit = 0

    @rule(late=st.booleans())
    def insert(self, late: bool) -> None:
        self.numbers += 1
        (self.open if late else self.table).add(self.numbers)

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        if self.open:
            seq = data.draw(st.sampled_from(sorted(self.open)))
            self.open.discard(seq)
            self.table.add(seq)

    @rule()
    def begin_read(self) -> None:
        if not self.reading:
            self.lane.begin()
            self.reading, self.snapshot = True, None
            self.stable = min(self.open, default=self.numbers + 1) - 1  # what relay.floor promises
            self.floor, self.limit = self.lane.floor, self.lane.limit

    @rule()
    def take_snapshot(self) -> None:
        if self.reading and self.snapshot is None:
            self.snapshot = sorted(seq for seq in self.table if seq > self.floor)[: self.limit]

    @rule(failed=st.booleans())
    def end_read(self, failed: bool) -> None:
        self.take_snapshot()
        if not self.reading or self.snapshot is None:
            return
        self.reading = False
        if failed:
            self.lane.cancel()
            return
        new = [message.seq for message in self.lane.end([row(s) for s in self.snapshot], self.limit, self.stable)]
        assert new == sorted(new)
        assert not set(new) & set(self.returned), "an event was handed over twice"
        self.returned += new
        self.flying |= set(new)

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        if self.flying:
            gone = data.draw(st.sets(st.sampled_from(sorted(self.flying)), min_size=1))
            self.flying -= gone
            self.table -= gone
            self.lane.done(gone)

    @invariant()
    def the_floor_leaves_nothing_out(self) -> None:
        below = {seq for seq in self.table | self.open if seq <= self.lane.floor}
        assert below <= self.flying

    @invariant()
    def what_is_in_flight_is_known(self) -> None:
        assert self.flying <= self.lane.in_flight
        if not self.reading:
            assert self.flying == self.lane.in_flight

    def teardown(self) -> None:
        """Reading on, each event comes exactly once."""
        self.table |= self.open
        self.open = set()
        self.end_read(failed=False)
        for _ in range(self.numbers + 2):
            self.begin_read()
            self.end_read(failed=False)
            self.lane.done(self.flying)
            self.table -= self.flying
            self.flying = set()
        assert sorted(self.returned) == list(range(1, self.numbers + 1))


Model.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLaneReader = Model.TestCase


def test_a_limited_read_raises_the_floor_to_its_last_row_only() -> None:
    """What its limit cut off is not below the floor, whatever the horizon says."""
    lane = LaneReader(Lease(0, 1), 2)
    lane.begin()
    lane.end([row(1), row(2)], 2, stable=9)
    assert lane.floor == 2
    lane.begin()
    lane.end([row(3)], 2, stable=9)
    assert lane.floor == 9


def test_the_limit_follows_the_traffic() -> None:
    """A full read asks for twice as much, a nearly empty one for half, never for less than a few."""
    lane = LaneReader(Lease(0, 1), 16)
    lane.begin()
    lane.end([row(seq) for seq in range(1, 17)], 16, 0)
    assert lane.limit == 32
    for _ in range(5):
        lane.begin()
        lane.end([], lane.limit, 0)
    assert lane.limit == 8


async def test_a_stopped_lane_takes_nothing_and_tells_when_it_is_idle() -> None:
    """On its way to another pod: rows of a read that was on its way are that pod's; what is in flight is waited for."""
    lane = LaneReader(Lease(0, 1), 8)
    lane.begin()
    assert lane.end([row(1)], 8, 0)
    lane.begin()
    lane.stopped = True
    idle = asyncio.create_task(lane.idle())
    await asyncio.sleep(0)
    assert not idle.done()
    lane.done([1])
    assert lane.end([row(1), row(2)], 8, 0) == []
    await idle
    assert lane.in_flight == set()
