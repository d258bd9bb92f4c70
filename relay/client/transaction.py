"""Is this connection inside a transaction? The question that decides whether an outbox keeps its promise.

An event that commits by itself can exist without the change it reports, or the other way round.
"""

from __future__ import annotations

import inspect
from typing import Any, Final, Literal

from relay.errors import RelayError

__all__ = ["NotInTransaction", "driver", "require"]

_IDLE: Final = 0
"""PQTRANS_IDLE of libpq."""

Driver = Literal["asyncpg", "psycopg async", "psycopg"]


class NotInTransaction(RelayError):
    """The event would have been committed by itself."""


def driver(connection: Any) -> Driver:
    """Which driver the connection belongs to, by what it offers: neither has to be installed.

    Raises `TypeError` for anything else, for example a SQLAlchemy connection (pass its driver connection).
    """
    if hasattr(connection, "is_in_transaction") and hasattr(connection, "execute"):
        return "asyncpg"
    if hasattr(connection, "pgconn") and hasattr(connection, "autocommit"):
        return "psycopg async" if inspect.iscoroutinefunction(connection.execute) else "psycopg"
    raise TypeError(
        f"{type(connection).__module__}.{type(connection).__qualname__} is no connection of asyncpg or psycopg 3"
    )


def require(connection: Any) -> None:
    """Raises `NotInTransaction` if a statement on `connection` would be committed by itself.

    psycopg without autocommit always passes: its next statement opens the transaction that the caller commits.
    """
    if driver(connection) == "asyncpg":
        inside, advice = connection.is_in_transaction(), "async with connection.transaction():"
    else:
        # Idle is the only status outside a transaction; a pipeline that has sent its BEGIN counts as active.
        inside = not connection.autocommit or connection.info.transaction_status != _IDLE
        advice = "with connection.transaction():"
    if not inside:
        raise NotInTransaction(
            "the event would be committed by itself, apart from the change it reports: enqueue it inside the "
            f"transaction (`{advice}`), or pass allow_autocommit=True"
        )
