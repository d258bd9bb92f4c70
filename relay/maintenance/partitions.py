"""Partitions of a partitioned outbox: made weeks ahead, so that a stopped relay never stops producers.

There is no DEFAULT partition (attaching beside one scans it under a lock), so a row that no range takes would
be an error of the insert: ranges have no gaps from now on, and `stored_at` is the server's clock, which
applications cannot set. The work itself is the SQL function of migration 0004, owned by the outbox's owner.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

import asyncpg

from relay.errors import PermissionMissing, SchemaMismatch, SourceUnavailable
from relay.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from relay.database.names import Names

__all__ = ["Partition", "ensure_ahead", "keep_ahead", "list_partitions"]

_INTERVAL_SECONDS: Final = 6 * 3600.0
_AGAIN_SECONDS: Final = 60.0

_log = get_logger(__name__)

AHEAD: Final = timedelta(weeks=8)
"""How long the relay may be away before producers would notice."""

_STEPS: Final = {"day": timedelta(days=1), "week": timedelta(days=7)}

_LIST: Final = r"""
SELECT c.relname AS name,
       substring(pg_get_expr(c.relpartbound, c.oid) FROM $re$ FROM \('([^']+)'\)$re$)::timestamptz AS lower,
       substring(pg_get_expr(c.relpartbound, c.oid) FROM $re$ TO \('([^']+)'\)$re$)::timestamptz AS upper,
       i.inhdetachpending AS detach_pending
  FROM pg_inherits i
  JOIN pg_class c ON c.oid = i.inhrelid
  JOIN pg_class parent ON parent.oid = i.inhparent
  JOIN pg_namespace n ON n.oid = parent.relnamespace
 WHERE n.nspname = {schema_name} AND parent.relname = {outbox_name}
 ORDER BY lower NULLS FIRST
"""


@dataclass(frozen=True)
class Partition:
    """One attached partition: rows with `lower <= stored_at < upper`; None is unbounded (or a DEFAULT, not ours)."""

    name: str
    """Plain table name, in the schema of the outbox (or wherever an operator made it)."""
    lower: datetime | None
    upper: datetime | None
    detach_pending: bool
    """A DETACH CONCURRENTLY is under way or was interrupted: inserts into the range fail."""


async def ensure_ahead(
    connection: asyncpg.Connection[Any],
    names: Names,
    *,
    step: Literal["day", "week"] = "week",
    ahead: timedelta = AHEAD,
) -> Sequence[str]:
    """Makes the partitions that are missing until now + `ahead`; quoted names of the new ones, oldest first.

    Cheap when nothing is missing, and safe from any number of pods at once: one does it, the others
    return at once. Blocks no insert. `step` may change; the next ranges follow the last one without a gap.
    Raises `PermissionMissing`, `SchemaMismatch` (not partitioned) and `asyncpg.LockNotAvailableError` (a
    DETACH or VACUUM of the parent held it for 5 s: try again later).
    """
    query = names.format("SELECT {ensure_partitions}($1::interval, $2::interval)")
    try:
        async with connection.transaction():
            return [row[0] for row in await connection.fetch(query, _STEPS[step], ahead)]
    except asyncpg.UndefinedFunctionError as error:
        raise SchemaMismatch(f"{names.outbox} is not partitioned", hint="set database.partitioned = false") from error
    except asyncpg.InsufficientPrivilegeError as error:
        raise PermissionMissing(
            f"{error}",
            hint=names.format(
                "GRANT EXECUTE ON FUNCTION {ensure_partitions}(interval, interval) TO <role of the relay>"
            ),
        ) from error


async def list_partitions(connection: asyncpg.Connection[Any], names: Names) -> Sequence[Partition]:
    """The attached partitions by range; empty for a plain outbox. Needs no rights on them."""
    return [Partition(**dict(row)) for row in await connection.fetch(names.format(_LIST))]


async def keep_ahead(
    acquire: Callable[[], AbstractAsyncContextManager[Any]],
    names: Names,
    *,
    step: Literal["day", "week"],
    ahead: timedelta,
) -> None:
    """Make partitions ahead of time until cancelled: now, and every few hours. Any number of pods may do it."""
    while True:
        try:
            async with acquire() as connection:
                made = await ensure_ahead(connection, names, step=step, ahead=ahead)
            if made:
                _log.info("partitions made", names=made)
        except (SourceUnavailable, asyncpg.LockNotAvailableError) as error:
            _log.warning("partitions not made, trying again", error=str(error))
            await asyncio.sleep(_AGAIN_SECONDS)
            continue
        await asyncio.sleep(_INTERVAL_SECONDS)
