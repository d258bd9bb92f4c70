"""The Redis sink under the contract suite, on Valkey and on Debian's Redis, read by redis-py."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
import pytest_asyncio
from redis.asyncio import Redis as Client

from relay.headers import decode
from relay.sinks.redis import RedisOptions, RedisSink
from relay.testing.messages import make_message
from relay.testing.sink_contract import Harness, Received, SinkContract
from tests.servers.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from relay.demo.servers import Valkey
    from relay.sink import Sink
    from relay.types import Message

PASSWORD = "p@ss:w/r%d?#"
WRONG_PASSWORD = "wr@ng:pass"
PAYLOAD_BYTES_MAX = 2_000_000
READ_SECONDS_MAX = 5.0


class RedisHarness(Harness):
    """One server, a user with an awkward password on it, and a proxy in front of it."""

    can_break = True
    deadline_seconds = 1.5
    secrets = (PASSWORD, quote(PASSWORD, safe=""), WRONG_PASSWORD, quote(WRONG_PASSWORD, safe=""))

    def __init__(self, client: Client, proxy: Proxy, prefix: str) -> None:
        self._client: Any = client  # redis-py's stubs type every command as "awaitable or not"
        self._proxy = proxy
        self._prefix = prefix
        self._streams = 0
        self._held_links: set[object] = set()

    async def prepare(self) -> None:
        await self._client.acl_setuser(
            self._prefix, enabled=True, reset=True, passwords=[f"+{PASSWORD}"], keys=["*"], categories=["+@all"]
        )

    def make(self) -> Sink:
        return self._make(PASSWORD)

    def make_with_wrong_password(self) -> Sink:
        return self._make(WRONG_PASSWORD)

    async def destination(self) -> str:
        self._streams += 1
        return f"{self._prefix}:{self._streams}"

    async def read(self, destination: str, count: int) -> list[Received]:
        async with asyncio.timeout(READ_SECONDS_MAX):
            while len(entries := await self._client.xrange(destination)) < count:
                await self._client.xread({destination: "$"}, block=20)
        return [_received(fields) for _entry_id, fields in entries]

    def rejected_message(self, destination: str, key: str | None) -> Message:
        return make_message(destination, key=key, payload=b"x" * (PAYLOAD_BYTES_MAX + 1))

    async def faulty_destination(self) -> str:
        name = await self.destination()
        await self._client.set(name, "a string, not a stream")
        return name

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
        url = f"redis://{self._prefix}:{quote(password, safe='')}@{self._proxy.host}:{self._proxy.port}/0"
        options = RedisOptions.model_validate(
            {
                "url": url,
                "publish_timeout_seconds": self.deadline_seconds,
                "payload_bytes_max": PAYLOAD_BYTES_MAX,
                "concurrency": 3,
            }
        )
        return RedisSink("redis", options)


def _received(fields: dict[bytes, bytes]) -> Received:
    key, headers = fields.get(b"key"), fields.get(b"headers")
    return Received(
        id=fields[b"id"].decode(),
        key=None if key is None else key.decode(),
        payload=fields.get(b"payload"),
        headers=decode(None if headers is None else headers.decode()),
        created_at=fields[b"created_at"].decode(),
    )


class RedisContract(SinkContract):
    """The suite, once for each server."""

    @pytest_asyncio.fixture
    async def harness(self, server: Valkey) -> AsyncIterator[Harness]:
        async with Client(host=server.host, port=server.port) as client, Proxy(server.host, server.port) as proxy:
            harness = RedisHarness(client, proxy, f"t{secrets.token_hex(5)}")
            await harness.prepare()
            yield harness


class TestRedisSinkOnValkey(RedisContract):
    @pytest.fixture
    def server(self, valkey: Valkey) -> Valkey:
        return valkey


class TestRedisSinkOnRedis(RedisContract):
    @pytest.fixture
    def server(self, redis_server: Valkey) -> Valkey:
        return redis_server
