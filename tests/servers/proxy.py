"""A TCP proxy that a test can break: cut, refuse, delay, throttle, swallow replies; `heal` undoes it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

from relay.demo.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Proxy"]

_CHUNK = 65_536


class _Link:
    """One client's connection and ours to the server."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.lost_replies = False

    def cut(self) -> None:
        """Reset both connections: what a cut cable or a killed process looks like."""
        self.client.transport.abort()
        self.server.transport.abort()


class Proxy:
    """Forwards a loopback port to `(host, port)`. Faults act on connections that are open and on new ones.

    Counters: `connections` made so far, `bytes_to_server` and `bytes_to_client` forwarded,
    `bytes_swallowed` read from the server and thrown away.
    """

    def __init__(self, target_host: str, target_port: int, *, port: int | None = None) -> None:
        self.target = (target_host, target_port)
        self.host = "127.0.0.1"
        self.port = port or free_port()
        self.connections = 0
        self.bytes_to_server = 0
        self.bytes_to_client = 0
        self.bytes_swallowed = 0
        self._swallowing = False
        self._delay_seconds = 0.0
        self._bytes_per_second = 0.0
        self._listener: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._progress = asyncio.Condition()

    @property
    def open_connections(self) -> int:
        """Connections that are open now."""
        return len(self._links)

    def cut(self) -> None:
        """Reset every connection and refuse new ones."""
        self.refuse()
        self.cut_connections()

    def cut_connections(self) -> None:
        """Reset every connection; new ones are welcome."""
        for link in self._links:
            link.cut()

    def refuse(self) -> None:
        """Refuse new connections; open ones live on."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def delay(self, seconds: float) -> None:
        """Hold every chunk that long, in both directions."""
        self._delay_seconds = seconds

    def throttle(self, bytes_per_second: float) -> None:
        """Let so many bytes a second through, for each connection and direction."""
        self._bytes_per_second = bytes_per_second

    def swallow_replies(self) -> None:
        """The server receives everything, but its answers are read and thrown away."""
        self._swallowing = True

    async def heal(self) -> None:
        """Forward faithfully again, on the same port.

        Connections that lost replies are reset: TCP never leaves out a part of a stream and goes on.
        """
        self._swallowing = False
        self._delay_seconds = self._bytes_per_second = 0.0
        for link in self._links:
            if link.lost_replies:
                link.cut()
        if self._listener is None:
            self._listener = await asyncio.start_server(self._accept, self.host, self.port)

    async def wait_until(self, happened: Callable[[], bool]) -> None:
        """Wait until it is true; asked after every connection, chunk and end: `lambda: proxy.connections > 1`."""
        async with self._progress:
            await self._progress.wait_for(happened)

    async def __aenter__(self) -> Self:
        await self.heal()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, client_reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        try:
            server_reader, server = await asyncio.open_connection(*self.target)
        except OSError:
            client.transport.abort()
            return
        link = _Link(client, server)
        self._links.add(link)
        self.connections += 1
        await self._made_progress()
        try:
            await asyncio.gather(self._to_server(link, client_reader), self._to_client(link, server_reader))
        finally:
            link.cut()
            self._links.discard(link)
            await self._made_progress()

    async def _to_server(self, link: _Link, reader: asyncio.StreamReader) -> None:
        while chunk := await self._read(link, reader):
            self.bytes_to_server += len(chunk)
            await self._write(link, link.server, chunk)
        await self._write_end(link.server)

    async def _to_client(self, link: _Link, reader: asyncio.StreamReader) -> None:
        while chunk := await self._read(link, reader):
            if self._swallowing:
                self.bytes_swallowed += len(chunk)
                link.lost_replies = True
            else:
                self.bytes_to_client += len(chunk)
                await self._write(link, link.client, chunk)
            await self._made_progress()
        await self._write_end(link.client)

    async def _read(self, link: _Link, reader: asyncio.StreamReader) -> bytes:
        """The next chunk, after the time that the faults hold it; empty at the end of the stream."""
        # Small steps under a throttle, so that the flow is slow and not a burst now and then.
        size = min(_CHUNK, int(self._bytes_per_second / 20) + 1) if self._bytes_per_second else _CHUNK
        try:
            chunk = await reader.read(size)
        except OSError:  # one side was reset; so must be the other
            link.cut()
            return b""
        if self._bytes_per_second:
            await asyncio.sleep(len(chunk) / self._bytes_per_second)
        await asyncio.sleep(self._delay_seconds)
        return chunk

    async def _write(self, link: _Link, writer: asyncio.StreamWriter, chunk: bytes) -> None:
        writer.write(chunk)
        try:
            await writer.drain()
        except OSError:
            link.cut()
        await self._made_progress()

    @staticmethod
    async def _write_end(writer: asyncio.StreamWriter) -> None:
        """Pass on the end of one direction; the other may still have something to say."""
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def _made_progress(self) -> None:
        async with self._progress:
            self._progress.notify_all()
