"""Events at the edge of what a broker takes: each has one documented result, and its neighbours arrive."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.acceptance.consumers import kafka_consumer, rabbitmq_consumer, redis_consumer
from tests.acceptance.judges import left_behind
from tests.acceptance.pods import eventually, settings_of
from tests.acceptance.writers import insert
from tests.integration.kafka_reader import create_topic

if TYPE_CHECKING:
    from tests.acceptance.consumers import Consumer, Delivery
    from tests.acceptance.pods import Pods
    from tests.outbox import Outbox
    from tests.servers.kafka import Kafka
    from tests.servers.redis import Valkey

NASTY = r'{"s":"\u0000\ud800","n":1234567890123456789012,"d":0.123456789012345678901,"e":1e1000}'
HEADERS = '{"n":128,"big":11171330917854890490,"x":null,"b":true,"l":[1],"o":{"a":1.5},"\u00fc":"\u20ac"}'
AS_TEXT = {
    "n": "128",
    "big": "11171330917854890490",
    "x": None,
    "b": "true",
    "l": "[1]",
    "o": '{"a":1.5}',
    "\u00fc": "\u20ac",
}
LARGE = json.dumps("x" * 1_100_000)


@dataclass(frozen=True)
class Odd:
    """One event. `reason`: it becomes a dead letter, and this says why; otherwise it arrives as `payload`."""

    name: str
    payload: str | None = "{}"
    headers: str | None = None
    topic: str = ""
    reason: str = ""
    arrives: dict[str, Any] = field(default_factory=dict)


COMMON = [
    Odd("control characters, surrogates, big numbers", NASTY),
    Odd("SQL NULL", None),
    Odd("JSON null", "null"),
    Odd("headers that are not strings", headers=HEADERS, arrives=AS_TEXT),
    Odd("no headers", headers="{}"),
]


async def each_has_its_result(
    outbox: Outbox, pods: Pods, sink: dict[str, Any], consumer: Consumer, topic: str, odd: list[Odd]
) -> list[tuple[Odd, Delivery]]:
    """Insert all, each among neighbours of its own key and of others; the deliveries of those that arrive."""
    pod = await pods.start(settings_of(outbox, {"main": sink}))
    rows = []
    for case in odd:
        rows += [
            (topic, case.name, '{"before":1}'),
            (case.topic or topic, case.name, case.payload, case.headers),
            (topic, case.name, '{"after":1}'),
        ]
    ids = await insert(outbox, rows, one_by_one=False)
    refused = {ids[3 * number + 1]: case for number, case in enumerate(odd) if case.reason}
    await consumer.wait_for(set(ids) - refused.keys())

    async def at_rest() -> bool:
        return left_behind(outbox) == {"unsettled": 0, "parked": 0, "dead letters": len(refused)}

    await eventually("everything is settled or buried", at_rest)
    found = outbox.execute("SELECT id::text, kind, reason, payload, headers, attempts FROM {dead_letter}")
    for event, kind, reason, payload, headers, attempts in found:
        case = refused[event]
        assert (kind, attempts) == ("rejected", 1), (case.name, reason)  # at once: no retry would help
        assert case.reason in reason, (case.name, reason)
        assert payload == (None if case.payload is None else case.payload.encode())
        assert json.loads(headers or "null") == json.loads(case.headers or "null")
    assert len(consumer.ids) == len(ids) - len(refused)
    assert await pod.stopped() == 0
    arrived = {delivery.id: delivery for delivery in consumer.deliveries}
    pairs = [(case, arrived[ids[3 * n + 1]]) for n, case in enumerate(odd) if not case.reason]
    for case, delivery in pairs:
        expected = None if case.payload is None else case.payload.encode()
        assert delivery.payload == expected, case.name
        assert delivery.key == case.name
    return pairs


async def test_odd_events_on_redis(outbox: Outbox, pods: Pods, valkey: Valkey, unique: str) -> None:
    """Headers stay JSON; a payload over the limit is refused with its size; any stream name is legal."""
    sink = {"type": "redis", "url": valkey.url, "payload_bytes_max": 1_000_000}
    strange = f"{unique} {{odd}}\n\u00fc"
    odd = [*COMMON, Odd("too large", LARGE, reason="1100002"), Odd("any name is a stream", topic=strange)]
    async with redis_consumer(valkey.url, [unique, strange]) as consumer:
        pairs = await each_has_its_result(outbox, pods, sink, consumer, unique, odd)
    for case, delivery in pairs:
        headers = delivery.headers["headers"]
        assert (headers is None) == (case.headers is None), case.name
        assert json.loads(headers or "null") == json.loads(case.headers or "null")
        if case.headers == HEADERS:
            assert b"11171330917854890490" in headers


async def test_odd_events_on_kafka(outbox: Outbox, pods: Pods, kafka: Kafka, unique: str) -> None:
    """The topic's limit and the alphabet of topic names refuse at once; headers are text."""
    await create_topic(kafka, unique)
    sink = {"type": "kafka", "bootstrap_servers": kafka.bootstrap_servers}
    odd = [
        *COMMON,
        Odd("too large", LARGE, reason="large"),
        Odd("an illegal topic", NASTY, HEADERS, topic="illegal topic!", reason="topic"),
        Odd("a topic that is too long", topic="t" * 250, reason="topic"),
    ]
    async with kafka_consumer(kafka, [unique], 1) as consumer:
        pairs = await each_has_its_result(outbox, pods, sink, consumer, unique, odd)
    for case, delivery in pairs:
        own = {name: value for name, value in delivery.headers.items() if name != "created_at"}
        assert own == {name: None if v is None else v.encode() for name, v in case.arrives.items()}, case.name


async def test_odd_events_on_rabbitmq(outbox: Outbox, pods: Pods, vhost: str, unique: str) -> None:
    """What AMQP cannot say is refused before the wire, so no neighbour loses its channel."""
    sink = {"type": "rabbitmq", "url": vhost, "exchange": unique}
    odd = [
        *COMMON,
        Odd("large", LARGE),
        Odd("a routing key that is too long", NASTY, HEADERS, topic="t" * 256, reason="routing key"),
        Odd("a header that RabbitMQ keeps", headers='{"CC":["q"]}', reason="CC"),
        Odd("headers over a frame", headers=json.dumps({"h": "x" * 200_000}), reason="frame"),
        Odd("a header name that is too long", headers=json.dumps({"h" * 256: "x"}), reason="header name"),
    ]
    async with rabbitmq_consumer(vhost, unique, [unique]) as consumer:
        pairs = await each_has_its_result(outbox, pods, sink, consumer, unique, odd)
    for case, delivery in pairs:
        own = {name: value for name, value in delivery.headers.items() if name not in {"created_at", "key"}}
        assert own == case.arrives, case.name
