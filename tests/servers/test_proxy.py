"""The proxy that tests break: it must break exactly what it says."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.conftest import MakeProxy
    from tests.servers.proxy import Proxy


@pytest.fixture
async def echo() -> AsyncIterator[list[bytes]]:
    """What an echo server has received; the first entry is its port in text."""
    received: list[bytes] = []
    serving: set[asyncio.Task[None] | None] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        try:
            while data := await reader.read(1000):
                received.append(data)
                writer.write(data)
        except ConnectionResetError:
            pass
        finally:
            writer.transport.abort()
            serving.discard(asyncio.current_task())

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    received.append(str(server.sockets[0].getsockname()[1]).encode())
    yield received
    server.close()
    await asyncio.gather(*filter(None, serving), return_exceptions=True)


@pytest.fixture
async def proxied(proxy: MakeProxy, echo: list[bytes]) -> Proxy:
    """A healthy proxy in front of the echo server."""
    return await proxy("127.0.0.1", int(echo[0]))


class Client:
    """A connection to a proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, proxy: Proxy) -> Client:
        return cls(*await asyncio.open_connection(proxy.host, proxy.port))

    async def ask(self, data: bytes) -> bytes:
        self.writer.write(data)
        return await self.reader.readexactly(len(data))

    async def is_reset(self) -> bool:
        try:
            return await self.reader.read() == b""
        except ConnectionResetError:
            return True
        finally:
            self.writer.transport.abort()

    def close(self) -> None:
        self.writer.transport.abort()


async def test_a_healthy_proxy_forwards_and_counts(proxied: Proxy) -> None:
    client = await Client.connect(proxied)
    assert await client.ask(b"hello") == b"hello"
    assert (proxied.connections, proxied.bytes_to_server, proxied.bytes_to_client) == (1, 5, 5)
    client.close()
    await proxied.wait_until(lambda: proxied.open_connections == 0)


async def test_cut_resets_open_connections_and_refuses_new_ones_until_healed(proxied: Proxy) -> None:
    client = await Client.connect(proxied)
    await client.ask(b"hello")
    proxied.cut()
    assert await client.is_reset()
    with pytest.raises(ConnectionRefusedError):
        await Client.connect(proxied)
    await proxied.heal()
    again = await Client.connect(proxied)
    assert await again.ask(b"back") == b"back"
    again.close()


async def test_refuse_leaves_open_connections_alone(proxied: Proxy) -> None:
    client = await Client.connect(proxied)
    await client.ask(b"hello")
    proxied.refuse()
    with pytest.raises(ConnectionRefusedError):
        await Client.connect(proxied)
    assert await client.ask(b"still here") == b"still here"
    client.close()


async def test_cut_connections_lets_clients_come_back_at_once(proxied: Proxy) -> None:
    client = await Client.connect(proxied)
    await client.ask(b"hello")
    proxied.cut_connections()
    assert await client.is_reset()
    again = await Client.connect(proxied)
    assert await again.ask(b"back") == b"back"
    again.close()


async def test_swallowed_replies_reach_the_server_but_not_the_client(proxied: Proxy, echo: list[bytes]) -> None:
    """Healing resets the connection, since its stream has a hole."""
    client = await Client.connect(proxied)
    await client.ask(b"hello")
    proxied.swallow_replies()
    client.writer.write(b"lost answer")
    await proxied.wait_until(lambda: proxied.bytes_swallowed == len(b"lost answer"))
    assert echo[-1] == b"lost answer"
    assert proxied.bytes_to_client == len(b"hello")
    await proxied.heal()
    assert await client.is_reset()


async def test_delay_holds_both_directions(proxied: Proxy) -> None:
    client = await Client.connect(proxied)
    proxied.delay(0.05)
    began = time.monotonic()
    await client.ask(b"hello")
    assert time.monotonic() - began >= 0.1
    client.close()


async def test_throttle_limits_the_rate(proxied: Proxy) -> None:
    """2,000 bytes there and back again at 10,000 a second; the two directions overlap."""
    client = await Client.connect(proxied)
    proxied.throttle(10_000)
    began = time.monotonic()
    await client.ask(b"x" * 2_000)
    assert time.monotonic() - began >= 0.2
    client.close()


async def test_a_server_that_is_gone_resets_the_client(proxy: MakeProxy, unused_tcp_port: int) -> None:
    client = await Client.connect(await proxy("127.0.0.1", unused_tcp_port))
    assert await client.is_reset()


async def test_the_end_of_one_direction_is_passed_on(proxied: Proxy) -> None:
    """The client says that it has no more to send, and still gets its answer."""
    client = await Client.connect(proxied)
    client.writer.write(b"last words")
    client.writer.write_eof()
    assert await client.reader.read() == b"last words"
    client.close()
