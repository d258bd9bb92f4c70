"""One call to a sink, made safe: a sink that breaks its contract hurts the event that provokes it, no other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from relay.pipeline import publishing
from relay.sink import CONFIRMED, DEFERRED, Outcome, Status
from relay.testing.messages import make_message, make_messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.types import Message


class Broken:
    """A sink that does something that it must not when an event of the batch is marked."""

    concurrency = 1

    def __init__(self, how: str) -> None:
        self.how = how
        self.delivered: list[int] = []
        self.calls = 0

    async def open(self) -> None: ...

    async def ping(self) -> None: ...

    async def close(self) -> None: ...

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        self.calls += 1
        if any(message.payload == b"poison" for message in batch):
            if self.how == "raises":
                raise ValueError("no")
            if self.how == "hangs":
                await asyncio.Event().wait()
            return [CONFIRMED] * (len(batch) - 1 if self.how == "too few" else len(batch) + 1)
        self.delivered += [message.seq for message in batch]
        return [CONFIRMED] * len(batch)


def with_poison(index: int, *, keys: Sequence[str | None], number: int = 16) -> list[Message]:
    batch = make_messages("t", number, keys=keys)
    batch[index].payload = b"poison"
    return batch


@pytest.mark.parametrize("how", ["raises", "too few", "too many"])
@pytest.mark.parametrize("index", [0, 7, 15])
async def test_only_the_provoking_event_fails(how: str, index: int) -> None:
    """Found by halves: the others are confirmed, in order; those of its key behind it are deferred and not sent."""
    batch = with_poison(index, keys=["a", "b", "c", None])
    sink = Broken(how)
    outcomes = await publishing.publish("main", sink, batch)
    assert len(outcomes) == len(batch)
    assert outcomes[index].status is Status.UNAVAILABLE
    assert not outcomes[index].sink_down
    bad = batch[index].key
    for place, (message, outcome) in enumerate(zip(batch, outcomes, strict=True)):
        behind = place > index and bad is not None and message.key == bad
        if place != index:
            assert outcome is (DEFERRED if behind else CONFIRMED)
    confirmed = [m.seq for m, outcome in zip(batch, outcomes, strict=True) if outcome is CONFIRMED]
    assert sink.delivered == confirmed
    assert sink.calls < 16


async def test_a_hanging_sink_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what became of the batch: all of it is tried again, and the sink counts as down."""
    monkeypatch.setattr(publishing, "_HANG_SECONDS", 0.01)
    outcomes = await publishing.publish("main", Broken("hangs"), with_poison(0, keys=["a"], number=3))
    assert [(outcome.status, outcome.sink_down) for outcome in outcomes] == [(Status.UNAVAILABLE, True)] * 3


async def test_a_cancellation_goes_through() -> None:
    task = asyncio.create_task(publishing.publish("main", Broken("hangs"), with_poison(0, keys=["a"])))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_all_confirmed() -> None:
    assert publishing.all_confirmed([CONFIRMED] * 3)
    assert publishing.all_confirmed([Outcome(Status.CONFIRMED)])
    assert not publishing.all_confirmed([CONFIRMED, DEFERRED])


async def test_a_healthy_sink_is_called_once() -> None:
    sink = Broken("raises")
    assert await publishing.publish("main", sink, [make_message("t")]) == [CONFIRMED]
    assert sink.calls == 1
