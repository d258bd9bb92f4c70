"""`relay check`: what would keep the relay from running or from running well, each with its next step.

Findings come in the order in which a person would look: settings, database, schema, rights, waking up,
cluster, leftovers, sinks. Nothing is changed; one notification is sent on a channel of our own.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import asyncpg

from relay import migrate
from relay.cli.pings import ping_all
from relay.cli.session import address, connect
from relay.database.names import Names
from relay.errors import RelayError, StopError
from relay.maintenance import views

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from relay.config import Config, Loaded

    Connection = Any

__all__ = ["Finding", "findings"]

_OLDEST_VERSION: Final = 150_000
_NOTIFY_SECONDS: Final = 3.0

_SERVER: Final = """
SELECT current_setting('server_version') AS version, current_setting('server_version_num')::int AS number,
       pg_is_in_recovery() AS standby, current_user AS role, pg_backend_pid() AS pid,
       (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) AS superuser
"""

# to_regclass() would need rights on the schema, and their absence is one of the findings.
_RIGHTS: Final = """
SELECT needed.what
  FROM pg_namespace n
  JOIN pg_class c ON c.relnamespace = n.oid
  JOIN (VALUES ({outbox_name}, 'SELECT'), ({outbox_name}, 'DELETE'),
               ({lease_name}, 'SELECT'), ({lease_name}, 'UPDATE'),
               ({member_name}, 'SELECT'), ({member_name}, 'INSERT'), ({member_name}, 'UPDATE'), ({member_name}, 'DELETE'),
               ({parked_name}, 'SELECT'), ({parked_name}, 'INSERT'), ({parked_name}, 'UPDATE'), ({parked_name}, 'DELETE'),
               ({dead_letter_name}, 'SELECT'), ({dead_letter_name}, 'INSERT'), ({dead_letter_name}, 'DELETE'),
               ({migration_name}, 'SELECT')) AS t (relation, privilege) ON t.relation = c.relname
 CROSS JOIN LATERAL (SELECT t.privilege || ' on ' || t.relation) needed (what)
 WHERE n.nspname = {schema_name} AND NOT has_table_privilege(c.oid, t.privilege)
UNION ALL
SELECT 'UPDATE (published_at) on ' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = {schema_name} AND c.relname = {outbox_name} AND NOT has_column_privilege(c.oid, 'published_at', 'UPDATE')
UNION ALL
SELECT t.privilege || ' on sequence ' || c.relname
  FROM pg_namespace n JOIN pg_class c ON c.relnamespace = n.oid
  JOIN (VALUES ({outbox_seq_name}, 'SELECT'), ({parked_number_name}, 'USAGE')) AS t (relation, privilege)
    ON t.relation = c.relname
 WHERE n.nspname = {schema_name} AND NOT has_sequence_privilege(c.oid, t.privilege)
UNION ALL
SELECT 'USAGE on schema ' || n.nspname FROM pg_namespace n
 WHERE n.nspname = {schema_name} AND NOT has_schema_privilege(n.oid, 'USAGE')
