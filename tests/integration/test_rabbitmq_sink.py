"""PROTOCOLS.md 20 on a real broker: what is confirmed, what is not, and in which order a key arrives."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from relay.sink import Outcome, Status
from relay.testing.messages import HEADERS, make_message, make_messages
from relay.timestamps import rfc3339
from tests.integration.rabbitmq_topology import (
    Topology,
    collector_of,
    ids,
    new_sink,
    open_sink,
    publish_until_confirmed,
    repeating,
    statuses,
    topology_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from relay.sinks.rabbitmq import RabbitMQSink

CONFIRMED, UNAVAILABLE, DEFERRED, REJECTED = Status.CONFIRMED, Status.UNAVAILABLE, Status.DEFERRED, Status.REJECTED


@pytest_asyncio.fixture
async def topology(vhost: str) -> AsyncIterator[Topology]:
    async with topology_of(vhost) as made:
        yield made


@pytest_asyncio.fixture
async def sink(vhost: str, topology: Topology) -> AsyncIterator[RabbitMQSink]:
    async with open_sink(vhost, publish_timeout_seconds=10.0) as opened:
        yield opened


def is_of_one_message(outcome: Outcome) -> bool:
    """Unavailable for the message alone: its key is set aside, nothing is said about the sink."""
    return outcome.status is UNAVAILABLE and not outcome.sink_down and not outcome.misconfigured


# --- returns (FIELD.md D1) ---


async def test_an_unroutable_message_is_not_confirmed_and_goes_once_a_queue_is_bound(
    topology: Topology, sink: RabbitMQSink
) -> None:
    """RabbitMQ acknowledges what it returned; only `mandatory` and the return tell."""
    message = make_message("later")
    [outcome] = await sink.publish([message])
    assert is_of_one_message(outcome)
    assert "NO_ROUTE" in outcome.reason
    queue = await topology.queue("later")
    assert statuses(await sink.publish([message])) == [CONFIRMED]
    assert ids(await topology.drain(queue)) == [message.id]


async def test_a_return_in_the_middle_defers_the_rest_of_its_key_only(topology: Topology, sink: RabbitMQSink) -> None:
    """1 goes, 2 is returned, 3 must not be delivered before 2; other keys and messages without one go on."""
    queue = await topology.queue("bound")
    first, returned, follower = (make_message(to, key="a") for to in ("bound", "unbound", "bound"))
    others = [make_message("bound", key=key) for key in ("b", None, "b")]
    outcomes = await sink.publish([first, others[0], returned, others[1], follower, others[2]])
    assert statuses(outcomes) == [CONFIRMED, CONFIRMED, UNAVAILABLE, CONFIRMED, DEFERRED, CONFIRMED]
    assert is_of_one_message(outcomes[2])
    assert follower.id not in ids(await topology.drain(queue))
    await queue.bind(topology.exchange, routing_key="unbound")
    assert statuses(await sink.publish([returned, follower])) == [CONFIRMED] * 2
    assert ids(await topology.drain(queue)) == [returned.id, follower.id]


@pytest.mark.parametrize("destinations", [("unbound", "bound"), ("bound", "unbound")])
@pytest.mark.parametrize("key", [None, "a"])
async def test_one_event_to_two_routing_keys_is_judged_apart(
    topology: Topology, sink: RabbitMQSink, destinations: tuple[str, str], key: str | None
) -> None:
    """A return names the event only: with both in flight, the one that was lost could be settled."""
    queue = await topology.queue("bound")
    batch = [make_message(destination, key=key) for destination in destinations]
    batch[1].id = batch[0].id
    outcomes = await sink.publish(batch)
    held_back = UNAVAILABLE if key is None or destinations[0] == "bound" else DEFERRED
    expected = {"unbound": UNAVAILABLE, "bound": CONFIRMED if held_back is UNAVAILABLE else DEFERRED}
    assert statuses(outcomes) == [expected[destination] for destination in destinations]
    assert len(await topology.drain(queue)) == (expected["bound"] is CONFIRMED)


async def test_many_copies_of_one_event_are_each_confirmed(topology: Topology, sink: RabbitMQSink) -> None:
    queue = await topology.queue("q")
    batch = [make_message("q", key=None) for _ in range(20)]
    for message in batch:
        message.id = batch[0].id
    assert statuses(await sink.publish(batch)) == [CONFIRMED] * 20
    assert len(await topology.drain(queue)) == 20


async def test_a_large_message_that_is_returned_costs_its_neighbours_nothing(
    topology: Topology, sink: RabbitMQSink
) -> None:
    """A return brings the whole body back, over many frames."""
    await topology.queue("q")
    batch = make_messages("q", 20, keys=(None,))
    batch[7] = make_message("unbound", key=None, payload=b"x" * 1_000_000)
    batch[13] = make_message("unbound", key=None, payload=b"")
    outcomes = await sink.publish(batch)
    assert [n for n, outcome in enumerate(outcomes) if outcome.status is not CONFIRMED] == [7, 13]


async def test_order_survives_a_binding_that_comes_and_goes(vhost: str, topology: Topology, sink: RabbitMQSink) -> None:
    """Returns at random moments, over many waves: first deliveries of each key are complete and in order."""
    queue = await topology.queue("q")
    batch = make_messages("q", 200, keys=[f"k{n}" for n in range(10)])

    async def flap() -> None:
        await queue.unbind(topology.exchange, "q")
        await queue.bind(topology.exchange, "q")

    async with collector_of(vhost, "q") as consumer:
        async with repeating(flap):
            attempts = await publish_until_confirmed(sink, batch)
        await consumer.assert_complete_and_in_order(batch)
    assert attempts > 1, "no message was returned, so nothing was tried"


# --- refusals (FIELD.md D3) ---


async def test_a_full_queue_refuses_its_message_and_no_other(topology: Topology, sink: RabbitMQSink) -> None:
    """`reject-publish` answers with basic.nack; the key waits, other queues take theirs."""
    full = await topology.queue("full", arguments={"x-max-length": 2, "x-overflow": "reject-publish"})
    roomy = await topology.queue("roomy")
    small = [make_message("full", key="a") for _ in range(4)]
    follower, others = make_message("roomy", key="a"), make_messages("roomy", 6, keys=("b", "c", None))
    outcomes = await sink.publish([*small, follower, *others])
    assert statuses(outcomes) == [CONFIRMED, CONFIRMED, UNAVAILABLE, DEFERRED, DEFERRED, *([CONFIRMED] * 6)]
    assert is_of_one_message(outcomes[2])
    assert "basic.nack" in outcomes[2].reason
    assert ids(await topology.drain(full)) == ids(small[:2])
    assert statuses(await sink.publish([*small[2:], follower])) == [CONFIRMED] * 3
    assert ids(await topology.drain(full)) == ids(small[2:])
    assert ids(await topology.drain(roomy))[-1] == follower.id


async def test_of_two_queues_one_full_is_a_refusal(topology: Topology, sink: RabbitMQSink) -> None:
    """Confirmed means in every queue it is routed to; the other queue sees it again, which is allowed."""
    full = await topology.queue("full", "both", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    roomy = await topology.queue("roomy", "both")
    batch = make_messages("both", 3, keys=("a",))
    assert statuses(await sink.publish(batch)) == [CONFIRMED, UNAVAILABLE, DEFERRED]
    assert ids(await topology.drain(full)) == [batch[0].id]
    assert statuses(await sink.publish(batch[1:2])) == [CONFIRMED]
    assert ids(await topology.drain(roomy)) == [batch[0].id, batch[1].id, batch[1].id]


async def test_order_survives_a_queue_that_is_full_now_and_then(
    vhost: str, topology: Topology, sink: RabbitMQSink
) -> None:
    """A consumer makes room in the middle of a wave: had 3 been in flight behind 2, it would overtake it."""
    await topology.queue("small", arguments={"x-max-length": 3, "x-overflow": "reject-publish"})
    batch = make_messages("small", 300, keys=("a", "b", "c", "d"))
    async with collector_of(vhost, "small", prefetch_count=2) as consumer:
        attempts = await publish_until_confirmed(sink, batch)
        await consumer.assert_complete_and_in_order(batch)
    assert attempts > 1, "the queue was never full, so nothing was tried"


# --- what a consumer sees ---


async def test_the_properties_are_the_documented_ones(topology: Topology, sink: RabbitMQSink) -> None:
    queue = await topology.queue("q")
    message = make_message("q", key="order-17", payload=b'{"n": 1}', headers='{"tenant": "acme", "n": 1.50, "x": null}')
    await sink.publish([message])
    [received] = await topology.drain(queue)
    assert (received.exchange, received.routing_key, received.body) == ("events", "q", b'{"n": 1}')
    assert received.message_id == message.id
    assert received.delivery_mode == 2
    assert received.timestamp is not None
    assert int(received.timestamp.timestamp()) == message.created_at // 1_000_000
    assert received.headers == {
        "created_at": rfc3339(message.created_at),
        "key": "order-17",
        "tenant": "acme",
        "n": "1.50",
        "x": None,
    }


async def test_a_tombstone_an_empty_payload_and_json_null_are_three_things(
    topology: Topology, sink: RabbitMQSink
) -> None:
    """FIELD.md A3."""
    queue = await topology.queue("q")
    await sink.publish([make_message("q", key=None, payload=payload) for payload in (None, b"", b"null")])
    received = await topology.drain(queue)
    assert [(message.body, message.headers.get("tombstone")) for message in received] == [
        (b"", True),
        (b"", None),
        (b"null", None),
    ]


@pytest.mark.parametrize("size", [131_064, 131_065, 8 * 1024 * 1024])
async def test_a_large_body_arrives_whole(topology: Topology, sink: RabbitMQSink, size: int) -> None:
    """Over frame_max (131,072 by default) it is split, with small ones before and behind it."""
    queue = await topology.queue("q")
    payload = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    batch = [make_message("q", key="a", payload=body) for body in (b"before", payload, b"behind")]
    assert statuses(await sink.publish(batch)) == [CONFIRMED] * 3
    assert [message.body for message in await topology.drain(queue)] == [b"before", payload, b"behind"]


async def test_odd_headers_leave_a_channel_that_works(topology: Topology, sink: RabbitMQSink) -> None:
    """FIELD.md A9, and what RabbitMQ would close the channel for: refused alone, before the wire."""
    await topology.queue("q")
    good = [make_message("q", key=None, headers=headers) for headers in HEADERS.values()]
    bad = [
        make_message("q", key=None, headers='{"CC": "other"}'),
        make_message("q", key=None, headers='{"' + "h" * 256 + '": "x"}'),
        make_message("q" * 256, key=None),
        make_message("q", key=None, headers='{"a": "' + "x" * 140_000 + '"}'),
    ]
    outcomes = await sink.publish([*good[:4], *bad, *good[4:]])
    assert statuses(outcomes) == [CONFIRMED] * 4 + [REJECTED] * 4 + [CONFIRMED] * (len(good) - 4)


async def test_the_default_exchange_takes_queue_names(vhost: str, topology: Topology) -> None:
    queue = await topology.queue("q")
    async with open_sink(vhost, exchange="") as sink:
        await sink.ping()
        message = make_message("q")
        assert statuses(await sink.publish([message, make_message("nobody", key=None)])) == [CONFIRMED, UNAVAILABLE]
    assert ids(await topology.drain(queue)) == [message.id]


async def test_a_key_with_many_messages_goes_wave_by_wave(topology: Topology, sink: RabbitMQSink) -> None:
    queue = await topology.queue("q")
    batch = make_messages("q", 200, keys=("hot",))
    assert statuses(await sink.publish(batch)) == [CONFIRMED] * 200
    assert ids(await topology.drain(queue)) == ids(batch)


# --- life cycle ---


async def test_batches_beyond_the_channels_wait_for_one(topology: Topology, vhost: str) -> None:
    await topology.queue("q")
    async with open_sink(vhost, channels=1) as sink:
        batches = [make_messages("q", 20, keys=(f"k{n}",)) for n in range(5)]
        outcomes = await asyncio.gather(*(sink.publish(batch) for batch in batches))
    assert {status for found in outcomes for status in statuses(found)} == {CONFIRMED}


async def test_a_closed_sink_says_so(vhost: str) -> None:
    sink = new_sink(vhost)
    await sink.open()
    await sink.close()
    [outcome] = await sink.publish([make_message("q")])
    assert (outcome.status, outcome.sink_down, outcome.reason) == (UNAVAILABLE, True, "the sink is closed")
