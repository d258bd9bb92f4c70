"""The two roles can do what they must and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import asyncpg
import psycopg
import pytest
from psycopg import errors

from relay.config import Database
from relay.errors import InvalidConfig
from relay.migrate import check, roles

if TYPE_CHECKING:
    from tests.outbox import Outbox, OutboxFactory

RELAY_TABLES = ["lease", "member", "parked", "dead_letter", "checkpoint"]


def attempt(dsn: str, query: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute(query.encode())


def test_the_application_may_insert_its_six_columns(outbox: Outbox) -> None:
    """A plain INSERT from any language, with every column that is the application's own."""
    attempt(
        outbox.app_dsn,
        outbox.names.format(
            "INSERT INTO {outbox} (id, topic, key, payload, headers, created_at)"
            """ VALUES (gen_random_uuid(), 't', 'k', '{"a":1}', '{"h":"v"}', now())"""
        ),
    )
    attempt(outbox.app_dsn, outbox.names.format("INSERT INTO {outbox} (topic) VALUES ('t')"))
    assert outbox.execute("SELECT count(*) FROM {outbox}") == [(2,)]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT id FROM {outbox}",
        "SELECT count(*) FROM {outbox}",
        "INSERT INTO {outbox} (topic) VALUES ('t') RETURNING id",
        "INSERT INTO {outbox} (topic, stored_at) VALUES ('t', now())",
        "INSERT INTO {outbox} (topic, xid) VALUES ('t', 1)",
        "INSERT INTO {outbox} (topic, published_at) VALUES ('t', now())",
        "INSERT INTO {outbox} (topic, seq) OVERRIDING SYSTEM VALUE VALUES ('t', 1)",
        "UPDATE {outbox} SET published_at = now()",
        "DELETE FROM {outbox}",
        "TRUNCATE {outbox}",
        "SELECT nextval({outbox_seq_literal})",
        "SELECT last_value FROM {outbox_seq}",
        "SELECT FROM {migration}",
        *(f"SELECT FROM {{{table}}}" for table in RELAY_TABLES),
        *(f"DELETE FROM {{{table}}}" for table in RELAY_TABLES),
    ],
)
def test_the_application_may_do_nothing_else(outbox: Outbox, query: str) -> None:
    """No reads of anything, and no way to forge what the server assigns."""
    with pytest.raises(errors.InsufficientPrivilege):
        attempt(outbox.app_dsn, outbox.names.format(query))


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM {outbox} FOR UPDATE",
        "UPDATE {outbox} SET published_at = now()",
        "DELETE FROM {outbox}",
        "SELECT last_value FROM {outbox_seq}",
        "SELECT nextval({parked_number_literal})",
        "SELECT * FROM {migration}",
        "SELECT * FROM {lease} FOR UPDATE SKIP LOCKED",
        "SELECT * FROM {lease} FOR SHARE",
        "UPDATE {lease} SET epoch = epoch + 1",
        "SELECT pid, virtualtransaction FROM pg_locks WHERE relation = {outbox_literal}::regclass",
        "SELECT * FROM pg_prepared_xacts",
        "SELECT pg_current_wal_insert_lsn(), pg_current_wal_flush_lsn()",
        *(f"DELETE FROM {{{table}}}" for table in RELAY_TABLES),
    ],
)
@pytest.mark.parametrize("partitioned", [False, True], ids=["plain", "partitioned"])
def test_the_relay_may_do_its_work(outbox_factory: OutboxFactory, partitioned: bool, query: str) -> None:
    """Reading, settling and its own tables; the views that show open writers need no predefined role."""
    outbox = outbox_factory(partitioned=partitioned)
    attempt(outbox.relay_dsn, outbox.names.format(query))


@pytest.mark.parametrize(
    "query",
    [
        "INSERT INTO {outbox} (topic) VALUES ('t')",
        "UPDATE {outbox} SET payload = NULL",
        "TRUNCATE {outbox}",
        "ALTER TABLE {outbox} DISABLE TRIGGER ALL",
        "DROP TABLE {parked}",
        "DELETE FROM {migration}",
        "SELECT nextval({outbox_seq_literal})",
        "CREATE TABLE {schema}.mine ()",
    ],
)
def test_the_relay_may_not_change_what_is_not_its_own(outbox: Outbox, query: str) -> None:
    """Events, the schema and the order number are out of its reach."""
    with pytest.raises(errors.InsufficientPrivilege):
        attempt(outbox.relay_dsn, outbox.names.format(query))


async def test_the_relay_sees_the_locks_of_other_roles(outbox: Outbox) -> None:
    """Rule 8 of the floor depends on seeing every writer of the outbox, whoever it is."""
    writer, relay = await asyncpg.connect(outbox.app_dsn), await asyncpg.connect(outbox.relay_dsn)
    try:
        await writer.execute(outbox.names.format("BEGIN; INSERT INTO {outbox} (topic) VALUES ('t')"))
        pid = await relay.fetchval(
            "SELECT pid FROM pg_locks WHERE relation = $1::text::regclass AND mode = 'RowExclusiveLock' AND granted",
            outbox.names.outbox,
        )
        assert pid == writer.get_server_pid()
    finally:
        await writer.close()
        await relay.close()


async def test_the_relay_role_can_check(outbox: Outbox) -> None:
    """`relay run` asks with its own role whether the schema is current."""
    assert (await check(outbox.database)).state == "current"


def test_the_script_can_be_run_again(outbox: Outbox) -> None:
    """And makes roles that are missing, whatever their names look like."""
    role = f"Ro'le \"{outbox.name}\\"
    script = roles.script(outbox.owner, app=role, relay=role)
    try:
        for _ in range(2):
            with psycopg.connect(outbox.admin_dsn, autocommit=True) as connection:
                connection.execute(script.encode())
        assert outbox.server.execute(
            "SELECT count(*) FROM pg_roles WHERE rolname = 'Ro''le \"" + outbox.name + "\\'"
        ) == [(1,)]
    finally:
        quoted = role.replace('"', '""')
        outbox.execute(f'DROP OWNED BY "{quoted}"')
        outbox.execute(f'DROP ROLE "{quoted}"')


def test_a_role_that_is_left_out_is_not_mentioned() -> None:
    """`--roles app=NAME` alone grants nothing to a relay."""
    script = roles.script(Database.model_validate({"dsn": "postgresql://"}), app="shop")
    assert '"shop"' in script
    assert "DELETE" not in script


@pytest.mark.parametrize("name", ["", "a$body$b"])
def test_an_unusable_role_name_is_refused(name: str) -> None:
    """It would end the dollar quote around the script's blocks."""
    with pytest.raises(InvalidConfig, match="role name"):
        roles.script(Database.model_validate({"dsn": "postgresql://"}), relay=name)
