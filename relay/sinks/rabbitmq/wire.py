"""One connection and its channels: everything that is private in aiormq 7.2.4 and that we lean on.

aiormq connects, authenticates, keeps heartbeats and parses frames. Its `Channel` is not used: it makes
futures and tasks per message, and matches returns by message id alone (PROTOCOLS.md 20). Ours takes its place:

- `Connection.channels[number]` is our `Channel`; the connection's reader does `await channel.frames.put((n, frame))`.
- `Connection._rpc` is replaced: it loses the broker's reason when `connection.open` is refused.
- `Connection._reader_task` ends when the connection is lost, with the reason as its exception.
- `Connection._Connection__connection_unblocked` is the event behind `connection.blocked`.
- A `TransportFactory` keeps the stream, so that frames are written in bulk and the socket can be aborted.

The versions are pinned in pyproject.toml; tests/integration/test_rabbitmq_sink_wire.py covers each of these.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from socket import SO_LINGER, SOL_SOCKET
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from aiormq.connection import Connection, FrameReceiver, TCPTransportFactory, TLSTransportFactory, TransportFactory
from aiormq.exceptions import ConnectionClosed, InvalidFrameError, ProbableAuthenticationError
from pamqp import commands as spec
from pamqp import frame as frames
from pamqp.body import ContentBody
from pamqp.header import ContentHeader
from yarl import URL

from relay.sinks.rabbitmq.faults import Fault, connect_fault, lost_fault

if TYPE_CHECKING:
    from pamqp.base import Frame
    from pamqp.frame import FrameTypes

__all__ = ["Channel", "ConnectFailed", "Ended", "Listener", "Wire"]

_ACCESS_REFUSED: Final = 403
_POLITE_SECONDS: Final = 0.5
"""What a closing handshake may take before the socket is aborted."""
_ABORT_SECONDS: Final = 1.0
"""What the client library's tasks may take to notice that."""


class ConnectFailed(Exception):
    """There is no connection; `fault` says why."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.text)
        self.fault = fault


class Ended(Exception):
    """The channel or its connection ended before the reply came; `fault` says why."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.text)
        self.fault = fault


class Listener(Protocol):
    """Who publishes on a channel. Called from the reader; an exception ends the connection."""

    def acknowledged(self, tag: int, *, multiple: bool) -> None:
        """`basic.ack`."""

    def refused(self, tag: int, *, multiple: bool) -> None:
        """`basic.nack`."""

    def returned(self, event_id: str | None, code: int, text: str) -> None:
        """`basic.return`; its acknowledgement follows."""

    def ended(self, fault: Fault) -> None:
        """The channel or connection is gone; nothing more will be called."""


