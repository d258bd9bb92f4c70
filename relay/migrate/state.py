"""What is in the database already, and whether it is ours: read from the catalog, judged without I/O.

Reading needs no rights on our tables beyond SELECT on the record of migrations, so the relay's own
role can check. The catalog, not a settings table, says which payload type and layout an outbox has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from relay.errors import SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from relay.config import Database
    from relay.database.names import Names
    from relay.migrate.files import Migration

__all__ = ["State", "read", "verify"]

_CATALOG: Final = """
SELECT current_setting('server_version_num')::int AS server_version,
       EXISTS (SELECT FROM pg_namespace WHERE nspname = {schema_name}) AS schema_exists,
       c.relkind IS NOT NULL AS outbox_exists,
       c.relkind = 'p' AS partitioned,
       format_type(p.atttypid, p.atttypmod) AS payload,
       t.tgenabled <> 'D' AS notify,
       -- not to_regclass(), which needs rights on the schema
       EXISTS (SELECT FROM pg_class m JOIN pg_namespace s ON s.oid = m.relnamespace
                WHERE s.nspname = {schema_name} AND m.relname = {migration_name}) AS migration_exists
  FROM (SELECT 1) one
  LEFT JOIN (pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = {schema_name})
         ON c.relname = {outbox_name}
  LEFT JOIN pg_attribute p ON p.attrelid = c.oid AND p.attname = 'payload' AND NOT p.attisdropped
  LEFT JOIN pg_trigger t ON t.tgrelid = c.oid AND t.tgname = {wake_trigger_name}
"""
_OTHER_TABLE: Final = "name another table with database.table or another schema with database.schema"


@dataclass(frozen=True)
class State:
    """The catalog's answer. `payload`, `partitioned` and `notify` are None without an outbox of ours."""

    server_version: int
    schema_exists: bool
    outbox_exists: bool
    partitioned: bool | None
    payload: str | None
    notify: bool | None
    migration_exists: bool
    applied: Mapping[int, tuple[str, str]]
    """Version to (name, checksum)."""

    @property
    def version(self) -> int:
        """The newest applied version, or -1."""
        return max(self.applied, default=-1)

    def pending(self, migrations: Sequence[Migration]) -> Sequence[Migration]:
        """Migrations that are not applied yet, in order."""
        return [migration for migration in migrations if migration.version not in self.applied]


async def read(connection: asyncpg.Connection[Any], names: Names) -> State:
    """The state of the database, inside the caller's transaction.

    Raises `SchemaMismatch` if the record of migrations is some other table.
    """
    row = await connection.fetchrow(names.format(_CATALOG))
    assert row is not None
    return State(**dict(row), applied=await _applied(connection, names) if row["migration_exists"] else {})


async def _applied(connection: asyncpg.Connection[Any], names: Names) -> dict[int, tuple[str, str]]:
    try:
        rows = await connection.fetch(names.format("SELECT version, name, checksum FROM {migration}"))
    except (asyncpg.UndefinedColumnError, asyncpg.WrongObjectTypeError) as error:
        raise SchemaMismatch(f"{names.migration} is not the record of `relay migrate`", hint=_OTHER_TABLE) from error
    return {row["version"]: (row["name"], row["checksum"]) for row in rows}


def verify(state: State, database: Database, names: Names, migrations: Sequence[Migration]) -> None:
    """Raises `SchemaMismatch` if the outbox is somebody else's, was changed, or was made with other options."""
    _verify_ours(state, names)
    _verify_checksums(state, names, migrations)
    if not state.outbox_exists:
        return
    if state.payload != database.payload:
        raise SchemaMismatch(
            f"the payload column of {names.outbox} is {state.payload}, database.payload says {database.payload}",
            hint=f'set database.payload = "{state.payload}", or name another table with database.table: '
            "the type is fixed when the outbox is created",
        )
    if state.partitioned != database.partitioned:
        actual = "partitioned" if state.partitioned else "not partitioned"
        raise SchemaMismatch(
            f"{names.outbox} is {actual}, database.partitioned says {str(database.partitioned).lower()}",
            hint=f"set database.partitioned = {str(state.partitioned).lower()}, or name another table with "
            "database.table: the layout is fixed when the outbox is created",
        )


def _verify_ours(state: State, names: Names) -> None:
    if state.outbox_exists and not state.migration_exists:
        raise SchemaMismatch(
            f"{names.outbox} exists, but {names.migration} does not: `relay migrate` did not make it",
            hint=_OTHER_TABLE,
        )
    if state.migration_exists and 1 in state.applied and not state.outbox_exists:
        raise SchemaMismatch(
            f"{names.migration} says that {names.outbox} was created, but it is gone",
            hint=f"restore it, or drop all tables of this outbox, {names.migration} last, and run `relay migrate`",
        )


def _verify_checksums(state: State, names: Names, migrations: Sequence[Migration]) -> None:
    for migration in migrations:
        name, checksum = state.applied.get(migration.version, (migration.name, migration.checksum))
        if (name, checksum) != (migration.name, migration.checksum):
            raise SchemaMismatch(
                f"{names.outbox} was made by another migration {migration.version:04d} ({name}) than this version has",
                hint="run the version of outbox-relay that made it; if that was a pre-release, create the outbox anew",
            )
