"""The in-memory double keeps the contract, so that tests which use it prove something about real sinks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from relay.headers import decode
from relay.sink import rejected, unavailable
from relay.sinks.memory import MemoryOptions, MemorySink
from relay.testing.messages import make_message
from relay.testing.sink_contract import Harness, Received, SinkContract
from relay.timestamps import rfc3339

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.sink import Sink
    from relay.types import Message

TOO_LARGE = b"too large"


class MemoryHarness(Harness):
    """One in-memory sink that all destinations and faults of a test refer to."""

    deadline_seconds = 0.5
    keeps_messages = True
    can_break = True

    def __init__(self, sink_class: type[MemorySink] = MemorySink) -> None:
        self._sink_class = sink_class
        self._sinks: list[MemorySink] = []
        self._fault: Callable[[MemorySink], None] = MemorySink.up
        self._destinations = 0

    def make(self) -> Sink:
        sink = self._sink_class("memory", MemoryOptions(publish_timeout_seconds=self.deadline_seconds))
        sink.fail(lambda message: message.payload == TOO_LARGE, rejected("too large"))
        sink.fail(lambda message: message.destination == "faulty", unavailable("no such destination"))
        self._sinks.append(sink)
        self._fault(sink)
        return sink

    async def destination(self) -> str:
        self._destinations += 1
        return f"d{self._destinations}"

    async def read(self, destination: str, count: int) -> list[Received]:
        return [
            Received(m.id, m.key, m.payload, decode(m.headers), rfc3339(m.created_at))
            for sink in self._sinks
            for m in sink.of(destination)
        ]

    def rejected_message(self, destination: str, key: str | None) -> Message:
        return make_message(destination, key=key, payload=TOO_LARGE)

    async def faulty_destination(self) -> str:
        return "faulty"

    async def cut(self) -> None:
        self._break(MemorySink.down)

    async def swallow_replies(self) -> None:
        self._break(MemorySink.swallow_replies)

    async def stall(self) -> None:
        self._break(MemorySink.hold)

    async def heal(self) -> None:
        self._break(_heal)

    async def held_bytes_passed(self) -> None:
        for _ in range(3):  # nothing is held, but whoever sends late needs a turn of the loop for it
            await asyncio.sleep(0)

    def _break(self, fault: Callable[[MemorySink], None]) -> None:
        self._fault = fault
        for sink in self._sinks:
            fault(sink)


def _heal(sink: MemorySink) -> None:
    sink.up()
    sink.release()


class TestMemorySink(SinkContract):
    """`relay.sinks.memory` under the contract suite."""

    @pytest.fixture
    def harness(self) -> Harness:
        return MemoryHarness()
