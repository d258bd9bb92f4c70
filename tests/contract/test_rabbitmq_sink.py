"""The RabbitMQ sink under the contract suite, on a real broker, read by a consumer of aio-pika's."""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from typing import TYPE_CHECKING
from urllib.parse import quote

import aio_pika
import pytest_asyncio

from relay.sinks.rabbitmq import RabbitMQOptions, RabbitMQSink
from relay.testing.messages import make_message
from relay.testing.sink_contract import Harness, Received, SinkContract
from tests.servers.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractIncomingMessage, AbstractQueue

    from relay.sink import Sink
    from relay.types import Message
    from tests.servers.rabbitmq import RabbitMQ

PASSWORD = "p@ss:w/r%d?#"
WRONG_PASSWORD = "wr@ng:pass"
EXCHANGE = "events"
READ_SECONDS_MAX = 20.0


class RabbitMQHarness(Harness):
    """A vhost, a user with an awkward password, a direct exchange, and a proxy in front of the broker."""

    can_break = True
    deadline_seconds = 1.5
    secrets = (PASSWORD, quote(PASSWORD, safe=""), WRONG_PASSWORD, quote(WRONG_PASSWORD, safe=""))

    def __init__(self, name: str, channel: AbstractChannel, exchange: AbstractExchange, proxy: Proxy) -> None:
        self._name = name
        self._channel = channel
        self._exchange = exchange
        self._proxy = proxy
        self._queues: dict[str, AbstractQueue] = {}
        self._received: dict[str, list[Received]] = defaultdict(list)
        self._held_links: set[object] = set()

    def make(self) -> Sink:
        return self._make(PASSWORD)

    def make_with_wrong_password(self) -> Sink:
        return self._make(WRONG_PASSWORD)

    async def destination(self) -> str:
        name = f"q{len(self._queues)}"
        queue = self._queues[name] = await self._channel.declare_queue(name, durable=True)
        await queue.bind(self._exchange, routing_key=name)
        received = self._received[name]

        async def consume(message: AbstractIncomingMessage) -> None:
            received.append(_received(message))

        await queue.consume(consume, no_ack=True)
        return name

    async def read(self, destination: str, count: int) -> list[Received]:
        received = self._received[destination]
        async with asyncio.timeout(READ_SECONDS_MAX):
            # The answer comes after everything that the queue had delivered on the same channel before.
            while (await self._queues[destination].declare()).message_count or len(received) < count:
                continue
        return list(received)

    def rejected_message(self, destination: str, key: str | None) -> Message:
        return make_message(destination, key=key, headers='{"larger than a frame": "' + "x" * 140_000 + '"}')

    async def faulty_destination(self) -> str:
        return "no-queue-is-bound-for-it"

    async def cut(self) -> None:
        self._proxy.cut()

    async def swallow_replies(self) -> None:
        self._proxy.swallow_replies()

    async def stall(self) -> None:
        # Held for longer than the deadline, and then forwarded: what a slow network does.
        self._proxy.delay(self.deadline_seconds + 0.5)

    async def heal(self) -> None:
        self._held_links = set(self._proxy._links)
        await self._proxy.heal()

    async def held_bytes_passed(self) -> None:
        await self._proxy.wait_until(lambda: not self._held_links & self._proxy._links)

    def _make(self, password: str) -> Sink:
        address = f"{self._proxy.host}:{self._proxy.port}/{self._name}"
        options = RabbitMQOptions.model_validate(
            {
                "url": f"amqp://{self._name}:{quote(password, safe='')}@{address}",
                "exchange": EXCHANGE,
                "publish_timeout_seconds": self.deadline_seconds,
                "channels": 3,
            }
        )
        return RabbitMQSink("rabbitmq", options)


def _received(message: AbstractIncomingMessage) -> Received:
    headers = {name: None if value is None else str(value) for name, value in message.headers.items()}
    created_at, key, tombstone = (headers.pop(name, None) for name in ("created_at", "key", "tombstone"))
    return Received(
        id=message.message_id or "",
        key=key,
        payload=None if tombstone else message.body,
        headers=headers,
        created_at=created_at or "",
    )


class TestRabbitMQSink(SinkContract):
    @pytest_asyncio.fixture
    async def harness(self, rabbitmq: RabbitMQ) -> AsyncIterator[Harness]:
        name = f"t{secrets.token_hex(5)}"
        rabbitmq.add_vhost(name)
        rabbitmq.api("PUT", f"/api/users/{name}", {"password": PASSWORD, "tags": ""})
        rabbitmq.api("PUT", f"/api/permissions/{name}/{name}", {"configure": "", "write": EXCHANGE, "read": ""})
        connection = await aio_pika.connect(rabbitmq.url(name))
        async with connection, Proxy(rabbitmq.host, rabbitmq.port) as proxy:
            channel = await connection.channel()
            exchange = await channel.declare_exchange(EXCHANGE, durable=True)
            yield RabbitMQHarness(name, channel, exchange, proxy)
        rabbitmq.delete_vhost(name)
        rabbitmq.api("DELETE", f"/api/users/{name}")
