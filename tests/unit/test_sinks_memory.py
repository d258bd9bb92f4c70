"""The signals and faults of the in-memory sink, which other tests lean on."""

from __future__ import annotations

import asyncio

import pytest

from relay.errors import SinkUnavailable
from relay.sink import CONFIRMED, DEFERRED, Status, rejected, unavailable
from relay.sinks.memory import MemoryOptions, MemorySink
from relay.testing.delivery import ids
from relay.testing.messages import make_message, make_messages


async def test_received_wakes_when_so_many_were_delivered() -> None:
    """Not before, and at once if they are there already."""
    sink = MemorySink("memory")
    waiter = asyncio.create_task(sink.received(3))
    await sink.publish(make_messages("d", 2))
    await asyncio.sleep(0)
    assert not waiter.done()
    await sink.publish(make_messages("d", 2))
    await waiter
    await sink.received(4)
    assert sink.delivered == 4


async def test_publishing_wakes_before_anything_is_delivered() -> None:
    """So a test can act while a batch is in flight."""
    sink = MemorySink("memory")
    sink.hold()
    task = asyncio.ensure_future(sink.publish(make_messages("d", 2)))
    await sink.publishing()
    assert (sink.batches, sink.delivered, task.done()) == (1, 0, False)
    sink.release()
    assert list(await task) == [CONFIRMED] * 2


async def test_a_fault_strikes_as_often_as_it_is_told() -> None:
    """Then the message goes through; its followers were deferred, not delivered."""
    sink = MemorySink("memory")
    batch = make_messages("d", 3, keys=("a", "a", "b"))
    sink.fail(lambda message: message is batch[0], unavailable("busy"), times=1)
    assert list(await sink.publish(batch)) == [unavailable("busy"), DEFERRED, CONFIRMED]
    assert list(await sink.publish(batch[:2])) == [CONFIRMED] * 2
    assert ids(sink.messages) == ids([batch[2], batch[0], batch[1]])


async def test_succeed_forgets_the_faults() -> None:
    """A poisoned message becomes well."""
    sink = MemorySink("memory")
    sink.fail(lambda message: message.key == "key", rejected("poison"))
    assert [outcome.status for outcome in await sink.publish([make_message("d")])] == [Status.REJECTED]
    sink.succeed()
    assert list(await sink.publish([make_message("d")])) == [CONFIRMED]


async def test_down_and_up() -> None:
    """As an outage, or as something that an operator has to mend."""
    sink = MemorySink("memory")
    sink.down("no route", misconfigured=True)
    assert list(await sink.publish([make_message("d")])) == [
        unavailable("no route", sink_down=True, misconfigured=True)
    ]
    with pytest.raises(SinkUnavailable, match="no route"):
        await sink.ping()
    sink.up()
    await sink.ping()
    assert list(await sink.publish([make_message("d")])) == [CONFIRMED]


async def test_swallowed_replies_deliver_without_a_confirmation() -> None:
    """What a repeat looks like from the broker's side."""
    sink = MemorySink("memory")
    sink.swallow_replies()
    message = make_message("d")
    [outcome] = await sink.publish([message])
    assert (outcome.status, outcome.sink_down) == (Status.UNAVAILABLE, True)
    sink.up()
    await sink.publish([message])
    assert ids(sink.of("d")) == [message.id] * 2


async def test_only_the_latest_messages_are_kept() -> None:
    """A dry run over a million rows stays small, and still counts them."""
    sink = MemorySink("memory", MemoryOptions(messages_max=5))
    batch = make_messages("d", 12)
    await sink.publish(batch)
    assert ids(sink.messages) == ids(batch[-5:])
    assert sink.delivered == 12
