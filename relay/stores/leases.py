"""Ownership of lanes on PostgreSQL (PROTOCOLS.md rules 1 to 3).

A pod lives while its heartbeat has not expired *and*, if it has a direct session, that session still
holds its advisory lock: a killed pod's lock is gone at once, so its lanes are free within a second
instead of a whole ttl.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from relay.database.session import IDENTITY
from relay.store import Membership
from relay.types import Lease

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from relay.database.names import Names
    from relay.database.pool import Pool

__all__ = ["PostgresLeases"]

# Sessions' locks are listed by two halves of the bigint key.
_LIVE: Final = """
SELECT m.pod FROM {member} m
 WHERE m.expires_at > clock_timestamp()
   AND (m.session_key IS NULL OR EXISTS (
        SELECT FROM pg_locks k
         WHERE k.locktype = 'advisory' AND k.objsubid = 1 AND k.granted
           AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
           AND (k.classid::bigint << 32 | k.objid::bigint) = m.session_key))
"""

_RENEW: Final = """
INSERT INTO {member} (pod, session_key, expires_at, version)
VALUES ($1, $2, clock_timestamp() + make_interval(secs => $3), $4)
    ON CONFLICT (pod) DO UPDATE SET session_key = $2, expires_at = excluded.expires_at, version = $4
"""

_LOOK: Final = f"""
SELECT array(({_LIVE})) AS members,
       array(SELECT lane FROM {{lease}} ORDER BY lane) AS lanes,
       array(SELECT owner FROM {{lease}} ORDER BY lane) AS owners,
       array(SELECT epoch FROM {{lease}} ORDER BY lane) AS epochs
"""

# Two statements: the lanes are locked first, and whether their owners live is judged by a snapshot that is
# taken after that. In one statement a pod that joined and claimed in between would look dead.
_LOCK_FREE: Final = f"""
SELECT lane FROM {{lease}}
 WHERE (owner IS NULL OR owner NOT IN ({_LIVE}) OR owner = $1) AND lane <> ALL($2::smallint[])
 ORDER BY lane LIMIT $3 FOR UPDATE SKIP LOCKED
"""

_CLAIM: Final = f"""
UPDATE {{lease}} SET owner = $1, epoch = epoch + 1, claimed_at = clock_timestamp()
 WHERE lane = ANY($2::smallint[]) AND (owner IS NULL OR owner NOT IN ({_LIVE}) OR owner = $1)
RETURNING lane, epoch, ({IDENTITY}) AS server
"""

_RELEASE: Final = """
UPDATE {lease} l SET owner = NULL
  FROM unnest($2::smallint[], $3::bigint[]) AS r (lane, epoch)
 WHERE l.lane = r.lane AND l.epoch = r.epoch AND l.owner = $1
"""

_RELEASE_ALL: Final = "UPDATE {lease} SET owner = NULL WHERE owner = $1"

_LEAVE: Final = "DELETE FROM {member} WHERE pod = $1 OR expires_at < clock_timestamp() - interval '1 day'"


class PostgresLeases:
    """`relay.store.LeaseStore` for one pod. `session_key` is the advisory lock that the pod's session holds now."""

    def __init__(self, pool: Pool, names: Names, pod: str, session_key: Callable[[], int | None], version: str) -> None:
        self._pool, self._pod, self._session_key, self._version = pool, pod, session_key, version
        self._renew, self._look = names.format(_RENEW), names.format(_LOOK)
        self._lock_free, self._claim = names.format(_LOCK_FREE), names.format(_CLAIM)
        self._release, self._release_all = names.format(_RELEASE), names.format(_RELEASE_ALL)
        self._leave = names.format(_LEAVE)

    async def renew(self, ttl_seconds: float) -> None:
        """Write the heartbeat."""
        await self._pool.fetch(self._renew, self._pod, self._session_key(), ttl_seconds, self._version)

    async def look(self) -> Membership:
        """Read members and lanes."""
        (row,) = await self._pool.fetch(self._look)
        owners = zip(row["owners"], row["epochs"], strict=True)
        return Membership(frozenset(row["members"]), dict(zip(row["lanes"], owners, strict=True)))

    async def claim(self, count: int, owned: Collection[int]) -> Sequence[Lease]:
        """Take up to `count` lanes that nobody living owns."""
        async with self._pool.transaction() as connection:
            free = await connection.fetch(self._lock_free, self._pod, list(owned), count)
            if not free:
                return []
            rows = await connection.fetch(self._claim, self._pod, [row["lane"] for row in free])
        return [Lease(row["lane"], row["epoch"], row["server"]) for row in rows]

    async def release(self, leases: Iterable[Lease]) -> None:
        """Give lanes up, unless somebody has claimed them since."""
        given = list(leases)
        await self._pool.fetch(
            self._release, self._pod, [lease.lane for lease in given], [lease.epoch for lease in given]
        )

    async def leave(self) -> None:
        """Give everything up and remove the heartbeat, and those of pods that never came back."""
        async with self._pool.transaction() as connection:
            await connection.execute(self._release_all, self._pod)
            await connection.execute(self._leave, self._pod)
