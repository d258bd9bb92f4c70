"""`relay.client` against a real outbox, with the application's role and each kind of connection."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID

import asyncpg
import psycopg
import pytest

from relay.client import Event, NotInTransaction, enqueue, enqueue_many, enqueue_many_sync, enqueue_sync

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.outbox import Outbox, OutboxFactory


class Application:
    """An application's connection, whichever its driver is."""

    def __init__(self, driver: str, dsn: str) -> None:
        self.driver, self.dsn = driver, dsn
        self._stack = AsyncExitStack()
        self.connection: Any = None

    async def __aenter__(self) -> Self:
        match self.driver:
            case "asyncpg":
                self.connection = await asyncpg.connect(self.dsn)
                self._stack.push_async_callback(self.connection.close)
            case "psycopg async":
                opened = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)
                self.connection = await self._stack.enter_async_context(opened)
            case "psycopg":
                self.connection = self._stack.enter_context(psycopg.connect(self.dsn, autocommit=True))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def begin(self) -> None:
        """Open a transaction by plain SQL, the least that a driver can know about it."""
        await self.execute("BEGIN")

    async def execute(self, query: str) -> None:
        if self.driver == "psycopg":
            self.connection.execute(query)
        else:
            await self.connection.execute(query)

    async def enqueue(self, topic: str, payload: Any, **options: Any) -> UUID:
        if self.driver == "psycopg":
            return enqueue_sync(self.connection, topic, payload, **options)
        return await enqueue(self.connection, topic, payload, **options)

    async def enqueue_many(self, events: Sequence[Event], **options: Any) -> list[UUID]:
        if self.driver == "psycopg":
            return enqueue_many_sync(self.connection, events, **options)
        return await enqueue_many(self.connection, events, **options)


@pytest.fixture(params=["asyncpg", "psycopg async", "psycopg"])
def driver(request: pytest.FixtureRequest) -> str:
    """Each test runs once per driver."""
    return str(request.param)


@pytest.fixture
async def app(driver: str, outbox: Outbox) -> AsyncIterator[Application]:
    """An application at the default outbox."""
    async with Application(driver, outbox.app_dsn) as application:
        yield application


async def test_an_event_is_stored_as_it_was_given(app: Application, outbox: Outbox) -> None:
    """All columns, and the id that was returned."""
    await app.begin()
    event_id = await app.enqueue("orders", {"a": 1}, key="k", headers={"h": "v", "n": 128, "x": None})
    await app.execute("COMMIT")
    assert outbox.execute("SELECT id, topic, key, payload::text, headers FROM {outbox}") == [
        (event_id, "orders", "k", '{"a":1}', {"h": "v", "n": 128, "x": None})
    ]
    assert event_id.version == 7


@pytest.mark.parametrize(
    ("payload", "stored"),
    [
        ('{"a": 1.50}', '{"a": 1.50}'),
        (b"[1,\n2]", "[1,\n2]"),
        (None, None),
        ({"s": "\0"}, '{"s":"\\u0000"}'),
        ({"half": "\ud800"}, '{"half":"\\ud800"}'),
        ({"n": 1234567890123456789012}, '{"n":1234567890123456789012}'),
        ('{"s":"\\u0000\\ud800","d":0.123456789012345678901,"e":1e1000}',) * 2,
        ([], "[]"),
        (0, "0"),
        ("null", "null"),
    ],
)
async def test_json_text_is_kept_and_objects_become_json(
    app: Application, outbox: Outbox, payload: Any, stored: str | None
) -> None:
    """Text goes as it is, digit for digit; None is a tombstone (SQL NULL), not JSON null (FIELD.md A1)."""
    await app.begin()
    await app.enqueue("t", payload)
    await app.execute("COMMIT")
    assert outbox.execute("SELECT payload::text FROM {outbox}") == [(stored,)]


