"""The parts of one pod on a test's outbox, each as the service makes it, without the service around them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import asyncpg

from relay.database.pool import Pool
from relay.sources.polling.contracts import Cursor
from relay.sources.polling.outbox import PostgresOutbox
from relay.stores.leases import PostgresLeases
from relay.stores.outbox_rows import PostgresSettler
from relay.stores.parking import PostgresParking
from relay.types import LANES, Lease, Message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from relay.config import Database
    from tests.outbox import Outbox

SINK = "main"
EVERYTHING = 1_000_000


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    """A plain connection: an application, or an operator."""
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


@dataclass
class Pod:
    """Stores and reader of one pod over one pool."""

    name: str
    outbox: Outbox
    pool: Pool
    leases: PostgresLeases
    parking: PostgresParking
    settler: PostgresSettler
    reader: PostgresOutbox
    session_key: int | None = None

    async def join(self, lanes: int = LANES) -> dict[int, Lease]:
        """Live for a minute and claim lanes, by lane."""
        await self.leases.renew(60.0)
        return {lease.lane: lease for lease in await self.leases.claim(lanes, ())}

    async def read(self, leases: Sequence[Lease], limit: int = EVERYTHING, floor: int = 0) -> list[Message]:
        """Unsettled events of these lanes in database order."""
        page = await self.reader.read([Cursor(lease, floor, limit) for lease in leases])
        return sorted((row for rows in page.rows.values() for row in rows), key=lambda row: row.seq)


@asynccontextmanager
async def pod(
    outbox: Outbox,
    name: str = "a",
    *,
    sinks: Sequence[str] = (SINK,),
    settle: Literal["delete", "keep"] = "delete",
    database: Database | None = None,
) -> AsyncIterator[Pod]:
    """A pod that has not claimed anything yet; with the relay's role unless `database` says otherwise."""
    section, names = database or outbox.database, outbox.names
    pool = Pool(section, "outbox-relay")
    await pool.open()
    try:
        settler = PostgresSettler(pool, names, settle, partitioned=section.partitioned)
        made = Pod(
            name,
            outbox,
            pool,
            PostgresLeases(pool, names, name, lambda: made.session_key, "test"),
            PostgresParking(pool, names, name, sinks, settler),
            settler,
            PostgresOutbox(pool, names, section),
        )
        yield made
    finally:
        await pool.close()


async def publish(outbox: Outbox, *events: tuple[str | None, str | None]) -> None:
    """Insert events (key, payload) as the application, in one transaction, topic `orders`."""
    async with connected(outbox.app_dsn) as app:
        await app.executemany(
            outbox.names.format("INSERT INTO {outbox} (topic, key, payload) VALUES ('orders', $1, $2)"), events
        )


def lane_of(outbox: Outbox, key: str) -> int:
    """The lane of a key."""
    return int(outbox.execute(f"SELECT (hashtextextended('{key}' COLLATE \"C\", 0) & 63)::int")[0][0])


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    """Wait for something that only the server can tell, such as a session that waits for a lock."""
    async with asyncio.timeout(20):
        while not await condition():  # noqa: ASYNC110  # it has no event that we could wait for
            await asyncio.sleep(0.005)


async def blocked(observer: asyncpg.Connection[Any]) -> bool:
    """Whether a session of this database waits for a lock."""
    return bool(
        await observer.fetchval(
            "SELECT EXISTS (SELECT FROM pg_locks k JOIN pg_stat_activity a USING (pid)"
            " WHERE NOT k.granted AND a.datname = current_database())"
        )
    )
