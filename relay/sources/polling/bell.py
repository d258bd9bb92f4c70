"""Sleep and wake-up of the cluster on PostgreSQL: one advisory lock, one channel, one direct session a pod.

PROTOCOLS.md rule 9. Producers' trigger tries K shared and notifies only if it cannot: while somebody
holds K exclusively. A pod that has work holds K shared in its session, so the exclusive lock (the
*doorman's*) can be had only while no pod has work and no producer is between its insert and its
commit. Everybody listens all the time, and a pod that finds K held exclusively reads once more before
it relies on a notification: whoever committed before the lock was taken is visible to that read,
whoever inserts after it notifies. The lock is only ever tried, never waited for.

The same session holds the advisory lock that shows that this pod lives (relay.stores.leases).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from relay.database.pool import connect
from relay.database.session import translated
from relay.errors import RelayError
from relay.retry import Backoff
from relay.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.config import Database
    from relay.database.names import Names

__all__ = ["PostgresBell"]

_log = get_logger(__name__)

_CALL_SECONDS: Final = 5.0
"""A session that does not answer within it is dead to us: nothing that we ask of it can wait."""

_HELD: Final = """
SELECT EXISTS (SELECT FROM pg_locks
 WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND granted AND objsubid = 1
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND (classid::bigint << 32 | objid::bigint) = $1)
"""


class PostgresBell:
    """`relay.sources.polling.contracts.Bell`. `run` keeps its session; `direct` False: there is none, and no sleep."""

    def __init__(self, database: Database, names: Names, pod: str, *, direct: bool, application: str) -> None:
        self._database, self._names, self._application = database, names, application
        self._direct = direct
        self._session_lock = names.advisory_key(f"pod {pod}")
        self._connection: asyncpg.Connection[Any] | None = None
        self._lost = asyncio.Event()
        self._rung = asyncio.Event()
        self._cause = "ring"
        self._shared = self._exclusive = False
        self._lives = self._owes_wake = False
        self._calls = asyncio.Lock()
        self._backoff = Backoff(0.1, 5.0, random.Random())  # noqa: S311  # jitter
        self.on_session: Callable[[], None] = lambda: None
        """Called when the session was made or lost: the heartbeat must say so at once."""

    @property
    def session_key(self) -> int | None:
        """The lock that shows that this pod lives, while its session holds it.

        None also while an older session of ours still has it, cut off but not noticed by the server: when
        that one ends, so does the lock, and everybody would take this pod for dead.
        """
        return self._session_lock if self._connection is not None and self._lives else None

    async def run(self) -> None:
        """Keep the session until cancelled."""
        if not self._direct:
            await asyncio.Event().wait()
        failures = 0
        while True:
            try:
                await self._connect()
            except RelayError as error:
                failures += 1
                if failures == 1:
                    _log.warning("no direct session, polling without sleep meanwhile", error=str(error))
                await asyncio.sleep(self._backoff.delay(failures))
                continue
            failures = 0
            self._ring("reconnect")  # notifications may have been missed
            await self._lost.wait()
            _log.warning("direct session lost, listening again soon")
            self.on_session()

    async def close(self) -> None:
        """Drop the session and with it all locks."""
        if (connection := self._connection) is not None:
            self._forget(connection)
            connection.terminate()

    # -- the source's side -----------------------------------------------------------------------

    def ring(self) -> None:
        """End a wait."""
        self._ring("ring")

    async def wait(self, seconds: float) -> str:
        """Wait for a notification, a ring, or the end of the time."""
        try:
            async with asyncio.timeout(seconds):
                await self._rung.wait()
        except TimeoutError:
            self._cause = "timeout"
        self._rung.clear()
        return self._cause

    async def busy(self) -> None:
        """Hold K shared. Fails silently while the doorman has not heard of the event yet; tried again next time."""
        if not self._shared and not self._exclusive:
            self._shared = bool(await self._call("SELECT pg_try_advisory_lock_shared($1)", self._names.lock_key))

    async def sleep(self) -> bool:
        """True if K is held exclusively: by this pod, or by another one's session."""
        if self._exclusive:
            return bool(await self._call("SELECT true"))
        if self._shared:
            self._shared = not await self._call("SELECT pg_advisory_unlock_shared($1)", self._names.lock_key)
        if await self._call("SELECT pg_try_advisory_lock($1)", self._names.lock_key):
            self._exclusive, self._cause = True, "sleep"
            return True
        return bool(await self._call(_HELD, self._names.lock_key))

    async def wake(self) -> None:
        """Release K if this pod holds it. If nobody notified, tell the others that producers are silent from now on."""
        if not self._exclusive:
            return
        if self._cause != "notify":
            await self._call("SELECT pg_notify($1, '')::text", self._names.channel)
        await self._call("SELECT pg_advisory_unlock($1)", self._names.lock_key)
        self._exclusive = False

    # -- the session -----------------------------------------------------------------------------

    async def _connect(self) -> None:
        dsn = (self._database.direct_dsn or self._database.dsn).get_secret_value()
        connection = await connect(dsn, self._database, application=f"{self._application} bell")
        try:
            with translated():
                await connection.execute("SET enable_seqscan = on")  # a catalog view is read whole
                await connection.add_listener(self._names.channel, self._heard)
                self._lives = await connection.fetchval("SELECT pg_try_advisory_lock($1)", self._session_lock)
                if self._owes_wake:
                    await connection.fetchval("SELECT pg_notify($1, '')::text", self._names.channel)
        except BaseException:
            connection.terminate()
            raise
        self._owes_wake = False
        self._lost.clear()
        connection.add_termination_listener(self._forget)
        self._connection = connection
        self.on_session()

    def _heard(self, *_args: object) -> None:
        self._ring("notify")

    def _ring(self, cause: str) -> None:
        self._cause = cause
        self._rung.set()

    def _forget(self, connection: object) -> None:
        if connection is self._connection:
            self._connection = None
            # K went with the doorman's session, and whoever relies on it sleeps while producers are silent.
            self._owes_wake |= self._exclusive
            self._shared = self._exclusive = False
            self._lost.set()
            self._ring("reconnect")

    async def _call(self, sql: str, *args: object) -> Any:
        """One answer of the session; None without a session, or when it does not answer."""
        async with self._calls:
            if (connection := self._connection) is None:
                return None
            try:
                return await connection.fetchval(sql, *args, timeout=_CALL_SECONDS)
            except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
                _log.warning("direct session does not answer", error=repr(error)[:200])
                self._forget(connection)
                with contextlib.suppress(Exception):
                    connection.terminate()
                return None
