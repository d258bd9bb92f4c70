"""The one connection of a migration, and what its errors mean to an operator."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg

from relay.errors import InvalidConfig, PermissionMissing, SourceUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from relay.config import Database

__all__ = ["connect"]


@asynccontextmanager
async def connect(database: Database) -> AsyncIterator[asyncpg.Connection[Any]]:
    """A connection to `direct_dsn` or `dsn`; it holds no session state, so a transaction pooler will do.

    Errors of the whole block are translated: `InvalidConfig` (no such database, malformed DSN),
    `PermissionMissing` (login refused, a right is missing), `SourceUnavailable` (everything else).
    """
    dsn = database.direct_dsn or database.dsn
    try:
        connection = await asyncpg.connect(
            dsn.get_secret_value(),
            timeout=database.connect_timeout_seconds,
            statement_cache_size=0,  # named prepared statements do not survive a transaction pooler
            server_settings={"application_name": "outbox-relay migrate"},
        )
    except (asyncpg.InvalidCatalogNameError, asyncpg.ClientConfigurationError, ValueError) as error:
        # From None: a malformed DSN is quoted in the original, password included.
        raise InvalidConfig(_without_secrets(error), hint="check database.dsn") from None
    except asyncpg.InvalidAuthorizationSpecificationError as error:
        raise PermissionMissing(
            f"PostgreSQL refused the login: {error}", hint="check user and password in database.dsn, and pg_hba.conf"
        ) from error
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise SourceUnavailable(f"cannot connect to PostgreSQL: {error}") from error
    try:
        yield connection
    except asyncpg.InsufficientPrivilegeError as error:
        raise PermissionMissing(
            f"{error}", hint="connect as the owner of the outbox, or grant the right: `relay migrate --roles`"
        ) from error
    except asyncpg.ReadOnlySQLTransactionError as error:
        raise SourceUnavailable("this server is a standby or read-only; database.dsn must reach the primary") from error
    except (OSError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError) as error:
        raise SourceUnavailable(f"the connection to PostgreSQL was lost: {error}") from error
    finally:
        await connection.close(timeout=database.connect_timeout_seconds)


def _without_secrets(error: Exception) -> str:
    if isinstance(error, asyncpg.PostgresError):
        return str(error)
    return "database.dsn is not a PostgreSQL URL"
