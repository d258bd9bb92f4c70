"""What every session of the relay sets, and what PostgreSQL's errors mean to it.

Kept apart from the pool because the sessions behind a transaction pooler cannot keep settings: there
they are set again, locally, by the first statement of each transaction.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import asyncpg

from relay.errors import InvalidConfig, PermissionMissing, RelayError, SchemaMismatch, SourceUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["IDENTITY", "SETTINGS", "translated"]

SETTINGS: Final = {
    # The hot queries are index range scans whatever stale statistics say (tests/integration/test_plans.py).
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "jit": "off",
    # The same few statements all day, and one good plan for each: planning anew costs as much as a small read.
    "plan_cache_mode": "force_generic_plan",
    # A settle or a park that was acknowledged survives a crash; it need not wait for a standby.
    "synchronous_commit": "local",
    # A pod that is frozen inside a transaction must not keep lanes locked.
    "idle_in_transaction_session_timeout": "5s",
    "default_transaction_isolation": "read committed",
}

IDENTITY: Final = "extract(epoch FROM pg_postmaster_start_time())::text || '/' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)"
"""Incarnation of the server: start time and timeline. It fails on a standby, as it should."""

_AGAIN: Final = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the server said goodbye to an idle connection, and its end has not come yet
    asyncpg.InvalidCachedStatementError,  # somebody altered a table (FIELD.md B16): the next call prepares anew
    asyncpg.OutdatedSchemaCacheError,
    asyncpg.ReadOnlySQLTransactionError,  # a demoted primary (FIELD.md B6)
    asyncpg.TransactionRollbackError,  # deadlock, serialization
    asyncpg.OperatorInterventionError,  # shutdown, crash, cancelled, cannot connect now
    asyncpg.InsufficientResourcesError,
    asyncpg.LockNotAvailableError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.ObjectNotInPrerequisiteStateError,  # recovery is in progress
    asyncpg.InternalServerError,
    asyncpg.exceptions.PostgresSystemError,
    asyncpg.exceptions.TargetServerAttributeNotMatched,  # only standbys answer, for now
    asyncpg.exceptions.ProtocolViolationError,  # a pooler without a server
    OSError,
    TimeoutError,
)


@contextmanager
def translated() -> Iterator[None]:
    """Turn asyncpg's errors into ours. What it does not know passes through and stops the relay."""
    try:
        yield
    except RelayError:
        raise
    except asyncpg.InsufficientPrivilegeError as error:
        raise PermissionMissing(str(error), hint="`relay migrate --roles relay=NAME` prints the grants") from error
    except (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError, asyncpg.UndefinedFunctionError) as error:
        raise SchemaMismatch(str(error), hint="run `relay migrate`, or correct database.schema and table") from error
    except asyncpg.InvalidSchemaNameError as error:
        raise SchemaMismatch(str(error), hint="run `relay migrate`, or correct database.schema") from error
    except asyncpg.InvalidCatalogNameError as error:
        raise InvalidConfig(str(error), hint="create the database, or correct database.dsn") from error
    except asyncpg.InvalidAuthorizationSpecificationError as error:
        raise PermissionMissing(
            f"PostgreSQL refused the login: {error}", hint="check user and password in database.dsn, and pg_hba.conf"
        ) from error
    except _AGAIN as error:
        raise SourceUnavailable(f"{type(error).__name__}: {error}") from error
