"""`relay bench producers`: what the outbox's trigger and a working relay cost the applications.

Sixteen clients, one row in each transaction, as fast as they can. Cases take turns with the plain table, and
a ratio is between neighbours of one round. Locks of the doorman (PROTOCOLS.md 9) are held by a session of ours,
so that each state of the relay lasts for the whole case.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from relay.bench.accounts import ended_children_seconds, postmaster_of
from relay.bench.brokers import prepare
from relay.bench.clients import commits
from relay.bench.contender import relay
from relay.bench.databases import connected, scratch
from relay.bench.figures import median_of, paired_ratio
from relay.bench.ports import free_port
from relay.bench.report import Report, Table
from relay.database.names import Names

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import asyncpg

    from relay.bench.rig import Rig

    Case = Callable[[Rig, str, asyncpg.Connection[Any], AsyncExitStack], Awaitable[None]]

__all__ = ["producers"]

_PLAIN: Final = "no trigger"
_COLUMNS = ("case", "commits/s", "of no trigger", "PostgreSQL CPU µs/commit", "of no trigger's")
_NOTIFY_ALWAYS: Final = """
CREATE FUNCTION bench_notify() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_notify('bench', ''); RETURN NULL; END $$;
CREATE TRIGGER bench_notify BEFORE INSERT ON outbox FOR EACH STATEMENT EXECUTE FUNCTION bench_notify()
"""


@dataclass(frozen=True, slots=True)
class _Result:
    per_second: float
    cpu_us: float


async def producers(rig: Rig, *, clients: int, seconds: float, rounds: int) -> Report:
    """Interleaved rounds of all cases; medians, and ratios within the rounds."""
    found: dict[str, list[_Result]] = {name: [] for name in _CASES}
    for number in range(rounds):
        for name in list(_CASES)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(await _measure(rig, _CASES[name], clients, seconds))
    plain = found[_PLAIN]
    rows = tuple(_row(name, results, plain) for name, results in found.items())
    title = f"{clients} clients, one row in each transaction, {seconds:g} s, {rounds} rounds"
    note = "The server's CPU holds all its sessions: beside a draining relay also the relay's own."
    return rig.report("producers", Table(title, _COLUMNS, rows, bars="of no trigger", note=note))


async def _measure(rig: Rig, case: Case, clients: int, seconds: float) -> _Result:
    await prepare(rig.target)
    async with scratch(rig.server) as dsn, connected(dsn) as connection:
        postmaster = await postmaster_of(connection)
        async with AsyncExitStack() as stack:
            await case(rig, dsn, connection, stack)
            before = ended_children_seconds(postmaster)
            done = await commits(dsn, rig.target.topic, clients, seconds)
        # Everything that the case started has ended, so its CPU time is with the postmaster.
        await asyncio.sleep(0.2)
        used = ended_children_seconds(postmaster) - before
    return _Result(done.per_second, used * 1e6 / done.count)


# -- the cases -----------------------------------------------------------------------------------


async def _no_trigger(_rig: Rig, _dsn: str, connection: asyncpg.Connection[Any], _stack: AsyncExitStack) -> None:
    await connection.execute("ALTER TABLE outbox DISABLE TRIGGER USER")


async def _stopped(_rig: Rig, _dsn: str, _connection: asyncpg.Connection[Any], _stack: AsyncExitStack) -> None:
    """As migrated, nobody runs."""


async def _awake(_rig: Rig, dsn: str, _connection: asyncpg.Connection[Any], stack: AsyncExitStack) -> None:
    await stack.enter_async_context(_holding(dsn, "pg_advisory_lock_shared"))


async def _asleep(_rig: Rig, dsn: str, _connection: asyncpg.Connection[Any], stack: AsyncExitStack) -> None:
    await stack.enter_async_context(_holding(dsn, "pg_advisory_lock"))


async def _notify(_rig: Rig, _dsn: str, connection: asyncpg.Connection[Any], _stack: AsyncExitStack) -> None:
    await connection.execute("ALTER TABLE outbox DISABLE TRIGGER USER; " + _NOTIFY_ALWAYS)


async def _draining(rig: Rig, dsn: str, _connection: asyncpg.Connection[Any], stack: AsyncExitStack) -> None:
    running = await stack.enter_async_context(relay(dsn, rig.target, free_port()).running())
    await running.ready()


@asynccontextmanager
async def _holding(dsn: str, take: str) -> AsyncIterator[None]:
    """A session that holds the doorman's lock as a relay would."""
    async with connected(dsn) as connection:
        await connection.execute(f"LISTEN bench; SELECT {take}({Names().lock_key})")
        yield


_CASES: Final[dict[str, Case]] = {
    _PLAIN: _no_trigger,
    "trigger, relay stopped": _stopped,
    "trigger, relay awake": _awake,
    "trigger, relay asleep all the time": _asleep,
    "NOTIFY on every commit": _notify,
    "relay draining beside": _draining,
}


def _row(name: str, results: list[_Result], plain: list[_Result]) -> tuple[str | float, ...]:
    return (
        name,
        median_of(result.per_second for result in results),
        paired_ratio([result.per_second for result in results], [result.per_second for result in plain]),
        median_of(result.cpu_us for result in results),
        paired_ratio([result.cpu_us for result in results], [result.cpu_us for result in plain]),
    )
