"""How much is sent at once over a connection that is slow.

A batch of 4 MB over 50 kB/s has no answer before the deadline, and sent again whole it never has (FIELD.md F10).
So after a transfer that took too long the next one is a part of it, confirmed by itself: however slow the
connection is, something is confirmed in each publish.
"""

from __future__ import annotations

from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Pace"]

_BYTES_MIN: Final = 16_384
_BYTES_FAST: Final = 8 * 1024 * 1024  # above what one publish has
_FACTOR: Final = 4


class Pace:
    """Shared by all publishes of a sink. `bytes_max` are sent at once while `is_slow`."""

    def __init__(self, seconds_max: float) -> None:
        self.bytes_max = _BYTES_FAST
        self._seconds_max = seconds_max

    @property
    def is_slow(self) -> bool:
        """Whether batches are to be sent in parts."""
        return self.bytes_max < _BYTES_FAST

    @contextmanager
    def of(self, size: Callable[[], int]) -> Iterator[None]:
        """Watch a transfer of so many bytes, however it ends; they are counted only if it matters."""
        began = monotonic()
        try:
            yield
        finally:
            seconds = monotonic() - began
            if seconds > self._seconds_max:
                self.bytes_max = max(_BYTES_MIN, min(self.bytes_max, size()) // _FACTOR)
            elif self.is_slow and seconds * _FACTOR < self._seconds_max and size() * 2 > self.bytes_max:
                self.bytes_max = min(_BYTES_FAST, self.bytes_max * 2)
