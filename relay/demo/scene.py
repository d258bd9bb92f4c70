"""What is to be seen at one moment: the stage, the counts, and what has happened so far."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from relay.demo.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.demo.pod import Pod
    from relay.demo.stage import Stage

__all__ = ["Scene"]

_LOOK_SECONDS: Final = 0.25
_LANES: Final = "SELECT owner, count(*) AS lanes FROM outbox_lease WHERE owner IS NOT NULL GROUP BY owner"
_EVENTS: Final = "SELECT event::text FROM orders"


class Scene:
    """The state that the story changes and the screen shows; `on_note` hears each line of the story."""

    def __init__(self, stage: Stage, *, seconds: float, keep: bool) -> None:
        self.stage, self.seconds, self.keep = stage, seconds, keep
        self.tally = Tally()
        self.started = time.time()
        self.notes: list[tuple[float, str]] = []
        self.broker_up = True
        self.is_told = False  # nothing will be broken any more
        self.lanes: dict[str, int] = {}
        self.outbox_rows = 0
        self.on_note: Callable[[float, str], None] = lambda _at, _text: None

    @property
    def elapsed(self) -> float:
        """Seconds since the shop opened."""
        return time.time() - self.started

    def open(self) -> None:
        """The clock starts now."""
        self.started = time.time()

    def note(self, text: str) -> None:
        """Something has happened."""
        self.notes.append((self.elapsed, text))
        self.on_note(*self.notes[-1])

    def lanes_of(self, pod: Pod) -> int:
        """Lanes in the pod's name at the last look."""
        return self.lanes.get(pod.label, 0)

    async def watch(self) -> None:
        """Look into the database from time to time, as an operator would, until cancelled."""
        connection: asyncpg.Connection[Any] = await asyncpg.connect(self.stage.owner_dsn)
        try:
            while True:
                await self._look(connection)
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            await connection.close(timeout=2)

    async def _look(self, connection: asyncpg.Connection[Any]) -> None:
        self.lanes = {row["owner"]: row["lanes"] for row in await connection.fetch(_LANES)}
        self.outbox_rows = await connection.fetchval("SELECT count(*) FROM outbox")

    async def truth(self) -> set[str]:
        """Ids of all events whose orders are in the database, and a last look at the outbox."""
        connection: asyncpg.Connection[Any] = await asyncpg.connect(self.stage.owner_dsn)
        try:
            await self._look(connection)
            return {row["event"] for row in await connection.fetch(_EVENTS)}
        finally:
            await connection.close(timeout=2)