@pytest.mark.parametrize(
    ("payload_type", "payload", "stored"),
    [
        ("jsonb", {"b": 1, "a": 2}, '{"a": 2, "b": 1}'),
        ("text", "plain \\ text", "plain \\ text"),
        ("text", "", ""),
        ("bytea", b"\x00\xff\\", "\\x00ff5c"),
        ("bytea", "a\\b", "\\x615c62"),
        ("bytea", b"", "\\x"),
        ("bytea", {"a": 1}, "\\x7b2261223a317d"),
        ("bytea", None, None),
    ],
)
async def test_other_payload_types(
    driver: str, outbox_factory: OutboxFactory, payload_type: str, payload: Any, stored: str | None
) -> None:
    """`payload_type` is what `database.payload` says; bytes stay bytes, a backslash is no escape."""
    outbox = outbox_factory(payload=payload_type)
    async with Application(driver, outbox.app_dsn) as app:
        await app.begin()
        await app.enqueue("t", payload, payload_type=payload_type)
        await app.execute("COMMIT")
    assert outbox.execute("SELECT payload::text FROM {outbox}") == [(stored,)]


async def test_outside_a_transaction_it_refuses(app: Application, outbox: Outbox) -> None:
    """Nothing is written, and the error says what to do."""
    with pytest.raises(NotInTransaction, match=r"connection\.transaction\(\)"):
        await app.enqueue("t", None)
    with pytest.raises(NotInTransaction):
        await app.enqueue_many([])
    assert outbox.execute("SELECT count(*) FROM {outbox}") == [(0,)]


async def test_outside_a_transaction_when_told_to(app: Application, outbox: Outbox) -> None:
    """`allow_autocommit`: the event is its own transaction."""
    await app.enqueue("t", None, allow_autocommit=True)
    assert outbox.execute("SELECT count(*) FROM {outbox}") == [(1,)]


async def test_a_rollback_takes_the_event_with_it(app: Application, outbox: Outbox) -> None:
    """It belongs to the caller's transaction and to nothing else; savepoints included."""
    await app.begin()
    await app.enqueue("kept", None)
    await app.execute("SAVEPOINT s")
    await app.enqueue("gone", None)
    await app.execute("ROLLBACK TO s")
    await app.execute("COMMIT")
    await app.begin()
    await app.enqueue("gone", None)
    await app.execute("ROLLBACK")
    assert outbox.execute("SELECT topic FROM {outbox}") == [("kept",)]


async def test_many_events_keep_their_order(app: Application, outbox: Outbox) -> None:
    """One statement; `seq` follows the list."""
    events = [
        Event(f"t{n}", {"n": n}, key=None if n % 2 else "k", headers={"n": n} if n % 3 else None) for n in range(500)
    ]
    await app.begin()
    ids = await app.enqueue_many(events)
    assert await app.enqueue_many([]) == []
    await app.execute("COMMIT")
    stored = outbox.execute("SELECT id, topic, payload, key, headers FROM {outbox} ORDER BY seq")
    assert stored == [(i, e.topic, e.payload, e.key, e.headers) for i, e in zip(ids, events, strict=True)]


async def test_an_id_of_the_application_is_kept(app: Application, outbox: Outbox) -> None:
    """As UUID or as text."""
    ids = [UUID(int=7), UUID(int=8)]
    await app.begin()
    assert await app.enqueue("t", None, id=ids[0]) == ids[0]
    assert await app.enqueue("t", None, id=str(ids[1])) == ids[1]
    await app.execute("COMMIT")
    assert outbox.execute("SELECT id FROM {outbox} ORDER BY seq") == [(ids[0],), (ids[1],)]


async def test_names_that_need_quoting(driver: str, outbox_factory: OutboxFactory) -> None:
    """Percent signs and braces mean something to the drivers, quotes to PostgreSQL (FIELD.md A7)."""
    outbox = outbox_factory(schema='My.%s"{App}', table='Out"Box %(a)s {lease}\\')
    async with Application(driver, outbox.app_dsn) as app:
        await app.begin()
        await app.enqueue("t", None, schema=outbox.names.schema, table=outbox.names.table)
        await app.execute("COMMIT")
    assert outbox.execute("SELECT topic FROM {outbox}") == [("t",)]


