"""Bringing an outbox up to date: by any number of pods at once, and never in the way of producers.

Each step is one transaction that first *tries* the migration lock and then looks at what is left to
do, so pods take turns and the later ones find nothing. The lock belongs to the transaction: it works
through a transaction pooler and cannot be left behind. A step that needs a table lock asks for a
tenth of a second only, because behind a waiting ALTER every insert waits too; then it steps back for
longer than that and tries again.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import asyncpg

from relay.database.names import Names, literal
from relay.errors import SchemaMismatch, SourceUnavailable
from relay.migrate.files import Migration, load
from relay.migrate.session import connect
from relay.migrate.state import State, read, verify
from relay.migrate.template import Options, render

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from relay.config import Database

__all__ = ["Applied", "Check", "check", "plan", "require_current", "run"]

LOCK_TIMEOUT_MS: Final = 100
"""What an insert waits at most behind one try of a step."""

_PAUSE_MIN_SECONDS: Final = 0.5
_PAUSE_MAX_SECONDS: Final = 5.0
_TURN_SECONDS: Final = 0.1

_SETTINGS: Final = f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_MS}ms';\nSET LOCAL statement_timeout = 0;\n"


_HOLDERS: Final = """
SELECT DISTINCT CASE WHEN held.pid IS NOT NULL THEN 'pid ' || held.pid
                     ELSE 'prepared transaction ' || coalesce(quote_literal(prepared.gid), '?') END AS holder
  FROM pg_locks held
  JOIN pg_class c ON c.oid = held.relation
  JOIN pg_namespace n ON n.oid = c.relnamespace
  LEFT JOIN pg_locks own ON own.virtualtransaction = held.virtualtransaction AND own.locktype = 'transactionid' AND own.granted
  LEFT JOIN pg_prepared_xacts prepared ON prepared.transaction = own.transactionid
 WHERE held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND held.granted AND n.nspname = {schema_name} AND c.relname = {outbox_name}
 ORDER BY holder
"""


@dataclass(frozen=True)
class Applied:
    """One step that this call did. `version` is None for a step that follows from an option."""

    version: int | None
    name: str


@dataclass(frozen=True)
class Check:
    """`state` is `behind` when `pending` has names, `ahead` when a newer version of this package migrated."""

    state: Literal["current", "behind", "ahead"]
    version: int
    """Newest applied migration, -1 for none."""
    latest: int
    """Newest migration that this package has."""
    pending: tuple[str, ...]


@dataclass(frozen=True)
class _Step:
    applied: Applied
    sql: str


async def run(
    database: Database, *, migrations: Sequence[Migration] | None = None, wait_seconds: float = 120.0
) -> list[Applied]:
    """Applies what is missing and returns it; nothing for an outbox that is current or newer.

    `wait_seconds` bounds the time without progress: another pod migrates, or somebody's open
    transaction holds the table. Raises `SourceUnavailable` after it (naming the transaction), and
    `SchemaMismatch`, `PermissionMissing`, `InvalidConfig` as their names say. A cancelled or failed run leaves
    whole steps only; the next run goes on from there.
    """
    names, files = Names.from_config(database), migrations if migrations is not None else load()
    async with connect(database) as connection:
        done: list[Applied] = []
        while step := await _next(connection, database, names, files, wait_seconds):
            done.append(step.applied)
        await _ensure_partitions(connection, database, names)
        return done


async def plan(database: Database, *, migrations: Sequence[Migration] | None = None) -> str:
    """The SQL that `run` would execute, as a script for psql; empty when there is nothing to do. Changes nothing."""
    names, files = Names.from_config(database), migrations if migrations is not None else load()
    async with connect(database) as connection, connection.transaction(isolation="read_committed", readonly=True):
        state = await read(connection, names)
    verify(state, database, names, files)
    scripts = [f"BEGIN;\n{_SETTINGS}{step.sql}COMMIT;\n" for step in _steps(state, database, names, files)]
    if scripts and database.partitioned:
        scripts.append(_partitions_sql(database, names))
    return "\n".join(scripts)


async def check(database: Database, *, migrations: Sequence[Migration] | None = None) -> Check:
    """Whether the outbox is current; the relay's own role may ask. Raises `SchemaMismatch` if it is not ours."""
    names, files = Names.from_config(database), migrations if migrations is not None else load()
    async with connect(database) as connection, connection.transaction(isolation="read_committed", readonly=True):
        state = await read(connection, names)
    verify(state, database, names, files)
    latest = files[-1].version
    if state.version > latest:
        return Check("ahead", state.version, latest, ())
    pending = tuple(step.applied.name for step in _steps(state, database, names, files))
    return Check("behind" if pending else "current", state.version, latest, pending)


