"""Applications that write to the outbox at random, and a record of what they have committed.

Each transaction holds its key's lock while it inserts and until it has noted its end, as an application holds the
lock of its aggregate: so `committed[key]` is the order in which the key's events must arrive.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

import asyncpg

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.outbox import Outbox

__all__ = ["Ledger", "Load", "insert", "skewed_id"]

_LOST: Final = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # asyncpg's word for a connection to which the server has just said goodbye
    asyncpg.OperatorInterventionError,
    OSError,
)


class _RolledBack(Exception):
    """Ends a transaction on purpose."""


def skewed_id(rng: random.Random, seconds: float = 300.0) -> str:
    """A UUIDv7 of a host whose clock is wrong by up to five minutes."""
    milliseconds = int((time.time() + rng.uniform(-seconds, seconds)) * 1000)
    number = milliseconds << 80 | 7 << 76 | rng.getrandbits(12) << 64 | 2 << 62 | rng.getrandbits(62)
    return str(uuid.UUID(int=number))


@dataclass
class Ledger:
    """What became of each event."""

    committed: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    rolled_back: set[str] = field(default_factory=set)
    late: int = 0

    @property
    def ids(self) -> set[str]:
        """Everything that must arrive."""
        return {event for events in self.committed.values() for event in events}

    def __len__(self) -> int:
        return sum(map(len, self.committed.values()))

    def __str__(self) -> str:
        return f"{len(self)} committed ({self.late} in late transactions), {len(self.rolled_back)} rolled back"


async def insert(outbox: Outbox, rows: Sequence[tuple[Any, ...]], *, one_by_one: bool = True) -> list[str]:
    """Insert (topic, key, payload[, headers]) as the application, a transaction each or one for all; their ids."""
    connection = await asyncpg.connect(outbox.app_dsn)
    sql = outbox.names.format("INSERT INTO {outbox} (id, topic, key, payload, headers) VALUES ($1, $2, $3, $4, $5)")
    ids = [skewed_id(random.Random(), 0) for _ in rows]
    arguments = [(event, *row, *(None,) * (4 - len(row))) for event, row in zip(ids, rows, strict=True)]
    try:
        if one_by_one:
            for row in arguments:
                await connection.execute(sql, *row)
        else:
            await connection.executemany(sql, arguments)
    finally:
        await connection.close()
    return ids


class Load:
    """`writers` applications at once, from `async with` to its end.

    `topics`: an event's topic is a function of its key, so that the key's order is visible in one place.
    `late_seconds`: how long some transactions wait between their insert and their commit.
    """

    def __init__(
        self,
        outbox: Outbox,
        topics: Sequence[str],
        *,
        seed: int,
        writers: int = 16,
        keys: int = 60,
        pause_seconds: float = 0.02,
        late_seconds: float = 5.0,
    ) -> None:
        self.ledger = Ledger()
        self._outbox, self._topics = outbox, topics
        self._keys = [f"{topics[0]}-{number}" for number in range(keys)]
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._seed, self._writers, self._pause, self._late = seed, writers, pause_seconds, late_seconds
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._sql = outbox.names.format(
            "INSERT INTO {outbox} (id, topic, key, payload, headers) VALUES ($1, $2, $3, $4, $5)"
        )

    async def __aenter__(self) -> Self:
        self._outbox.execute("CREATE TABLE witness (id uuid PRIMARY KEY)")
        self._outbox.execute("GRANT INSERT, SELECT ON witness TO PUBLIC")
        self._tasks = [asyncio.create_task(self._write(number)) for number in range(self._writers)]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let every open transaction end, the late ones too."""
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def _write(self, number: int) -> None:
        rng = random.Random(self._seed * 1000 + number)
        connection = await self._connect()
        try:
            while not self._stop.is_set():
                connection = await self._transaction(connection, rng)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), rng.expovariate(1 / self._pause))
        finally:
            await connection.close(timeout=5)

    async def _connect(self) -> Any:
        async with asyncio.timeout(60):
            while True:
                with suppress(*_LOST):
                    return await asyncpg.connect(self._outbox.app_dsn, timeout=5)
                await asyncio.sleep(0.05)

    async def _transaction(self, connection: Any, rng: random.Random) -> Any:
        """One transaction for one key: one to three events; a tenth rolls back, a few commit late."""
        key = rng.choice(self._keys)
        topic = self._topics[self._keys.index(key) % len(self._topics)]
        ids = [skewed_id(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        rolls_back, late = rng.random() < 0.1, rng.random() < 0.01
        async with self._locks[key]:
            try:
                async with connection.transaction():
                    rows = [(event, topic, key, f'{{"id":"{event}"}}', '{"writer":"test"}') for event in ids]
                    await connection.executemany(self._sql, rows)
                    await connection.executemany("INSERT INTO witness (id) VALUES ($1)", [(event,) for event in ids])
                    if late and self._late:
                        await asyncio.sleep(rng.uniform(0.3, 1.0) * self._late)
                    if rolls_back:
                        raise _RolledBack  # noqa: TRY301  # how a transaction block is told to roll back
            except _RolledBack:
                committed = False
            except _LOST:
                # Nobody knows whether the commit arrived; the witness of the same transaction does.
                connection = await self._connect()
                committed = await connection.fetchval("SELECT EXISTS (SELECT FROM witness WHERE id = $1)", ids[0])
            else:
                committed = True
            if committed:
                self.ledger.committed[key] += ids
                self.ledger.late += late
            else:
                self.ledger.rolled_back.update(ids)
        return connection