"""

_SEQUENCE_CACHE: Final = """
SELECT s.seqcache FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = {schema_name} AND c.relname = {outbox_seq_name}
"""

_TRIGGER: Final = """
SELECT t.tgenabled <> 'D' FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = {schema_name} AND c.relname = {outbox_name} AND t.tgname = {wake_trigger_name}
"""

# Its ROW EXCLUSIVE lock on the outbox keeps the floor down for as long as it stays (PROTOCOLS.md 8).
_PREPARED: Final = """
SELECT gid, extract(epoch FROM now() - prepared)::float8 AS age FROM pg_prepared_xacts
 WHERE database = current_database() AND prepared < now() - interval '10 minutes' ORDER BY prepared
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `hint` is the next step for what is not `ok`."""

    name: str
    state: Literal["ok", "warn", "fail"]
    text: str
    hint: str = ""


async def findings(loaded: Loaded) -> AsyncIterator[Finding]:
    """All findings, each as soon as it is known. Raises nothing that an operator can act on."""
    config = loaded.config
    yield Finding("settings", "ok", f"read from {loaded.file or 'the environment'}")
    for warning in loaded.warnings:
        yield Finding("settings", "warn", warning)
    async for finding in _guarded("database", _database(config)):
        yield finding
    async for finding in _sinks(config):
        yield finding


async def _guarded(name: str, source: AsyncIterator[Finding]) -> AsyncIterator[Finding]:
    """The findings of `source`; an error that ends it is its last one."""
    try:
        async for finding in source:
            yield finding
    except RelayError as error:
        yield Finding(name, "fail", str(error), getattr(error, "hint", ""))


async def _database(config: Config) -> AsyncIterator[Finding]:
    names = Names.from_config(config.database)
    async with connect(config.database) as connection:
        server = await connection.fetchrow(_SERVER)
        assert server is not None
        yield _server(server, config)
        if server["superuser"]:
            yield Finding(
                "role",
                "warn",
                f"{server['role']} is a superuser: it can do far more than the relay needs",
                "`relay migrate --roles relay=NAME` prints a role with the rights that it needs.",
            )
        if (behind := await _schema(config)).state == "fail":
            yield behind
            return
        yield behind
        async for finding in _tables(connection, names, config, server["role"]):
            yield finding
    yield await _wake_up(config, names)


def _server(server: asyncpg.Record, config: Config) -> Finding:
    where = address(config.database.dsn.get_secret_value())
    if server["number"] < _OLDEST_VERSION:
        return Finding(
            "database", "fail", f"{where}: PostgreSQL {server['version']}", "PostgreSQL 15 or newer is needed."
        )
    if server["standby"]:
        return Finding("database", "fail", f"{where} is a standby", "database.dsn must reach the primary.")
    return Finding("database", "ok", f"{where}: PostgreSQL {server['version']} as {server['role']}")


async def _schema(config: Config) -> Finding:
    try:
        found = await migrate.check(config.database)
    except StopError as error:
        return Finding("schema", "fail", str(error), error.hint)
    if found.state == "behind":
        return Finding("schema", "fail", f"not applied: {', '.join(found.pending)}", "Run `relay migrate`.")
    if found.state == "ahead":
        text = f"version {found.version} is newer than this package's {found.latest}"
        return Finding("schema", "warn", text, "Fine during a rolling deployment; else update the relay.")
    return Finding("schema", "ok", f"version {found.version}")


async def _tables(connection: Connection, names: Names, config: Config, role: str) -> AsyncIterator[Finding]:
    missing = [row["what"] for row in await connection.fetch(names.format(_RIGHTS))]
    if missing:
        hint = f"As the owner of the tables, run what `relay migrate --roles relay={role}` prints."
        yield Finding("rights", "fail", f"{role} lacks {', '.join(missing)}", hint)
        return
    yield Finding("rights", "ok", f"{role} may do what the relay does")
    yield await _sequence(connection, names)
    yield await _trigger(connection, names, config)
    for prepared in await connection.fetch(_PREPARED):
        yield Finding(
            "transactions",
            "warn",
            f"prepared transaction {prepared['gid']!r} has been open for {prepared['age'] / 60:.0f} min",
            f"If nobody will end it: ROLLBACK PREPARED '{prepared['gid']}' (it holds vacuum, and may hold the floor).",
        )
    async for finding in _leftovers(connection, names, config):
        yield finding


async def _sequence(connection: Connection, names: Names) -> Finding:
    cache = await connection.fetchval(names.format(_SEQUENCE_CACHE))
    if cache == 1:
        return Finding("sequence", "ok", "numbers are handed out one by one")
    return Finding(
        "sequence",
        "fail",
        f"{names.outbox_seq} has CACHE {cache}: numbers would not follow the order of commits",
        f"ALTER SEQUENCE {names.outbox_seq} CACHE 1;",
    )


async def _trigger(connection: Connection, names: Names, config: Config) -> Finding:
    enabled = await connection.fetchval(names.format(_TRIGGER))
    if enabled is None:
        return Finding(
            "trigger", "warn", "the trigger that wakes a sleeping relay is gone", "Run `relay migrate`, or recreate it."
        )
    if enabled != config.database.notify:
        is_, should = ("enabled", "false") if enabled else ("disabled", "true")
        return Finding("trigger", "warn", f"it is {is_}, and database.notify = {should}", "Run `relay migrate`.")
    return Finding(
        "trigger", "ok", "wakes a sleeping relay" if enabled else "off, as database.notify says: the relay polls"
    )


async def _leftovers(connection: Connection, names: Names, config: Config) -> AsyncIterator[Finding]:
    overview = await views.overview(connection, names)
    yield _pods(overview.members)
    for parked in overview.parked:
        if parked.sink not in config.sinks:
            yield Finding(
                "parked",
                "warn",
                f"{parked.events} deliveries wait for sink {parked.sink!r}, which is not configured",
                f"Bring [sinks.{parked.sink}] back until they are through.",
            )
    holding = sum(count.holding for count in overview.dead)
    if overview.dead:
        dead = sum(count.events for count in overview.dead)
        text = f"{dead} dead letters" + (f", {holding} of them hold their keys" if holding else "")
        yield Finding("dead letters", "warn", text, "See `relay dead-letters list`; then retry or discard them.")


def _pods(members: tuple[views.Member, ...]) -> Finding:
    alive = [member for member in members if member.pod is not None and member.alive]
    orphaned = sum(len(member.lanes) for member in members if member.pod is not None and not member.alive)
    if orphaned and alive:
        return Finding(
            "pods",
            "warn",
            f"{orphaned} lanes belong to pods that are gone",
            "Others take them within seconds; look again.",
        )
    if not alive:
        return Finding("pods", "ok", "no relay is running")
    return Finding("pods", "ok", f"{len(alive)} running, {sum(len(member.lanes) for member in alive)} lanes owned")


async def _wake_up(config: Config, names: Names) -> Finding:
    database = config.database
    setting = "database.direct_dsn" if database.direct_dsn is not None else "database.dsn"
    # Two connections: a pooler passes a notification on to the client that caused it, and to no other.
    async with connect(database, direct=True) as listener, connect(database, direct=True) as notifier:
        pooled = listener.get_server_pid() != await listener.fetchval("SELECT pg_backend_pid()")
        if await _heard(listener, notifier, f"{names.table}_check_{secrets.token_hex(4)}"):
            return Finding("listen", "ok", f"notifications arrive over {setting}")
    behind = " through a transaction pooler" if pooled else ""
    return Finding(
        "listen",
        "fail" if database.direct_dsn is not None else "warn",
        f"no notification arrives over {setting}{behind}: the relay would poll and never sleep",
        "Set database.direct_dsn to an address of PostgreSQL itself, without the pooler.",
    )


async def _heard(listener: Connection, notifier: Connection, channel: str) -> bool:
    heard = asyncio.Event()
    try:
        await listener.add_listener(channel, lambda *_: heard.set())
        await notifier.execute("SELECT pg_notify($1, '')", channel)
        async with asyncio.timeout(_NOTIFY_SECONDS):
            await heard.wait()
    except (TimeoutError, asyncpg.PostgresError):
        return False
    return True


async def _sinks(config: Config) -> AsyncIterator[Finding]:
    for ping in await ping_all(config.sinks):
        name = f"sink {ping.name}"
        if ping.problem is None:
            yield Finding(name, "ok", f"{ping.type} takes messages ({ping.seconds * 1000:.0f} ms)")
            for sentence in ping.advice:
                yield Finding(name, "warn", sentence, "Change it on the broker, unless it is meant.")
        else:
            hint = ping.hint or "The relay starts all the same, waits, and recovers by itself once the broker is back."
            yield Finding(name, "fail", ping.problem, hint)
