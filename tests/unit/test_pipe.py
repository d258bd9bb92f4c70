"""What the workers and the drainer of one sink do at the same time, with a database that answers when told to."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from relay.pipeline.drainer import Drainer
from relay.pipeline.holds import HoldState
from relay.pipeline.pipe import Pipe, PipeOptions
from relay.pipeline.recovery import Recovery
from relay.retry import Backoff
from relay.sink import unavailable
from relay.store import Burial, HeldKey, ParkedRun
from relay.telemetry.logs import get_logger
from relay.telemetry.metrics import Metrics
from relay.testing.messages import make_message
from relay.types import Lease, Message

if TYPE_CHECKING:
    from collections.abc import Sequence

BACKOFF = Backoff(0.01, 0.1, random.Random(1))


class Parking:
    """Answers of the database, given after `asked` when `answer` is set."""

    def __init__(self) -> None:
        self.asked, self.answer = asyncio.Event(), asyncio.Event()
        self.finishing, self.finished = asyncio.Event(), asyncio.Event()
        self.pause = 0.0
        self.runs: list[ParkedRun] = []
        self.full: set[int] = set()
        self.listed: list[int] = []

    async def next_due(self, *_arguments: object) -> float:
        return self.pause

    async def due(self, *_arguments: object) -> Sequence[ParkedRun]:
        await self._wait()
        return self.runs

    async def held(self, leases: Sequence[Lease]) -> Sequence[HeldKey]:
        await self._wait()
        self.listed += [lease.lane for lease in leases]
        return [HeldKey("main", lease.lane, None) for lease in leases if lease.lane in self.full]

    async def finish(self, *_arguments: object) -> set[object]:
        self.finishing.set()
        await self.finished.wait()
        return set()

    async def bury(self, entries: Sequence[Burial]) -> None:
        await self._wait()

    async def _wait(self) -> None:
        self.asked.set()
        await self.answer.wait()


@pytest.fixture
def parking() -> Parking:
    return Parking()


@pytest.fixture
def pipe(parking: Parking) -> Pipe:
    made: Any = parking
    return Pipe(
        "main", made, PipeOptions(10, 1_000, 3, 1.0),
        parking=made, decisions=made, settlement=made, recovery=Recovery(BACKOFF, get_logger("test")),
        retry=BACKOFF, outage=BACKOFF, metrics=Metrics(["main"]), target=lambda _topic: None, on_change=lambda _circuit: None,
    )  # fmt: skip


def event(lease: Lease, key: str, parked: int | None = None) -> Message:
    message = make_message("t", key=key)
    message.lease, message.parked = lease, parked
    return message


async def test_a_lane_that_is_lost_while_its_rows_are_read_holds_nothing(pipe: Pipe, parking: Parking) -> None:
    """What would wait for such a key would wait for ever: nobody finishes the run of a lost lane."""
    lease = Lease(0, 1)
    parking.runs = [ParkedRun([event(lease, "k", 1)], complete=True)]
    reading = asyncio.create_task(pipe.due([lease], 1, 1))
    await parking.asked.wait()
    lease.lost = True
    assert pipe.holds.forget(lease) == []
    parking.answer.set()
    await reading
    assert not pipe.holds


async def test_a_dead_letter_holds_its_key_whatever_was_listed_meanwhile(pipe: Pipe, parking: Parking) -> None:
    """A lane's keys are listed just before the dead letter is written: the list does not have its key."""
    lease = Lease(0, 1)
    pipe.holds.hold(lease, None)
    listing = asyncio.create_task(pipe.list_held())
    await parking.asked.wait()
    pipe.holds.hold(lease, "k")
    dead = event(lease, "k")
    burying = asyncio.create_task(pipe.bury([Burial(dead, "main", "rejected", "", 1, holds=True)]))
    await asyncio.sleep(0)
    parking.answer.set()
    await asyncio.gather(listing, burying)
    assert pipe.holds.state(dead) is HoldState.HELD


async def test_full_lanes_are_asked_one_at_a_time(pipe: Pipe, parking: Parking) -> None:
    """After a long outage it is done before each of many cycles; each lane's turn comes."""
    parking.answer.set()
    parking.full = {0, 1, 2}
    for lane in range(3):
        pipe.holds.hold(Lease(lane, 1), None)
    for _ in range(4):
        await pipe.list_held()
    assert parking.listed == [0, 1, 2, 0]
    parking.full = {0}
    await pipe.list_held()
    assert parking.listed[4:] == [1, 2, 0]
    assert [lease.lane for lease in pipe.holds.whole()] == [0]


async def test_what_is_parked_during_an_outage_does_not_try_the_sink(pipe: Pipe, parking: Parking) -> None:
    """The circuit says when a row is tried; parking goes on all the time and says nothing about the sink."""
    await pipe.down(unavailable("down", sink_down=True))
    again = asyncio.get_running_loop().time() + pipe.circuit.pause()
    drainer = Drainer(pipe, lambda: [Lease(0, 1)], lambda _messages: None)
    draining = asyncio.create_task(drainer.run())
    while not parking.asked.is_set():
        pipe.parked.set()
        await asyncio.sleep(0)
    assert asyncio.get_running_loop().time() >= again
    draining.cancel()


async def test_a_lane_is_left_when_its_rows_are_recorded(pipe: Pipe, parking: Parking) -> None:
    """Handed over between a confirmation and its commit, the new owner would send the rows again."""
    mine, other = Lease(0, 1), Lease(1, 1)
    row = event(mine, "k", 1)
    parking.runs = [ParkedRun([row], complete=True)]
    drainer = Drainer(pipe, lambda: [mine, other], lambda _messages: None)
    draining = asyncio.create_task(drainer.run())
    await parking.asked.wait()
    parking.pause = 60.0
    leaving = [asyncio.create_task(drainer.left(lease)) for lease in (mine, other)]
    parking.answer.set()
    await leaving[1]
    run = pipe.runs.of(row)
    assert run
    run.confirmed(row)
    pipe.runs.closed()
    await parking.finishing.wait()
    assert not leaving[0].done()
    parking.finished.set()
    await leaving[0]
    draining.cancel()
