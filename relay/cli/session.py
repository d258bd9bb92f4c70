"""One connection of an operator's command, and what its errors mean: they name host and port, never a password."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlsplit

import asyncpg

from relay.errors import InvalidConfig, PermissionMissing, RelayError, SchemaMismatch, SourceUnavailable, StopError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from relay.config import Database

__all__ = ["address", "connect", "explained"]

_STATEMENT_SECONDS: Final = 30.0

_LOGIN: Final = "Check user and password in database.dsn, and pg_hba.conf of the server."
_GRANTS: Final = "`relay migrate --roles relay=NAME` prints the grants; run them as the owner of the tables."
_TABLES: Final = "Run `relay migrate`, or check database.schema and database.table."
_DSN: Final = "Write it as postgresql://user:password@host:5432/name."
_REACH: Final = "Check that it runs, host and port in database.dsn, and firewalls in between."


@asynccontextmanager
async def connect(database: Database, *, direct: bool = False) -> AsyncIterator[asyncpg.Connection[Any]]:
    """A connection to `dsn` (or `direct_dsn` when there is one and `direct`); works through a transaction pooler.

    Errors of the whole block are translated. Raises SourceUnavailable, PermissionMissing, SchemaMismatch,
    InvalidConfig.
    """
    secret = (database.direct_dsn or database.dsn) if direct else database.dsn
    dsn = secret.get_secret_value()
    with_timeout = min(database.statement_timeout_seconds, _STATEMENT_SECONDS)
    try:
        connection = await asyncpg.connect(
            dsn,
            timeout=database.connect_timeout_seconds,
            command_timeout=with_timeout,
            statement_cache_size=0,  # named prepared statements do not survive a transaction pooler
            server_settings={"application_name": "outbox-relay cli"},
        )
    except Exception as error:  # noqa: BLE001  # sorted right here
        raise explained(error, dsn) from None
    try:
        yield connection
    except RelayError:
        raise
    except Exception as error:
        raise explained(error, dsn) from error
    finally:
        await connection.close(timeout=2)


def address(dsn: str) -> str:
    """`host:port/database` of a DSN, for messages."""
    url = urlsplit(dsn)
    hosts = url.netloc.rpartition("@")[2] or ",".join(parse_qs(url.query).get("host", [])) or "localhost"
    named = ",".join(
        host if ":" in host.rpartition("]")[2] or "/" in host else f"{host}:5432" for host in hosts.split(",")
    )
    return f"{named}{url.path}"


def explained(error: Exception, dsn: str) -> Exception:
    """What an error of the driver means to an operator; anything unknown is returned as it is."""
    where = address(dsn)
    return _needs_a_person(error, where) or _unavailable(error, where) or error


def _needs_a_person(error: Exception, where: str) -> StopError | None:
    match error:
        case asyncpg.InvalidCatalogNameError():
            return InvalidConfig(f"{where}: {error}", hint="Create the database, or correct database.dsn.")
        case asyncpg.InvalidAuthorizationSpecificationError():
            return PermissionMissing(f"PostgreSQL at {where} refused the login: {error}", hint=_LOGIN)
        case asyncpg.InsufficientPrivilegeError():
            return PermissionMissing(f"PostgreSQL at {where}: {error}", hint=_GRANTS)
        case asyncpg.UndefinedTableError() | asyncpg.UndefinedColumnError() | asyncpg.InvalidSchemaNameError():
            return SchemaMismatch(f"PostgreSQL at {where}: {error}", hint=_TABLES)
        case asyncpg.ClientConfigurationError() | ValueError():
            return InvalidConfig("the driver cannot use database.dsn", hint=_DSN)
    return None


def _unavailable(error: Exception, where: str) -> SourceUnavailable | None:
    match error:
        case TimeoutError():
            return SourceUnavailable(f"PostgreSQL at {where} did not answer in time: is it reachable from here?")
        case OSError() | asyncpg.PostgresConnectionError() | asyncpg.CannotConnectNowError():
            return SourceUnavailable(f"cannot reach PostgreSQL at {where}: {error}. {_REACH}")
        case asyncpg.PostgresError() | asyncpg.InterfaceError():
            return SourceUnavailable(f"PostgreSQL at {where}: {error}")
    return None
