"""The pod's connections for statements: a small asyncpg pool that also works behind a transaction pooler.

Whether a pooler is in between is found out, not configured: behind PgBouncer the process id that the
protocol announced is not the one that the server reports. Then nothing may outlive a transaction, so
each call is an explicit transaction that starts by setting what it needs (FIELD.md B8).
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import asyncpg

from relay.database.session import SETTINGS, translated
from relay.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from relay.config import Database as Section

__all__ = ["Connection", "Pool", "connect"]

Connection: TypeAlias = "asyncpg.Connection[Any] | asyncpg.pool.PoolConnectionProxy[Any]"

_log = get_logger(__name__)

_CONNECTIONS_MAX: Final = 5
"""Reading, settling, deciding, heartbeat and a metrics query at once; idle ones are closed."""
_IDLE_SECONDS: Final = 120.0
_ROLL_BACK_SECONDS: Final = 5.0
"""A server that has just let a statement run into its timeout may be gone: ending the session rolls back as well."""
_EPOCH_US: Final = 946_684_800_000_000
"""2000-01-01, PostgreSQL's own epoch, in microseconds since the Unix epoch."""
_INFINITY: Final = 2**63 - 1


async def connect(dsn: str, section: Section, *, application: str, cache: int = 100) -> asyncpg.Connection[Any]:
    """One connection to the primary, with errors translated."""
    with translated():
        return await asyncpg.connect(dsn, **_options(dsn, section, application, cache))


def _options(dsn: str, section: Section, application: str, cache: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "timeout": section.connect_timeout_seconds,
        "command_timeout": section.statement_timeout_seconds,
        "statement_cache_size": cache,
        "server_settings": {"application_name": application},
    }
    if "target_session_attrs" not in dsn:
        options["target_session_attrs"] = "read-write"
    return options


class Pool:
    """Connections to one outbox's database. `open` before use; every error is one of `relay.errors`."""

    def __init__(self, section: Section, application: str) -> None:
        self._section, self._application = section, application
        self._pool: asyncpg.Pool[Any] | None = None
        self.pooled = False
        """True behind a transaction pooler."""
        settings = " ".join(f"SET LOCAL {name} = '{value}';" for name, value in SETTINGS.items())
        # The level by name: the default that a role may have cannot be changed for the transaction that has begun.
        self._begin = f"BEGIN ISOLATION LEVEL READ COMMITTED; {settings}"

    async def open(self) -> None:
        """Connect once, to learn about a pooler and about errors that need a person."""
        dsn = self._section.dsn.get_secret_value()
        first = await connect(dsn, self._section, application=self._application, cache=0)
        try:
            with translated():
                async with first.transaction():
                    pid = await first.fetchval("SELECT pg_backend_pid()")
            self.pooled = pid != first.get_server_pid()
        finally:
            await first.close(timeout=5)
        options = _options(dsn, self._section, self._application, 0 if self.pooled else 100)
        options.pop("timeout")
        self._pool = asyncpg.create_pool(
            dsn,
            min_size=0,
            max_size=_CONNECTIONS_MAX,
            max_inactive_connection_lifetime=_IDLE_SECONDS,
            init=self._prepare,
            reset=_keep,
            timeout=self._section.connect_timeout_seconds,
            **options,
        )
        with translated():
            await self._pool

    async def close(self) -> None:
        """Close what is idle and drop the rest."""
        if self._pool is not None:
            self._pool.terminate()

    async def fetch(self, sql: str, *args: Any) -> Sequence[asyncpg.Record]:
        """Rows of one statement in a transaction of its own."""
        async with self._use() as connection:
            if self.pooled:
                async with self._transaction(connection):
                    rows: Sequence[asyncpg.Record] = await connection.fetch(sql, *args)
            else:
                rows = await connection.fetch(sql, *args)
            return rows

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """A connection inside a transaction; committed at the end of the block, rolled back on an error."""
        async with self._use() as connection, self._transaction(connection):
            yield connection

    @asynccontextmanager
    async def _use(self) -> AsyncIterator[Connection]:
        assert self._pool is not None, "open() first"
        with translated():
            try:
                async with self._pool.acquire() as connection:
                    try:
                        yield connection
                    except asyncpg.InternalClientError:
                        connection.terminate()  # or the next call would be given the same one
                        raise
                    except asyncio.CancelledError:
                        connection.terminate()  # asyncpg would wait for the server's word on it: a stop must not
                        raise
            except (asyncpg.ReadOnlySQLTransactionError, asyncpg.ObjectNotInPrerequisiteStateError):
                # This server is not the primary any more, and neither is it for the other connections.
                await self._pool.expire_connections()
                raise

    @asynccontextmanager
    async def _transaction(self, connection: Connection) -> AsyncIterator[None]:
        try:
            await connection.execute(self._begin if self.pooled else "BEGIN")
            yield
            await connection.execute("COMMIT")
        except asyncio.CancelledError:
            raise  # in the middle of something: the connection is dropped, which rolls back as well
        except BaseException:
            await _roll_back(connection)
            raise

    async def _prepare(self, connection: Connection) -> None:
        """Settings for the session's life, and timestamps as integers: exact, infinite ones included."""
        if not self.pooled:
            await connection.execute(" ".join(f"SET {name} = '{value}';" for name, value in SETTINGS.items()))
        async with connection.transaction():
            await connection.set_type_codec(
                "timestamptz", schema="pg_catalog", format="tuple", encoder=_to_postgres, decoder=_from_postgres
            )


async def _roll_back(connection: Connection) -> None:
    """Never hides the error that led here: a connection that cannot roll back is dropped, which does the same."""
    if connection.is_closed():
        return
    try:
        async with asyncio.timeout(_ROLL_BACK_SECONDS):
            await connection.execute("ROLLBACK")
    except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError):
        connection.terminate()


async def _keep(_connection: Connection) -> None:
    """Nothing to reset: our sessions hold no state, and asyncpg's own reset costs a round trip a call."""


def _from_postgres(value: tuple[int]) -> int:
    moment = value[0]
    return moment + _EPOCH_US if -_INFINITY <= moment < _INFINITY else moment


def _to_postgres(moment: int) -> tuple[int]:
    return (moment - _EPOCH_US if -_INFINITY <= moment < _INFINITY else moment,)
