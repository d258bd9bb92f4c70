"""The insert itself, for each driver.

Every value is sent as text (or bytea) and cast by the server, so that codecs which an application
registered for json or uuid on its connection do not encode our values a second time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relay.client import transaction
from relay.client.event import Event, PayloadType, Row, row

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from uuid import UUID

    import asyncpg
    import psycopg

__all__ = ["enqueue", "enqueue_many", "enqueue_many_sync", "enqueue_sync"]


async def enqueue(
    connection: asyncpg.Connection[Any] | psycopg.AsyncConnection[Any],
    topic: str,
    payload: Any,
    *,
    key: str | None = None,
    headers: Mapping[str, Any] | None = None,
    id: UUID | str | None = None,  # noqa: A002 - the column's name
    table: str = "outbox",
    schema: str = "public",
    payload_type: PayloadType = "json",
    allow_autocommit: bool = False,
) -> UUID:
    """Inserts one event in the connection's transaction and returns its id.

    topic         where it goes; what the relay's routes match
    payload       text or bytes: stored as they are (a `json` column wants JSON text); None: a tombstone;
                  anything else: its JSON
    key           events of one key are delivered in order; None: no order
    headers       names to values; strings stay strings, other values are delivered as their JSON (docs/headers.md)
    id            what consumers deduplicate by; default: a new UUIDv7
    table, schema, payload_type
                  as in the relay's `[database]` section

    Raises `NotInTransaction` outside a transaction (unless `allow_autocommit`), `InvalidEvent` for what
    PostgreSQL cannot store, `TypeError` for another kind of connection, and the driver's own errors.
    """
    event = Event(topic, payload, key, headers, id)
    ids = await enqueue_many(
        connection,
        [event],
        table=table,
        schema=schema,
        payload_type=payload_type,
        allow_autocommit=allow_autocommit,
    )
    return ids[0]


async def enqueue_many(
    connection: asyncpg.Connection[Any] | psycopg.AsyncConnection[Any],
    events: Iterable[Event],
    *,
    table: str = "outbox",
    schema: str = "public",
    payload_type: PayloadType = "json",
    allow_autocommit: bool = False,
) -> list[UUID]:
    """Inserts events in one statement, in their order, and returns their ids. Else like `enqueue`.

    All of them are in memory at once: insert millions in several calls of some thousands.
    """
    kind = transaction.driver(connection)
    if kind == "psycopg":
        raise TypeError("this is a synchronous connection: use enqueue_sync or enqueue_many_sync")
    if not allow_autocommit:
        transaction.require(connection)
    ids, columns = _columns(events, payload_type)
    if not ids:
        return ids
    if kind == "asyncpg":
        await connection.execute(_sql(schema, table, payload_type, ["$1", "$2", "$3", "$4", "$5"]), *columns)
    else:
        await connection.execute(_psycopg_sql(schema, table, payload_type), columns)
    return ids


def enqueue_sync(
    connection: psycopg.Connection[Any],
    topic: str,
    payload: Any,
    *,
    key: str | None = None,
    headers: Mapping[str, Any] | None = None,
    id: UUID | str | None = None,  # noqa: A002 - the column's name
    table: str = "outbox",
    schema: str = "public",
    payload_type: PayloadType = "json",
    allow_autocommit: bool = False,
) -> UUID:
    """`enqueue` for psycopg's synchronous connection."""
    event = Event(topic, payload, key, headers, id)
    ids = enqueue_many_sync(
        connection,
        [event],
        table=table,
        schema=schema,
        payload_type=payload_type,
        allow_autocommit=allow_autocommit,
    )
    return ids[0]


def enqueue_many_sync(
    connection: psycopg.Connection[Any],
    events: Iterable[Event],
    *,
    table: str = "outbox",
    schema: str = "public",
    payload_type: PayloadType = "json",
    allow_autocommit: bool = False,
) -> list[UUID]:
    """`enqueue_many` for psycopg's synchronous connection."""
    if transaction.driver(connection) != "psycopg":
        raise TypeError("this is an asynchronous connection: await enqueue or enqueue_many")
    if not allow_autocommit:
        transaction.require(connection)
    ids, columns = _columns(events, payload_type)
    if ids:
        connection.execute(_psycopg_sql(schema, table, payload_type), columns)
    return ids


def _columns(events: Iterable[Event], payload_type: PayloadType) -> tuple[list[UUID], Sequence[list[Any]]]:
    """The ids, and one list for each column."""
    ids: list[UUID] = []
    rows: list[Row] = []
    for event in events:
        event_id, values = row(event, payload_type)
        ids.append(event_id)
        rows.append(values)
    return ids, [list(column) for column in zip(*rows, strict=True)]


def _psycopg_sql(schema: str, table: str, payload_type: PayloadType) -> bytes:
    # A percent sign in a name would be read as the start of a parameter.
    return _sql(schema.replace("%", "%%"), table.replace("%", "%%"), payload_type, ["%s"] * 5).encode()


def _sql(schema: str, table: str, payload_type: PayloadType, parameters: Sequence[str]) -> str:
    wire = "bytea" if payload_type == "bytea" else "text"
    ids, topics, keys, payloads, headers = parameters
    return (
        f"INSERT INTO {_quoted(schema)}.{_quoted(table)} (id, topic, key, payload, headers)"  # noqa: S608 - quoted names, own types
        f" SELECT e.id::uuid, e.topic, e.key, e.payload::{payload_type}, e.headers::jsonb"
        f" FROM unnest({ids}::text[], {topics}::text[], {keys}::text[], {payloads}::{wire}[], {headers}::text[])"
        " WITH ORDINALITY AS e (id, topic, key, payload, headers, number) ORDER BY e.number"
    )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
