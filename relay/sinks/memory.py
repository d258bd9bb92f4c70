"""The in-memory sink: for tests and dry runs. It keeps what it confirmed, and fails exactly as it is told.

Tests wait on its signals (`received`, `publishing`) instead of sleeping, and reproduce every kind of
broker trouble with `down`, `hold`, `swallow_replies` and `fail`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, Field

from relay.config.models import Section
from relay.errors import SinkUnavailable
from relay.sink import CONFIRMED, DEFERRED, Outcome, Status, unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relay.types import Message

__all__ = ["MemoryOptions", "MemorySink"]


class MemoryOptions(Section):
    """Options of an in-memory sink."""

    concurrency: int = Field(2, ge=1, le=64, description="batches in flight at once")
    messages_max: int = Field(100_000, ge=1, description="messages that are kept; the oldest go first")
    publish_timeout_seconds: float = Field(
        30.0, gt=0, allow_inf_nan=False, description="of one batch, which only a test that holds the sink can reach"
    )


class MemorySink:
    """A sink inside this process. Not thread-safe: its methods belong to the event loop's thread."""

    Options: ClassVar[type[BaseModel]] = MemoryOptions

    def __init__(self, name: str, options: MemoryOptions | None = None) -> None:
        self.name = name
        self._options = options or MemoryOptions()
        self.messages: deque[Message] = deque(maxlen=self._options.messages_max)
        """What was delivered, in order, repeats included."""
        self.delivered = 0
        """How many messages were delivered; counts on when `messages` forgets the oldest."""
        self.batches = 0
        """How many batches were handed to it, whatever became of them."""
        self._faults: list[_Fault] = []
        self._down: Outcome | None = None
        self._swallow = False
        self._open_gate = asyncio.Event()
        self._open_gate.set()
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    @property
    def concurrency(self) -> int:
        """How many batches may be in flight."""
        return self._options.concurrency

    async def open(self) -> None:
        """Nothing to open."""

    async def ping(self) -> None:
        """Raise SinkUnavailable while it is down."""
        if self._down is not None:
            raise SinkUnavailable(f"{self.name}: {self._down.reason}")

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        """Deliver each message, unless a programmed fault says otherwise; see `relay.sink.Sink`."""
        self.batches += 1
        self._notify()
        if not self._open_gate.is_set() and not await self._released():
            return [unavailable("no answer in time", sink_down=True)] * len(batch)
        if self._down is not None:
            return [self._down] * len(batch)
        outcomes = self._deliver(batch)
        self._notify()
        if self._swallow:
            return [unavailable("no answer in time", sink_down=True)] * len(batch)
        return outcomes

    async def close(self) -> None:
        """Let go of a batch that is held."""
        self.down("closed")
        self._open_gate.set()

    # --- What tests see ---

    def of(self, destination: str) -> list[Message]:
        """Delivered messages of one destination, in order, repeats included."""
        return [message for message in self.messages if message.destination == destination]

    async def received(self, number: int) -> None:
        """Wait until `number` messages in all have been delivered, repeats included."""
        await self._until(lambda: self.delivered >= number)

    async def publishing(self, number: int = 1) -> None:
        """Wait until `number` batches in all have been handed to it, delivered or not."""
        await self._until(lambda: self.batches >= number)

    # --- What tests do to it ---

    def fail(self, matches: Callable[[Message], bool], outcome: Outcome, *, times: int | None = None) -> None:
        """Answer `outcome` for each message that `matches`, `times` times (or always), without delivering it."""
        self._faults.append(_Fault(matches, outcome, times))

    def succeed(self) -> None:
        """Forget every `fail`."""
        self._faults.clear()

    def down(self, reason: str = "down", *, misconfigured: bool = False) -> None:
        """Be unavailable as a whole until `up`."""
        self._down = unavailable(reason, sink_down=True, misconfigured=misconfigured)

    def up(self) -> None:
        """End `down` and `swallow_replies`."""
        self._down = None
        self._swallow = False

    def swallow_replies(self) -> None:
        """Deliver, but answer "unknown", as after a timeout, until `up`."""
        self._swallow = True

    def hold(self) -> None:
        """Let `publish` wait before it delivers anything, until `release`."""
        self._open_gate.clear()

    def release(self) -> None:
        """End `hold`."""
        self._open_gate.set()

    # --- Inside ---

    def _deliver(self, batch: Sequence[Message]) -> list[Outcome]:
        held: set[str] = set()
        outcomes: list[Outcome] = []
        for message in batch:
            outcome = DEFERRED if message.key in held else self._outcome(message)
            if outcome.status is Status.CONFIRMED:
                self.messages.append(message)
                self.delivered += 1
            elif message.key is not None:
                held.add(message.key)
            outcomes.append(outcome)
        return outcomes

    def _outcome(self, message: Message) -> Outcome:
        return next((fault.outcome for fault in self._faults if fault.strikes(message)), CONFIRMED)

    async def _released(self) -> bool:
        try:
            async with asyncio.timeout(self._options.publish_timeout_seconds):
                await self._open_gate.wait()
        except TimeoutError:
            return False
        return True

    async def _until(self, reached: Callable[[], bool]) -> None:
        if not reached():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((reached, future))
            await future

    def _notify(self) -> None:
        for reached, future in self._waiting:
            if reached() and not future.done():
                future.set_result(None)
        self._waiting = [(reached, future) for reached, future in self._waiting if not future.done()]


class _Fault:
    """A programmed answer for the messages that match."""

    def __init__(self, matches: Callable[[Message], bool], outcome: Outcome, times: int | None) -> None:
        self._matches = matches
        self.outcome = outcome
        self._times = times

    def strikes(self, message: Message) -> bool:
        """Whether it applies to this message; uses up one of its times."""
        if self._times == 0 or not self._matches(message):
            return False
        if self._times is not None:
            self._times -= 1
        return True