class _Streams(TransportFactory):
    """Opens the socket as aiormq would and keeps hold of it."""

    def __init__(self) -> None:
        self.writer: asyncio.StreamWriter | None = None

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        factory = TLSTransportFactory() if url.scheme == "amqps" else TCPTransportFactory()
        reader, self.writer = await factory.create(url, **kwargs)
        return reader, self.writer

    def is_flushed(self) -> bool:
        """The socket is open, and nothing that was written waits in the process."""
        if self.writer is None or self.writer.transport.is_closing():
            return False
        return not self.writer.transport.get_write_buffer_size()

    def abort(self) -> None:
        """Drop the connection with everything that was not transmitted yet, in the process *and* in the kernel."""
        if self.writer is None:
            return
        if not self.writer.transport.is_closing():
            socket = self.writer.transport.get_extra_info("socket")
            with suppress(OSError):
                # Without it the kernel would still deliver its send buffer to a broker that was only frozen.
                socket.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Wait until the socket that was aborted is closed: `abort` itself only asks the event loop for it."""
        if self.writer is not None:
            closed = asyncio.ensure_future(self.writer.wait_closed())
            _, pending = await asyncio.wait({closed}, timeout=_ABORT_SECONDS)
            if not pending and not closed.cancelled():
                closed.exception()  # the reason of the loss, which is known already


class _Connection(Connection):
    """aiormq's, with the broker's own words when it refuses a vhost."""

    @staticmethod
    async def _rpc(
        request: Frame,
        writer: asyncio.StreamWriter,
        frame_receiver: FrameReceiver,
        wait_response: bool = True,  # noqa: FBT001, FBT002  aiormq's signature
    ) -> FrameTypes | None:
        writer.write(frames.marshal(request, 0))
        await writer.drain()
        if not wait_response:
            return None
        _, _, frame = await frame_receiver.get_frame()
        if isinstance(
            frame, spec.Connection.Close
        ):  # aiormq looks for it after `valid_responses`, and so never sees it
            if frame.reply_code == _ACCESS_REFUSED:
                raise ProbableAuthenticationError(frame.reply_text)
            raise ConnectionClosed(frame.reply_code, frame.reply_text)
        if request.synchronous and frame.name not in request.valid_responses:
            raise InvalidFrameError(f"Expected one of {request.valid_responses!r}, got {frame!r}")
        return frame


class Wire:
    """An open connection. Made by `connect`; `ended` is set once, when it is lost or closed."""

    def __init__(self, connection: Connection, streams: _Streams) -> None:
        self.ended: Fault | None = None
        self.frame_max: int = connection.connection_tune.frame_max or 0
        self._connection = connection
        self._streams = streams
        reader = cast("asyncio.Task[None]", connection._reader_task)  # noqa: SLF001  see the module's docstring
        reader.add_done_callback(self._reader_done)

    @classmethod
    async def connect(cls, url: str, *, heartbeat_seconds: int, name: str) -> Wire:
        """Connect once. Raises ConnectFailed; when cancelled, leaves no socket and no task behind."""
        streams = _Streams()
        connection = _Connection(
            URL(url).update_query(heartbeat=heartbeat_seconds),
            transport_factory=streams,
            client_properties={"product": "outbox-relay", "connection_name": name},
        )
        attempt = asyncio.ensure_future(_attempt(connection))
        try:
            # Shielded: a cancelled handshake waits for the peer to close, so the socket is aborted first.
            await asyncio.shield(attempt)
        except asyncio.CancelledError:
            streams.abort()
            attempt.cancel()
            await asyncio.wait({attempt}, timeout=_ABORT_SECONDS)
            raise
        except Exception as error:  # noqa: BLE001  whatever the library or the socket raises, there is no connection
            streams.abort()
            raise ConnectFailed(connect_fault(error)) from None  # its chain would show the url of the library
        return cls(connection, streams)

    @property
    def blocked(self) -> bool:
        """The broker takes no messages from this connection: a memory or disk alarm (`connection.blocked`)."""
        unblocked: asyncio.Event = self._connection._Connection__connection_unblocked  # type: ignore[attr-defined]  # noqa: SLF001  name-mangled private
        return not unblocked.is_set()

    async def channel(self, *, confirms: bool) -> Channel:
        """Open a channel. Raises Ended."""
        if self.ended is not None:
            raise Ended(self.ended)
        number = 1
        while number in self._connection.channels:
            number += 1
        channel = Channel(self, number)
        self._connection.channels[number] = cast("Any", channel)
        try:
            await channel.call(spec.Channel.Open())
            if confirms:
                await channel.call(spec.Confirm.Select())
        except BaseException:
            channel.close()
            raise
        return channel

    def write(self, data: bytes | bytearray) -> None:
        """Hand whole frames to the socket; what it does not take at once is buffered in memory."""
        writer = self._streams.writer
        if self.ended is None and writer is not None and not writer.transport.is_closing():
            writer.transport.write(data)

    def abort(self, reason: str) -> None:
        """Drop the connection: once it is `gone`, nothing that was written and not transmitted yet will be."""
        self._end(Fault(None, reason))
        self._streams.abort()

    async def gone(self) -> None:
        """Wait until an aborted connection is closed; a moment."""
        await self._streams.gone()

    async def close(self) -> None:
        """Say goodbye, or abort when the broker does not answer; within 1.5 s. Idempotent, also after `abort`."""
        self._end(Fault(None, "the connection was closed by the relay"))
        closing = asyncio.ensure_future(self._connection.close())
        try:
            if self._streams.is_flushed() and not self.blocked:
                await asyncio.wait({closing}, timeout=_POLITE_SECONDS)
        finally:
            self._streams.abort()
            await self._finish(closing)

    async def _finish(self, closing: asyncio.Future[None]) -> None:
        connection = self._connection
        tasks = {closing, *(wrapper.task for wrapper in (connection._reader_task, connection._writer_task))}  # type: ignore[union-attr]  # noqa: SLF001
        _, pending = await asyncio.wait(tasks, timeout=_ABORT_SECONDS)
        for task in pending:
            task.cancel()
        with suppress(Exception, asyncio.CancelledError):
            await closing

    def _reader_done(self, reader: asyncio.Task[None]) -> None:
        error = None if reader.cancelled() else reader.exception()
        self._end(lost_fault(error))

    def _end(self, fault: Fault) -> None:
        if self.ended is not None:
            return
        self.ended = fault
        for channel in cast("list[Channel]", list(self._connection.channels.values())):
            channel.end(fault)


async def _attempt(connection: Connection) -> None:
    await connection.connect()


class Channel:
    """One AMQP channel, used by one publisher at a time.

    `published`  messages published so far: the delivery tag of the latest
    `ended`      why it is of no use any more, or None
    """

    def __init__(self, wire: Wire, number: int) -> None:
        self.wire = wire
        self.number = number
        self.published = 0
        self.ended: Fault | None = None
        self.listener: Listener | None = None
        self._reply: asyncio.Future[Frame] | None = None
        self._return: spec.Basic.Return | None = None
        self._returned_id: str | None = None
        self._returned_bytes_left = 0

    @property
    def frames(self) -> Channel:
        """Where the connection's reader puts frames: no queue, no task, they are handled at once."""
        return self

    async def put(self, item: tuple[int, Any]) -> None:
        """Handle one frame from the broker."""
        frame = item[1]
        match frame:
            case spec.Basic.Ack():
                self._answered(frame)
            case spec.Basic.Nack():
                self._answered(frame)
            case spec.Basic.Return():
                self._return = frame
            case ContentHeader():
                self._returned_id = frame.properties.message_id
                self._returned_bytes_left = frame.body_size
                self._end_of_return()
            case ContentBody():
                self._returned_bytes_left -= len(frame.value)
                self._end_of_return()
            case spec.Channel.Close():
                self.wire.write(frames.marshal(spec.Channel.CloseOk(), self.number))
                self.end(Fault(frame.reply_code, str(frame.reply_text), "channel"))
            case _:
                self._replied(frame)

    def _answered(self, frame: spec.Basic.Ack | spec.Basic.Nack) -> None:
        if self.listener is None:
            return
        tag, multiple = frame.delivery_tag or 0, bool(frame.multiple)
        if isinstance(frame, spec.Basic.Ack):
            self.listener.acknowledged(tag, multiple=multiple)
        else:
            self.listener.refused(tag, multiple=multiple)

    def _end_of_return(self) -> None:
        if self._returned_bytes_left > 0 or self._return is None:
            return
        returned, self._return = self._return, None
        if self.listener is not None:
            self.listener.returned(self._returned_id, returned.reply_code or 0, returned.reply_text or "")

    def _replied(self, frame: Frame) -> None:
        reply, self._reply = self._reply, None
        if reply is not None and not reply.done():
            reply.set_result(frame)

    async def call(self, method: Frame) -> Frame:
        """Send a method and wait for its reply; one at a time. Raises Ended. Cancelled: the channel is of no use."""
        if self.ended is not None:
            raise Ended(self.ended)
        reply: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._reply = reply
        self.wire.write(frames.marshal(method, self.number))
        return await reply

    def write(self, data: bytes | bytearray) -> None:
        """Publish frames that were encoded for this channel's number."""
        self.wire.write(data)

    def close(self) -> None:
        """Give the channel up without waiting; its number is free again when the broker has agreed."""
        if self.ended is not None:
            return
        self.end(Fault(None, "the channel was closed by the relay", "channel"))
        self.wire.write(
            frames.marshal(
                spec.Channel.Close(reply_code=200, reply_text="", class_id=0, method_id=0),
                self.number,
            )
        )

    def end(self, fault: Fault) -> None:
        """Nothing more will come: tell whoever waits."""
        if self.ended is not None:
            return
        self.ended = fault
        reply, self._reply = self._reply, None
        if reply is not None and not reply.done():
            reply.set_exception(Ended(fault))
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.ended(fault)
