"""Writing decisions: park, bury, finish a run. Fenced by the lease, repeated until the database has them.

Whatever belongs to a lease that turned out to be lost is dropped instead of written: its row is still
there, and the lane's new owner decides (PROTOCOLS.md rule 2).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from relay.errors import LeaseLost
from relay.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from relay.pipeline.recovery import Recovery
    from relay.pipeline.settlement import Settlement
    from relay.store import Burial, Parked, ParkingStore, RunResult
    from relay.telemetry.metrics import Metrics
    from relay.types import Message

__all__ = ["Decisions"]

T = TypeVar("T")
_log = get_logger(__name__)


class Decisions:
    """The deciding half of the parking store, made safe to call from the pipeline."""

    def __init__(self, parking: ParkingStore, settlement: Settlement, recovery: Recovery, metrics: Metrics) -> None:
        self._parking, self._settlement, self._recovery, self._metrics = parking, settlement, recovery, metrics

    async def park(self, sink: str, entries: Sequence[Parked]) -> None:
        """Park events that came directly; their rows are settled with it where this sink is the last one."""
        written = await self._decide(
            entries, lambda entry: entry.message, lambda some, rows: self._parking.park(sink, some, rows)
        )
        self._metrics.sink(sink).parked.inc(len(written))

    async def bury(self, entries: Sequence[Burial]) -> None:
        """Write dead letters of events that came directly."""
        for entry in await self._decide(entries, lambda entry: entry.message, self._parking.bury):
            self._buried(entry)

    async def finish(self, sink: str, results: Sequence[RunResult]) -> set[tuple[int, str | None]]:
        """Record what became of runs. Returns the keys that are still held; lost lanes are left out."""
        left = [result for result in results if not result.lease.lost]
        while left:
            try:
                still = await self._recovery.until_done("finish parked", partial(self._parking.finish, sink, left))
            except LeaseLost as error:
                for result in left:
                    result.lease.lost |= result.lease.lane in error.lanes
                left = [result for result in left if not result.lease.lost]
                continue
            for result in left:
                if result.burial:
                    self._buried(result.burial)
            return still
        return set()

    async def _decide(
        self,
        entries: Sequence[T],
        message_of: Callable[[T], Message],
        write: Callable[[Sequence[T], Sequence[Message]], Awaitable[None]],
    ) -> Sequence[T]:
        """Write entries until none of them belongs to a lost lease. Returns those that are written."""
        left = list(entries)
        while left := self._own(left, message_of):
            messages = [message_of(entry) for entry in left]
            rows = self._settlement.settles_with(messages)
            try:
                await self._recovery.until_done("write a decision", partial(write, left, rows))
            except LeaseLost as error:
                for message in messages:
                    if message.lease is not None:
                        message.lease.lost |= message.lease.lane in error.lanes
                continue
            self._settlement.decided(messages, rows)
            return left
        return ()

    def _own(self, entries: Sequence[T], message_of: Callable[[T], Message]) -> list[T]:
        own: list[T] = []
        lost: list[Message] = []
        for entry in entries:
            message = message_of(entry)
            if message.lease is not None and message.lease.lost:
                lost.append(message)
            else:
                own.append(entry)
        self._settlement.dropped(lost)
        return own

    def _buried(self, burial: Burial) -> None:
        message = burial.message
        self._metrics.sink(burial.sink or None).dead_lettered(burial.kind)
        _log.warning(
            "event dead-lettered",
            sink=burial.sink, id=message.id, topic=message.topic, kind=burial.kind, reason=burial.reason,
        )  # fmt: skip
