"""What the sink uses of aiormq's private parts, each against a real broker (PROTOCOLS.md 22)."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from pamqp import commands as spec

from relay.sinks.rabbitmq.encoding import Encoder
from relay.sinks.rabbitmq.wire import Channel, ConnectFailed, Ended, Wire
from relay.testing.messages import make_message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from relay.sinks.rabbitmq.faults import Fault
    from tests.conftest import MakeProxy
    from tests.servers.rabbitmq import RabbitMQ


class Recorder:
    """A listener that writes down what it is told; `ended_by` is set with the end."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.ended_by: asyncio.Future[Fault] = asyncio.get_running_loop().create_future()

    def acknowledged(self, tag: int, *, multiple: bool) -> None:
        del multiple
        self.calls.append(("ack", tag))

    def refused(self, tag: int, *, multiple: bool) -> None:
        del multiple
        self.calls.append(("nack", tag))

    def returned(self, event_id: str | None, code: int, text: str) -> None:
        self.calls.append(("return", event_id, code, text))

    def ended(self, fault: Fault) -> None:
        self.ended_by.set_result(fault)


@pytest_asyncio.fixture
async def wire(vhost: str) -> AsyncIterator[Wire]:
    made = await Wire.connect(vhost, heartbeat_seconds=30, name="wire test")
    yield made
    await made.close()


async def publish(channel: Channel, destination: str, *, exchange: str = "") -> str:
    """Publish one message and wait until the broker has read it; its id."""
    message = make_message(destination)
    channel.write(Encoder(exchange, channel.wire.frame_max).encode(message, channel.number))
    channel.published += 1
    await channel.call(spec.Basic.Qos(prefetch_count=0))
    return message.id


def test_the_private_parts_are_those_of_the_pinned_versions() -> None:
    """After an upgrade read relay/sinks/rabbitmq/wire.py again, then change this line."""
    assert (version("aiormq"), version("aio-pika")) == ("7.2.4", "10.2.1")


async def test_frames_reach_our_channel_in_the_brokers_order(wire: Wire) -> None:
    """An unroutable message is returned first and acknowledged then."""
    channel = await wire.channel(confirms=True)
    channel.listener = recorder = Recorder()
    event_id = await publish(channel, "nowhere")
    assert recorder.calls == [("return", event_id, 312, "NO_ROUTE"), ("ack", 1)]


async def test_a_channel_that_the_broker_closes_says_why_and_the_connection_lives(wire: Wire) -> None:
    channel = await wire.channel(confirms=True)
    channel.listener = recorder = Recorder()
    with pytest.raises(Ended, match="no exchange 'missing'"):
        await publish(channel, "q", exchange="missing")
    fault = await recorder.ended_by
    assert (fault.code, fault.level) == (404, "channel")
    with pytest.raises(Ended):
        await channel.call(spec.Basic.Qos(prefetch_count=0))
    other = await wire.channel(confirms=True)
    await other.call(spec.Basic.Qos(prefetch_count=0))


async def test_numbers_of_closed_channels_are_used_again(wire: Wire) -> None:
    """The broker's limit is 2,047; a relay that runs for a year opens more than that."""
    numbers = set()
    for _ in range(50):
        channel = await wire.channel(confirms=True)
        numbers.add(channel.number)
        channel.close()
    assert max(numbers) <= 2


async def test_late_answers_to_a_channel_that_was_given_up_reach_nobody(wire: Wire) -> None:
    channel = await wire.channel(confirms=True)
    channel.listener = recorder = Recorder()
    channel.write(Encoder("", wire.frame_max).encode(make_message("nowhere"), channel.number))
    channel.close()
    other = await wire.channel(confirms=True)
    await other.call(spec.Basic.Qos(prefetch_count=0))
    assert recorder.calls == []
    assert wire.ended is None


async def test_a_listener_that_cannot_believe_the_broker_ends_the_connection(wire: Wire) -> None:
    """Else a message could be settled that nobody has."""

    class Disbeliever(Recorder):
        def acknowledged(self, tag: int, *, multiple: bool) -> None:
            raise LookupError(f"no such tag: {tag} {multiple}")

    channel = await wire.channel(confirms=True)
    channel.listener = recorder = Disbeliever()
    with pytest.raises(Ended):
        await publish(channel, "nowhere")
    assert "no such tag" in (await recorder.ended_by).text
    assert wire.ended is not None


async def test_a_lost_connection_ends_its_channels(
    rabbitmq: RabbitMQ, unique: str, vhost: str, proxy: MakeProxy
) -> None:
    broken = await proxy(rabbitmq.host, rabbitmq.port)
    wire = await Wire.connect(
        f"amqp://guest:guest@{broken.host}:{broken.port}/{unique}", heartbeat_seconds=30, name="wire test"
    )
    channel = await wire.channel(confirms=True)
    channel.listener = recorder = Recorder()
    broken.cut()
    assert (await recorder.ended_by).level == "connection"
    with pytest.raises(Ended):
        await wire.channel(confirms=True)
    await wire.close()


async def test_a_cancelled_attempt_leaves_no_connection(rabbitmq: RabbitMQ, proxy: MakeProxy) -> None:
    """In the middle of the handshake, with a peer that says nothing."""
    silent = await proxy(rabbitmq.host, rabbitmq.port)
    silent.swallow_replies()
    task = asyncio.create_task(
        Wire.connect(f"amqp://guest:guest@{silent.host}:{silent.port}/", heartbeat_seconds=30, name="wire test")
    )
    await silent.wait_until(lambda: silent.bytes_to_server > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await silent.wait_until(lambda: silent.open_connections == 0)


async def test_the_broker_knows_the_connection_by_name(rabbitmq: RabbitMQ, unique: str, wire: Wire) -> None:
    """So that an operator sees whose it is."""
    assert wire.ended is None
    async with asyncio.timeout(20):
        while "wire test" not in str(await asyncio.to_thread(rabbitmq.api, "GET", f"/api/vhosts/{unique}/connections")):
            continue


async def test_a_refused_vhost_is_told_in_the_brokers_words(rabbitmq: RabbitMQ) -> None:
    with pytest.raises(ConnectFailed, match="vhost nowhere not found") as caught:
        await Wire.connect(rabbitmq.url("nowhere"), heartbeat_seconds=30, name="wire test")
    assert caught.value.fault.code == 530


async def test_closing_twice_and_after_an_abort_is_fine(vhost: str) -> None:
    for abort in (False, True):
        wire = await Wire.connect(vhost, heartbeat_seconds=30, name="wire test")
        if abort:
            wire.abort("test")
        await wire.close()
        await wire.close()
        assert wire.ended is not None