async def test_codecs_of_the_application_do_not_encode_twice(outbox: Outbox) -> None:
    """Many asyncpg programs register `json.dumps` for json and jsonb, and their own codec for uuid."""
    connection = await asyncpg.connect(outbox.app_dsn)
    try:
        for name, encoder in (("json", json.dumps), ("jsonb", json.dumps), ("uuid", lambda u: u.hex)):
            await connection.set_type_codec(name, encoder=encoder, decoder=str, schema="pg_catalog")
        async with connection.transaction():
            await enqueue(connection, "t", '{"a":1}', headers={"h": "v"})
    finally:
        await connection.close()
    assert outbox.execute("SELECT payload, headers FROM {outbox}") == [({"a": 1}, {"h": "v"})]


async def test_a_pool_s_connection_will_do(outbox: Outbox) -> None:
    """The pool of asyncpg hands out proxies."""
    async with asyncpg.create_pool(outbox.app_dsn, min_size=1, max_size=1) as pool, pool.acquire() as connection:
        with pytest.raises(NotInTransaction):
            await enqueue(connection, "t", None)
        async with connection.transaction():
            await enqueue(connection, "t", None)
    assert outbox.execute("SELECT count(*) FROM {outbox}") == [(1,)]


async def test_psycopg_without_autocommit_is_always_inside(outbox: Outbox) -> None:
    """Its first statement opens the transaction that the caller commits."""
    with psycopg.connect(outbox.app_dsn) as connection:
        enqueue_sync(connection, "sync", None)
    async with await psycopg.AsyncConnection.connect(outbox.app_dsn) as connection_async:
        await enqueue(connection_async, "async", None)
        await connection_async.rollback()
        await enqueue(connection_async, "async", None)
    assert outbox.execute("SELECT topic FROM {outbox} ORDER BY seq") == [("sync",), ("async",)]


async def test_psycopg_s_pipelines(outbox: Outbox) -> None:
    """The BEGIN of a block may still be queued when the event is."""
    with (
        psycopg.connect(outbox.app_dsn, autocommit=True) as connection,
        connection.pipeline(),
        connection.transaction(),
    ):
        enqueue_sync(connection, "inside", None)
    async with (
        await psycopg.AsyncConnection.connect(outbox.app_dsn, autocommit=True) as connection_async,
        connection_async.pipeline(),
        connection_async.transaction(),
    ):
        await enqueue(connection_async, "inside", None)
    assert outbox.execute("SELECT topic FROM {outbox}") == [("inside",), ("inside",)]


async def test_the_wrong_twin_says_which_one_is_right(outbox: Outbox) -> None:
    """A synchronous connection cannot be awaited, and the other way round."""
    with psycopg.connect(outbox.app_dsn) as connection, pytest.raises(TypeError, match="use enqueue_sync"):
        await enqueue(connection, "t", None)
    async with await psycopg.AsyncConnection.connect(outbox.app_dsn) as connection_async:
        with pytest.raises(TypeError, match="await enqueue"):
            enqueue_sync(connection_async, "t", None)  # type: ignore[arg-type]  # the mistake under test


async def test_another_kind_of_connection_is_named() -> None:
    """For example a wrapper of an ORM."""
    with pytest.raises(TypeError, match=r"builtins\.object is no connection"):
        await enqueue(object(), "t", None)


async def test_a_failed_insert_is_the_driver_s_own_error(app: Application) -> None:
    """A payload that is no JSON is the application's mistake, reported by PostgreSQL."""
    await app.begin()
    with pytest.raises((asyncpg.InvalidTextRepresentationError, psycopg.errors.InvalidTextRepresentation)):
        await app.enqueue("t", "no json")
