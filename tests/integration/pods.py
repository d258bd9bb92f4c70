"""The parts of one pod on a test's outbox, each as the service makes it, without the service around them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import asyncpg

from relay.config import Polling
from relay.database.pool import Pool
from relay.sources.polling.contracts import Cursor
from relay.sources.polling.outbox import PostgresOutbox
from relay.sources.polling.source import PollingSource
from relay.stores.leases import PostgresLeases
from relay.stores.outbox_rows import PostgresSettler
from relay.stores.parking import PostgresParking
from relay.telemetry.metrics import Metrics
from relay.types import LANES, Lease, Message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from relay.config import Database
    from relay.sources.polling.contracts import Bell
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


class Timer:
    """A bell that never rings: the tests do not run the source's loop."""

    async def busy(self) -> None: ...

    async def sleep(self) -> bool:
        return False

    async def wake(self) -> None: ...

    async def wait(self, seconds: float) -> str:
        return "timeout"

    def ring(self) -> None: ...


class Sink:
    """Stands for the pipeline: takes everything, and settles it at once unless `settles` is off."""

    def __init__(self, one: Pod, *, settles: bool = True) -> None:
        self.pod, self.settles = one, settles
        self.source: PollingSource | None = None
        self.taken: list[int] = []
        self.arrived = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def room(self) -> tuple[int, int]:
        return 10_000, 32 * 1024 * 1024

    def submit(self, messages: Sequence[Message]) -> None:
        if messages:
            self.taken += [message.seq for message in messages]
            task = asyncio.create_task(self._settle(messages))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _settle(self, messages: Sequence[Message]) -> None:
        if self.settles:
            await self.pod.settler.settle(messages)
            assert self.source is not None
            self.source.done(messages)
        async with self.arrived:
            self.arrived.notify_all()

    async def settled(self) -> None:
        """Everything that was taken is settled."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    async def has(self, seq: int, seconds: float = 10.0) -> None:
        """Wait until this event was taken."""
        async with asyncio.timeout(seconds), self.arrived:
            await self.arrived.wait_for(lambda: seq in self.taken)

    async def adopt(self, leases: Sequence[Lease]) -> None: ...

    async def drained(self, lease: Lease) -> None: ...

    def abandon(self, lease: Lease) -> None: ...


def source_of(one: Pod, bell: Bell, *, settles: bool = True, **options: Any) -> tuple[PollingSource, Sink, Metrics]:
    """A source over a pod's reader that is not running yet; the sweep comes once an hour."""
    polling = Polling.model_validate({"sweep_interval_seconds": 3600.0, **options})
    metrics, sink = Metrics(), Sink(one, settles=settles)
    source = PollingSource(one.reader, bell, polling, metrics)
    source.attach(sink)
    sink.source = source
    return source, sink, metrics
