"""One connection to Redis: handshake, one write for many commands, their replies read in bulk.

A connection whose replies have not all been read is never used again: what it still had to say would
be taken for the answer to somebody else's command (PROTOCOLS.md 21).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from hiredis import ProtocolError, Reader, ReplyError

from relay.sinks.redis.encoding import EXEC, MULTI, command
from relay.sinks.redis.errors import Verdict, judge

if TYPE_CHECKING:
    import ssl

    from relay.sinks.redis.options import Address, RedisOptions

__all__ = ["Connection", "ConnectionLost", "Identity", "Refused", "Unreachable", "connect"]

_BULK_MAX: Final = 512 * 1024 * 1024
"""`proto-max-bulk-len` of a server that does not let us ask."""

_KEEPALIVE: Final = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
_DROP_UNSENT: Final = struct.pack("ii", 1, 0)


class Unreachable(Exception):
    """No connection, or none any more. The text names the address, never a password."""


class ConnectionLost(Unreachable):
    """The connection ended before all replies were read; what was sent may or may not have happened."""


class Refused(Exception):
    """The server answered, but will not have us: password, permission, protected mode, too many clients."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.outcome.reason)
        self.verdict = verdict


@dataclass(frozen=True, slots=True)
class Identity:
    """What the server calls a connection. A restarted server counts from 1 again, so the address belongs to it."""

    number: bytes
    address: bytes


class Connection(asyncio.Protocol):
    """An open connection. One `exchange` at a time; `abort` at any time."""

    def __init__(self, address: Address) -> None:
        self.identity: Identity | None = None
        self.bulk_max = _BULK_MAX
        self.replies: list[Any] = []
        """Of the exchange in progress or, after a failure, as far as they came."""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._address = address
        self._reader = Reader()
        self._transport: asyncio.Transport | None = None
        self._expected = 0
        self._complete: asyncio.Future[None] | None = None

    @property
    def is_usable(self) -> bool:
        """Open, and in step: nothing unread, nothing unasked for."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and not self._expected and not self.replies

    @property
    def is_unanswered(self) -> bool:
        """Something was sent whose replies have not all come."""
        return self._expected > 0

    async def exchange(self, data: bytes, count: int) -> list[Any]:
        """Write `data` at once and return its `count` replies; error replies are among them as ReplyError.

        Raises ConnectionLost. After any exception, cancellation included, `replies` has what came, and the
        connection must be given up.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionLost(f"{self._address}: connection closed")
        self._expected = count
        self._complete = asyncio.get_running_loop().create_future()
        transport.write(data)
        await self._complete
        replies, self.replies = self.replies[:count], self.replies[count:]
        self._expected = 0
        return replies

    def abort(self) -> None:
        """End it now: bytes that were not sent are dropped, here and in the kernel's buffer."""
        transport = self._transport
        if transport is None:
            return
        sock = transport.get_extra_info("socket")
        if sock is not None and not transport.is_closing():
            # Without it the kernel goes on delivering its buffer after close(): late bytes of a batch that
            # has been given up (contract of `publish`). Unix sockets do not know it and do not need it.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_UNSENT)
        transport.abort()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            _keep_alive(sock)

    def data_received(self, data: bytes) -> None:
        """Collect replies; wake the exchange when it has all of them."""
        reader, replies = self._reader, self.replies
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not False:
                replies.append(reply)
        except ProtocolError:
            self.abort()
            return
        if self._expected and len(replies) >= self._expected and self._complete and not self._complete.done():
            self._complete.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the exchange in progress."""
        if not self.closed.done():
            self.closed.set_result(None)
        if self._complete is not None and not self._complete.done():
            why = "connection closed by the server" if exc is None else _explain(exc)
            self._complete.set_exception(ConnectionLost(f"{self._address}: {why}"))


async def connect(address: Address, options: RedisOptions, tls: ssl.SSLContext | None) -> Connection:
    """A connection that is authenticated, on its database, and allowed to use transactions.

    Raises Unreachable (also after `connect_timeout_seconds`) or Refused.
    """
    connection = Connection(address)
    try:
        async with asyncio.timeout(options.connect_timeout_seconds):
            await _dial(connection, address, tls)
            await _greet(connection, address, options)
    except OSError as error:  # TimeoutError is one
        connection.abort()
        raise Unreachable(f"{address}: {_explain(error)}") from None
    except BaseException:
        connection.abort()
        raise
    return connection


async def _dial(connection: Connection, address: Address, tls: ssl.SSLContext | None) -> None:
    loop = asyncio.get_running_loop()
    if address.path is not None:
        await loop.create_unix_connection(lambda: connection, address.path)
    else:
        await loop.create_connection(lambda: connection, address.host, address.port, ssl=tls)


async def _greet(connection: Connection, address: Address, options: RedisOptions) -> None:
    """All of the handshake in one round trip. What only improves things may be denied by an ACL."""
    required = [*_login(address), MULTI, EXEC]
    optional = [
        command("CLIENT", "SETNAME", options.client_name),
        command("CLIENT", "INFO"),
        command("CONFIG", "GET", "proto-max-bulk-len"),
    ]
    try:
        replies = await connection.exchange(b"".join(required + optional), len(required) + len(optional))
    except ConnectionLost:
        # Protected mode and "max number of clients" are said without being asked, before the door is shut.
        _raise_first_error(connection.replies)
        raise
    _raise_first_error(replies[: len(required)])
    _name, info, limit = replies[len(required) :]
    connection.identity = _identity(info)
    if isinstance(limit, list) and len(limit) == 2:  # noqa: PLR2004 - name and value
        connection.bulk_max = int(limit[1])


def _login(address: Address) -> list[bytes]:
    commands = []
    if address.password is not None:
        user = () if address.username is None else (address.username,)
        commands.append(command("AUTH", *user, address.password))
    if address.database:
        commands.append(command("SELECT", address.database))
    return commands


def _raise_first_error(replies: list[Any]) -> None:
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise Refused(judge(str(reply)))


def _identity(info: Any) -> Identity | None:
    """From CLIENT INFO: `id=3 addr=127.0.0.1:50000 laddr=... name=... ...`."""
    if not isinstance(info, bytes):
        return None
    pairs = dict(pair.split(b"=", 1) for pair in info.split() if b"=" in pair)
    number, address = pairs.get(b"id"), pairs.get(b"addr")
    return None if not number or not address else Identity(number, address)


def _keep_alive(sock: socket.socket) -> None:
    """An idle connection that a firewall forgot is noticed in about a minute."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _explain(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not error.errno:
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
