"""What may be in flight at once, in events and in bytes: the one bound of the pipeline (promise 6).

Everything that was submitted is charged until it is settled, parked, buried or dropped. The source
asks for room before it reads, so nothing behind it ever has to wait for space.
"""

from __future__ import annotations

import asyncio
from operator import attrgetter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.types import Message

__all__ = ["Budget"]

_SIZE: Final = attrgetter("size")


class Budget:
    """Events and bytes in flight. A single event larger than `bytes_max` passes alone."""

    def __init__(self, events_max: int, bytes_max: int) -> None:
        self.events_max = events_max
        self.bytes_max = bytes_max
        self.events = 0
        self.bytes = 0
        # Waiting for a quarter keeps reads large: one freed event must not cause a read of one row.
        self._events_worth = max(events_max // 4, 1)
        self._bytes_worth = max(bytes_max // 4, 1)
        self._changed = asyncio.Event()

    def charge(self, messages: Sequence[Message]) -> None:
        """Count messages in."""
        self.events += len(messages)
        self.bytes += sum(map(_SIZE, messages))

    def release(self, messages: Sequence[Message]) -> None:
        """Count messages out, each exactly once."""
        self.events -= len(messages)
        self.bytes -= sum(map(_SIZE, messages))
        self._changed.set()

    async def room(self) -> tuple[int, int]:
        """Wait until a read is worth it; returns free events and bytes."""
        while not self._roomy():
            self._changed.clear()
            await self._changed.wait()
        return self.events_max - self.events, max(self.bytes_max - self.bytes, 1)

    async def empty(self) -> None:
        """Wait until nothing is in flight."""
        while self.events:
            self._changed.clear()
            await self._changed.wait()

    def _roomy(self) -> bool:
        if self.events == 0:
            return True
        events, size = self.events_max - self.events, self.bytes_max - self.bytes
        return events >= self._events_worth and size >= self._bytes_worth
