"""The Kafka sink under the contract suite, on a real broker behind a proxy, read by a consumer that knows no relay."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import pytest

from relay.sinks.kafka import KafkaOptions, KafkaSink
from relay.testing.messages import make_message
from relay.testing.sink_contract import Harness, Received, SinkContract
from tests.integration.kafka_reader import create_topic, records_of

if TYPE_CHECKING:
    from relay.sink import Sink
    from relay.types import Message
    from tests.servers.kafka import Kafka
    from tests.servers.proxy import Proxy

PARTITIONS = 3


class KafkaHarness(Harness):
    """The shared broker's second listener, which clients reach only through the proxy."""

    can_break = True
    deadline_seconds = 1.5

    def __init__(self, kafka: Kafka, proxy: Proxy, *, compression: str = "none") -> None:
        self._kafka = kafka
        self._proxy = proxy
        self._compression = compression
        self._prefix = f"t{secrets.token_hex(5)}"
        self._topics = 0
        self._held_links: set[object] = set()

    def make(self) -> Sink:
        options = KafkaOptions.model_validate(
            {
                "bootstrap_servers": self._kafka.proxied_bootstrap_servers,
                "compression": self._compression,
                "publish_timeout_seconds": self.deadline_seconds,
                "concurrency": 3,
            }
        )
        return KafkaSink("kafka", options)

    async def destination(self) -> str:
        self._topics += 1
        return await create_topic(self._kafka, f"{self._prefix}.{self._topics}", partitions=PARTITIONS)

    async def read(self, destination: str, count: int) -> list[Received]:
        return [_received(record) for record in await records_of(self._kafka, destination, count)]

    def rejected_message(self, destination: str, key: str | None) -> Message:
        # Random bytes: no codec makes them small enough for the broker's limit of 1 MiB.
        return make_message(destination, key=key, payload=secrets.token_bytes(1_100_000))

    async def faulty_destination(self) -> str:
        return f"{self._prefix}.missing"

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


def _received(record: Any) -> Received:
    headers = {name: None if value is None else value.decode() for name, value in record.headers}
    return Received(
        id=str(headers.pop("id")),
        created_at=str(headers.pop("created_at")),
        key=None if record.key is None else record.key.decode(),
        payload=record.value,
        headers=headers,
    )


class TestKafkaSink(SinkContract):
    """Record batches as they are."""

    @pytest.fixture
    def harness(self, kafka: Kafka, kafka_proxy: Proxy) -> Harness:
        return KafkaHarness(kafka, kafka_proxy)


class TestKafkaSinkWithCompression(SinkContract):
    """Record batches compressed with zstd."""

    @pytest.fixture
    def harness(self, kafka: Kafka, kafka_proxy: Proxy) -> Harness:
        return KafkaHarness(kafka, kafka_proxy, compression="zstd")
