"""Settling rows of the outbox: `delete` them, or `keep` them with `published_at` set.

A number means something only on the server that gave it out: after a promotion another event may
have it. So every settle names the incarnation that the rows were read from, and does nothing elsewhere.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal

from relay.database.session import IDENTITY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.database.names import Names
    from relay.database.pool import Connection, Pool
    from relay.types import Message

__all__ = ["PostgresSettler"]

_LEASE: Final = attrgetter("lease")
_SEQ: Final = attrgetter("seq")
_STORED_AT: Final = attrgetter("stored_at")

_DELETE: Final = "DELETE FROM {outbox}"
_KEEP: Final = "UPDATE {outbox} SET published_at = clock_timestamp()"
# "Not settled" is written so that the index of the pending rows does not match: with statistics of an empty table the
# planner takes it, and looks through all of it for each batch. The identity is a sub-select without a reference to the
# row: evaluated once for the statement.
_WHERE: Final = f"""
 WHERE seq = ANY($1::text::bigint[]) AND coalesce(published_at, 'infinity') = 'infinity' AND (SELECT {IDENTITY}) = $2
"""
# stored_at is the partition key: without the bounds every partition would be searched for every number.
_PRUNE: Final = " AND stored_at >= $3 AND stored_at <= $4"


class PostgresSettler:
    """`relay.store.Settler`."""

    def __init__(self, pool: Pool, names: Names, settle: Literal["delete", "keep"], *, partitioned: bool) -> None:
        self._pool, self._partitioned = pool, partitioned
        how = _DELETE if settle == "delete" else _KEEP
        self._sql = names.format(how + _WHERE + (_PRUNE if partitioned else ""))

    async def settle(self, messages: Sequence[Message]) -> None:
        """Settle in one transaction for each server that the messages were read from: in practice one."""
        for args in self._arguments(messages):
            await self._pool.fetch(self._sql, *args)

    async def settle_within(self, connection: Connection, messages: Sequence[Message]) -> None:
        """Settle inside the transaction of a decision."""
        for args in self._arguments(messages):
            await connection.execute(self._sql, *args)

    def _arguments(self, messages: Sequence[Message]) -> list[tuple[Any, ...]]:
        servers = {lease.server for lease in set(map(_LEASE, messages)) if lease is not None}
        by_server = {
            server: [m for m in messages if m.lease and m.lease.server == server] if len(servers) > 1 else messages
            for server in servers
        }
        return [(_array(some), server, *self._bounds(some)) for server, some in by_server.items()]

    def _bounds(self, messages: Sequence[Message]) -> tuple[int, ...]:
        if not self._partitioned:
            return ()
        moments = list(map(_STORED_AT, messages))
        return min(moments), max(moments)


def _array(messages: Sequence[Message]) -> str:
    """Numbers as PostgreSQL's own text of an array: asyncpg's encoder asks two questions about each element."""
    return "{" + ",".join(map(str, sorted(map(_SEQ, messages)))) + "}"
