"""Decisions about lanes that turn out to be lost are dropped, and not counted as made."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from relay.errors import LeaseLost
from relay.pipeline.decisions import Decisions
from relay.pipeline.recovery import Recovery
from relay.retry import Backoff
from relay.store import Parked
from relay.telemetry.logs import get_logger
from relay.telemetry.metrics import Metrics
from relay.testing.messages import make_message
from relay.types import Lease, Message

if TYPE_CHECKING:
    from collections.abc import Sequence


class Stores:
    """Lane 1 has another owner by now; what settlement is told is kept."""

    def __init__(self) -> None:
        self.gone: list[Message] = []
        self.done: list[Message] = []

    async def park(self, _sink: str, entries: Sequence[Parked], _settle: Sequence[Message]) -> None:
        if any(entry.message.lane == 1 for entry in entries):
            raise LeaseLost([1])

    def settles_with(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages

    def dropped(self, messages: Sequence[Message]) -> None:
        self.gone += messages

    def decided(self, messages: Sequence[Message], _settled: Sequence[Message]) -> None:
        self.done += messages


async def test_only_what_is_written_counts() -> None:
    """Of two events to park one belongs to another pod by now: it is dropped, the other one is parked."""
    events = [make_message("t", key="k") for _ in range(2)]
    for lane, event in enumerate(events):
        event.lane, event.lease = lane, Lease(lane, 1)
    stores, metrics = Stores(), Metrics(["main"])
    both: Any = stores
    recovery = Recovery(Backoff(0.01, 0.1, random.Random(1)), get_logger("test"))
    await Decisions(both, both, recovery, metrics).park("main", [Parked(event) for event in events])
    assert (stores.done, stores.gone) == ([events[0]], [events[1]])
    assert metrics.registry.get_sample_value("relay_parked_total", {"sink": "main"}) == 1
