"""How much to send at once: what the way to the server carries in about a second. Pure.

A fixed 1 MiB would never get through at 50 kB/s: each attempt would end at its deadline, unknown, and be
sent again from its beginning (FIELD.md F10).
"""

from __future__ import annotations

from typing import Final

from relay.sinks.redis.request import ROUND_BYTES_MAX

__all__ = ["Pace"]

_ROUND_BYTES_MIN: Final = 8 * 1024
_SECONDS: Final = 1.0
_SHARE_OF_DEADLINE: Final = 5
_STEP: Final = 8


class Pace:
    """The size of the next round, learned from those before it. One for each sink."""

    def __init__(self, deadline_seconds: float) -> None:
        self._seconds = min(_SECONDS, deadline_seconds / _SHARE_OF_DEADLINE)
        self.round_bytes = ROUND_BYTES_MAX

    def answered(self, size: int, seconds: float) -> None:
        """A round of `size` bytes took so long. Grows by steps, because small rounds measure the round trip."""
        if seconds > self._seconds:
            self._set(int(size * self._seconds / seconds))
        elif size * 2 >= self.round_bytes:
            self._set(self.round_bytes * 2)

    def timed_out(self) -> None:
        """A round did not get through in time. Whether it was too large, nobody knows: a smaller one is tried."""
        self._set(self.round_bytes // _STEP)

    def _set(self, size: int) -> None:
        self.round_bytes = min(max(size, _ROUND_BYTES_MIN), ROUND_BYTES_MAX)
