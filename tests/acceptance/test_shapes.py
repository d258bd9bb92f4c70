"""Every shape of outbox works from insert to broker: kept rows, partitions, payload types, quoted names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.acceptance.consumers import redis_consumer
from tests.acceptance.judges import assert_at_rest, judge
from tests.acceptance.pods import settings_of
from tests.acceptance.writers import Load, insert

if TYPE_CHECKING:
    from tests.acceptance.pods import Pods
    from tests.outbox import OutboxFactory
    from tests.servers.redis import Valkey

SHAPES: dict[str, dict[str, Any]] = {
    "json": {},
    "jsonb, quoted names": {"payload": "jsonb", "schema": "My.App", "table": 'Out""Box', "partitioned": True},
    "text": {"payload": "text", "partitioned": True, "partition_range": "day", "partitions_ahead_days": 3},
    "bytea": {"payload": "bytea"},
}
PAYLOADS: dict[str, list[tuple[Any, bytes | None]]] = {
    "json": [('{ "b":1,  "a":"\\u0000" }', b'{ "b":1,  "a":"\\u0000" }'), ("null", b"null"), (None, None)],
    "jsonb": [('{ "b":1,  "a":2 }', b'{"a": 2, "b": 1}'), ("null", b"null"), (None, None)],
    "text": [("a\nb \u00fc", "a\nb \u00fc".encode()), ("", b""), (None, None)],
    "bytea": [(b"\x00\xff\r\n", b"\x00\xff\r\n"), (b"", b""), (None, None)],
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_payloads_arrive_byte_for_byte_from_every_shape_of_outbox(
    outbox_factory: OutboxFactory, pods: Pods, valkey: Valkey, unique: str, shape: str
) -> None:
    """The column's text, or its bytes; SQL NULL has no payload; names are quoted wherever they appear (FIELD.md A7)."""
    outbox = outbox_factory(**SHAPES[shape])
    pod = await pods.start(settings_of(outbox, {"main": {"type": "redis", "url": valkey.url}}))
    payloads = PAYLOADS[SHAPES[shape].get("payload", "json")]
    async with redis_consumer(valkey.url, [unique]) as consumer:
        ids = await insert(outbox, [(unique, 'a "key"', payload) for payload, _ in payloads])
        await consumer.wait_for(ids)
        assert consumer.ids == ids
        assert [delivery.payload for delivery in consumer.deliveries] == [expected for _, expected in payloads]
        assert {delivery.key for delivery in consumer.deliveries} == {'a "key"'}
    assert await pod.stopped() == 0
    assert_at_rest(outbox)


@pytest.mark.parametrize("partitioned", [False, True])
async def test_kept_rows_are_marked_once_and_stay(
    outbox_factory: OutboxFactory, pods: Pods, valkey: Valkey, unique: str, seed: int, partitioned: bool
) -> None:
    """With settle = "keep" and two pods, one of which is killed: `published_at` is set once and never moved."""
    outbox = outbox_factory(partitioned=partitioned)
    outbox.execute("CREATE TABLE moves (seq bigint, was timestamptz)")
    outbox.execute("GRANT ALL ON moves TO PUBLIC")
    outbox.execute(
        "CREATE FUNCTION note_move() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " INSERT INTO public.moves VALUES (new.seq, old.published_at); RETURN new; END $$"
    )
    outbox.execute("CREATE TRIGGER note_move AFTER UPDATE ON {outbox} FOR EACH ROW EXECUTE FUNCTION note_move()")
    settings = settings_of(
        outbox, {"main": {"type": "redis", "url": valkey.url}}, source={"polling": {"settle": "keep"}}
    )
    killed, _ = await pods.start_many(2, settings)
    async with redis_consumer(valkey.url, [unique]) as consumer:
        async with Load(outbox, [unique], seed=seed, writers=4, late_seconds=0.5) as load:
            await consumer.wait_for_count(50)
            killed.kill9()
            await consumer.wait_for_count(len(set(consumer.ids)) + 100)
        await consumer.wait_for(load.ledger.ids)
        await pods.stop_all()
        await consumer.drain()
        judge(load.ledger, consumer).assert_kept()
    count = len(load.ledger)
    assert outbox.execute("SELECT count(*), count(published_at) FROM {outbox}") == [(count, count)]
    assert outbox.execute("SELECT count(*), count(DISTINCT seq), count(was) FROM moves") == [(count, count, 0)]
