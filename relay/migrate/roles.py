"""The two roles that everything runs with, as a script for the owner of the outbox to run with psql.

The application may insert the six columns that are its own, and read nothing. The relay may read and
settle the outbox, and change its own tables; it owns nothing and needs no predefined role: `pg_locks`
and `pg_prepared_xacts`, which tell it about open writers, are readable by everybody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.database.names import BODY, Names, identifier, literal
from relay.errors import InvalidConfig

if TYPE_CHECKING:
    from relay.config import Database

__all__ = ["script"]

_CREATE = """\
DO $body$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = {role_name}) THEN
        CREATE ROLE {role} LOGIN;  -- without a password, which is yours to set
    END IF;
END $body$;
"""

_APPLICATION = """\
-- Applications: insert, and nothing else. The server's own columns stay the server's.
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT INSERT (id, topic, key, payload, headers, created_at) ON {outbox} TO {role};
GRANT EXECUTE ON FUNCTION {uuidv7}() TO {role};
GRANT EXECUTE ON FUNCTION {publish}(text, {payload_type}, text, jsonb, uuid) TO {role};
"""

_RELAY = """\
-- The relay: reads and settles the outbox, and owns the rows of its own tables.
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT SELECT, DELETE ON {outbox} TO {role};
GRANT UPDATE (published_at) ON {outbox} TO {role};
GRANT SELECT ON SEQUENCE {outbox_seq} TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON {lease}, {member}, {parked}, {dead_letter}, {checkpoint} TO {role};
GRANT USAGE, SELECT ON SEQUENCE {parked_number} TO {role};
GRANT SELECT ON {migration} TO {role};
"""

_PARTITIONS = """\
-- Partitions are made by a function of the outbox's owner. The ones that exist get the same rights as the outbox.
GRANT EXECUTE ON FUNCTION {ensure_partitions}(interval, interval) TO {role};
DO $body$ DECLARE part regclass; BEGIN
    FOR part IN SELECT inhrelid FROM pg_catalog.pg_inherits WHERE inhparent = {outbox_literal}::regclass LOOP
        EXECUTE pg_catalog.format('GRANT SELECT, DELETE ON %s TO %s', part, {role_literal});
        EXECUTE pg_catalog.format('GRANT UPDATE (published_at) ON %s TO %s', part, {role_literal});
    END LOOP;
END $body$;
"""


def script(database: Database, *, app: str | None = None, relay: str | None = None) -> str:
    """SQL that makes the roles where they are missing and grants what they need; safe to run again.

    `app` and `relay` are plain role names; a role that is None is left out. Run it after `relay migrate`, as
    the same user: who migrates owns the tables.
    """
    sections = ["BEGIN;"]
    if app is not None:
        sections.append(_fill(_CREATE + _APPLICATION, app, database))
    if relay is not None:
        sections.append(_fill(_CREATE + _RELAY + (_PARTITIONS if database.partitioned else ""), relay, database))
    return "\n".join([*sections, "COMMIT;\n"])


def _fill(sql: str, role: str, database: Database) -> str:
    if not role or BODY in role or "\0" in role:
        raise InvalidConfig(f"{role!r} is not a usable role name", hint="choose another role name")
    return Names.from_config(database).format(
        sql,
        role=identifier(role),
        role_name=literal(role),
        role_literal=literal(identifier(role)),
        payload_type=database.payload,
    )