async def require_current(database: Database) -> None:
    """Raises `SchemaMismatch` unless the outbox can be used: not behind. A newer one is fine (rolling deploys)."""
    result = await check(database)
    if result.state == "behind":
        names = Names.from_config(database)
        raise SchemaMismatch(
            f"{names.outbox} is behind: {', '.join(result.pending)} not applied", hint="run `relay migrate`"
        )


def _steps(state: State, database: Database, names: Names, migrations: Sequence[Migration]) -> Iterator[_Step]:
    """What is left to do, in order."""
    if state.version > migrations[-1].version:
        return
    options = Options(database.payload, database.partitioned, state.server_version, not state.schema_exists)
    for migration in state.pending(migrations):
        label = f"{migration.version:04d}_{migration.name}"
        record = names.format(
            "INSERT INTO {migration} (version, name, checksum) VALUES ({version}, {name}, {checksum});\n",
            version=str(migration.version),
            name=literal(migration.name),
            checksum=literal(migration.checksum),
        )
        yield _Step(Applied(migration.version, label), render(migration.template, names, options) + record)
    # The trigger is made enabled. SHARE ROW EXCLUSIVE, where DROP TRIGGER would need ACCESS EXCLUSIVE.
    enabled = True if state.notify is None else state.notify
    if enabled != database.notify:
        verb = "ENABLE" if database.notify else "DISABLE"
        yield _Step(
            Applied(None, f"notify {'on' if database.notify else 'off'}"),
            names.format(f"ALTER TABLE {{outbox}} {verb} TRIGGER {{wake_trigger}};\n"),
        )


async def _next(
    connection: asyncpg.Connection[Any],
    database: Database,
    names: Names,
    migrations: Sequence[Migration],
    wait_seconds: float,
) -> _Step | None:
    """Does the next step when it is this pod's turn; None when nothing is left."""
    deadline, pause = time.monotonic() + wait_seconds, _PAUSE_MIN_SECONDS
    while True:
        try:
            async with connection.transaction(isolation="read_committed"):
                if await _our_turn(connection, names):
                    return await _apply_first(connection, database, names, migrations)
            reason, delay = "another process is migrating it", _TURN_SECONDS
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
            reason, delay = await _blockers(connection, names), pause
            pause = min(pause * 2, _PAUSE_MAX_SECONDS)
        if time.monotonic() + delay > deadline:
            raise SourceUnavailable(f"{names.outbox} was not migrated within {wait_seconds:g} s: {reason}")
        await asyncio.sleep(delay * random.uniform(0.5, 1.5))  # noqa: S311 - jitter


async def _our_turn(connection: asyncpg.Connection[Any], names: Names) -> bool:
    key = names.advisory_key("migrate")
    return bool(await connection.fetchval(f"SELECT pg_try_advisory_xact_lock({key})"))


async def _apply_first(
    connection: asyncpg.Connection[Any], database: Database, names: Names, migrations: Sequence[Migration]
) -> _Step | None:
    state = await read(connection, names)
    verify(state, database, names, migrations)
    step = next(_steps(state, database, names, migrations), None)
    if step is not None:
        await connection.execute(_SETTINGS + step.sql)
    return step


async def _blockers(connection: asyncpg.Connection[Any], names: Names) -> str:
    """Who holds the outbox: a process id, or the name of a prepared transaction, which has no process.

    The latter keeps the virtual transaction of the session that prepared it (until a restart), so its
    name is found through the lock on its own transaction id.
    """
    async with connection.transaction(isolation="read_committed"):
        holders = await connection.fetch(names.format(_HOLDERS))
    listed = ", ".join(holder["holder"] for holder in holders)
    return f"it is locked by {listed}" if listed else "it was locked by transactions that came and went"


async def _ensure_partitions(connection: asyncpg.Connection[Any], database: Database, names: Names) -> None:
    if database.partitioned:
        async with connection.transaction(isolation="read_committed"):
            await connection.execute(_partitions_sql(database, names))


def _partitions_sql(database: Database, names: Names) -> str:
    days = {"day": 1, "week": 7}[database.partition_range]
    return names.format(
        "SELECT {ensure_partitions}(interval '{days} days', interval '{ahead} days');\n",
        days=str(days),
        ahead=str(database.partitions_ahead_days),
    )
