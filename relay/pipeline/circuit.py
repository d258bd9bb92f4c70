"""Whether a sink takes anything at all: one circuit for each sink.

While it is open nobody publishes; after a pause one batch goes through as a probe and the others wait
for its result. An outage therefore costs one attempt for each pause, whatever the number of workers,
and nobody's attempts are counted (promise 4).
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from relay.retry import Backoff

__all__ = ["Admission", "Circuit"]

_PROBE_SECONDS: Final = 0.25
"""Between looks at a probe that is on its way: to a sink that swallows everything it takes until its deadline."""


class Admission(Enum):
    """Answer to a worker that wants to publish."""

    GO = "go"
    PROBE = "probe"
    GIVE_UP = "give_up"


class Circuit:
    """Closed while the sink answers, open while it is down. All times are the event loop's."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._failures = 0
        self._retry_at = 0.0
        self._probing = False
        self._changed = asyncio.Condition()
        self.down_since: float | None = None
        self.reason = ""
        self.misconfigured = False

    @property
    def is_open(self) -> bool:
        """True while the sink is considered down."""
        return self.down_since is not None

    def pause(self) -> float:
        """Seconds until it is worth asking again; 0 when the circuit is closed or a probe is due."""
        if not self.is_open:
            return 0.0
        if self._probing:
            return _PROBE_SECONDS
        return max(self._retry_at - asyncio.get_running_loop().time(), 0.0)

    async def admit(self, give_up_at: float | None = None) -> Admission:
        """Wait until publishing is allowed. GIVE_UP once the loop's time reaches `give_up_at` first."""
        loop = asyncio.get_running_loop()
        async with self._changed:
            while self.is_open:
                now = loop.time()
                if not self._probing and now >= self._retry_at:
                    self._probing = True
                    return Admission.PROBE
                if give_up_at is not None and now >= give_up_at:
                    return Admission.GIVE_UP
                await self._wait_until(self._retry_at if not self._probing else None, give_up_at)
        return Admission.GO

    async def succeed(self) -> bool:
        """The sink answered. Returns True if that ended an outage."""
        if not self.is_open:
            return False
        self.down_since, self._failures, self._probing = None, 0, False
        self.reason, self.misconfigured = "", False
        await self._notify()
        return True

    async def fail(self, reason: str, *, misconfigured: bool) -> bool:
        """The sink is down. Returns True if that began an outage."""
        now = asyncio.get_running_loop().time()
        began = not self.is_open
        if began:
            self.down_since = now
        elif not self._probing:
            return False  # a batch that was on its way when the circuit opened: the same failure once more
        self._failures += 1
        self._probing = False
        self._retry_at = now + self._backoff.delay(self._failures)
        self.reason, self.misconfigured = reason, misconfigured
        await self._notify()
        return began

    async def abandon(self) -> None:
        """A probe ended without an answer about the sink (cancelled, or nothing was left to send)."""
        self._probing = False
        await self._notify()

    async def _wait_until(self, *moments: float | None) -> None:
        deadline = min((moment for moment in moments if moment is not None), default=None)
        try:
            async with asyncio.timeout_at(deadline):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
