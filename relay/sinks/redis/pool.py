"""Connections that nobody uses at the moment, and the fence around those that were given up.

A connection that is given up with commands unanswered may still hold them in the server's own receive
buffer (a server that was stopped for a minute, a network that was slow): they would run long after the
batch was sent again, on another connection, and was settled. So before anything else is sent on any
connection, the server is told to kill the old one: then its commands have run already, or never will.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from relay.sinks.redis.connection import Connection, Identity, Unreachable
from relay.sinks.redis.encoding import command

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

__all__ = ["Pool"]

_CLOSE_SECONDS_MAX: Final = 1.0


class Pool:
    """Hands out connections, most recently used first. `connect` makes new ones; `size` are kept."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]], size: int) -> None:
        self._connect = connect
        self._size = size
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._given_up: set[Identity] = set()
        self._closed = False

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection for one caller. If the block raises, or leaves replies unread, it is given up.

        Raises Unreachable or Refused.
        """
        connection = await self._take()
        try:
            yield connection
        finally:
            self._put_back(connection)

    async def close(self) -> None:
        """Abort all connections, those in use included; wait until their sockets are closed, a second at most."""
        self._closed = True
        for connection in self._all:
            connection.abort()
        pending = [connection.closed for connection in self._all]
        self._idle.clear()
        self._all.clear()
        if pending:
            await asyncio.wait(pending, timeout=_CLOSE_SECONDS_MAX)

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                break
            self._drop(connection)
        else:
            connection = await self._new()
        try:
            await self._fence(connection)
        except BaseException:
            self._drop(connection)
            raise
        return connection

    async def _new(self) -> Connection:
        if self._closed:
            raise Unreachable("the sink is closed")
        connection = await self._connect()
        self._all.add(connection)
        return connection

    async def _fence(self, connection: Connection) -> None:
        """Kill what was given up. An ACL may deny it: then the closed socket has to be enough."""
        if not self._given_up:
            return
        victims = tuple(self._given_up)
        # Id *and* address: after a restart the id alone may be somebody else's.
        kills = [command("CLIENT", "KILL", "ID", v.number, "ADDR", v.address, "SKIPME", "yes") for v in victims]
        await connection.exchange(b"".join(kills), len(kills))
        self._given_up.difference_update(victims)

    def _put_back(self, connection: Connection) -> None:
        if connection.is_usable and not self._closed and len(self._idle) < self._size:
            self._idle.append(connection)
        else:
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        if connection.is_unanswered and connection.identity is not None:
            self._given_up.add(connection.identity)
        connection.abort()
        self._all.discard(connection)
