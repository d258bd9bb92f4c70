"""The sink's connection and its idle channels: made when needed, replaced when lost, closed without a trace.

We reconnect ourselves. aio-pika's robust connection would publish again by itself, long after the
batch was given up ("stale bursts", FIELD.md D4), and wait without a bound.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from relay.sinks.rabbitmq.faults import Fault
from relay.sinks.rabbitmq.wire import Channel, ConnectFailed, Wire

if TYPE_CHECKING:
    from relay.sinks.rabbitmq.options import RabbitMQOptions

__all__ = ["Connections"]

_CLOSED: Final = Fault(None, "the sink is closed", "connect")


class Connections:
    """At most one open connection, and channels in confirm mode on it.

    The caller bounds every wait. Nothing is retried here: a failed attempt is the caller's to repeat.
    """

    def __init__(self, name: str, options: RabbitMQOptions) -> None:
        self._name = name
        self._options = options
        self._wire: Wire | None = None
        self._idle: list[Channel] = []
        self._leased = 0
        self._connecting = asyncio.Lock()
        self._failure: tuple[float, Fault] | None = None
        self._retired: set[asyncio.Task[None]] = set()
        self._closed = False

    async def lease(self) -> Channel:
        """A channel of one's own, in confirm mode. Raises ConnectFailed or Ended. `release` it afterwards."""
        wire = await self.wire()
        channel = self._pop_idle(wire) or await wire.channel(confirms=True)
        self._leased += 1
        return channel

    def release(self, channel: Channel) -> None:
        """Give a channel back; it is used again unless it, or its connection, has ended."""
        self._leased -= 1
        if channel.ended is None and channel.wire is self._wire:
            self._idle.append(channel)

    def _pop_idle(self, wire: Wire) -> Channel | None:
        while self._idle:
            channel = self._idle.pop()
            if channel.ended is None and channel.wire is wire:
                return channel
        return None

    async def wire(self) -> Wire:
        """The open connection, made now if there is none. Raises ConnectFailed."""
        if (wire := self._open_wire()) is not None:
            return wire
        asked = asyncio.get_running_loop().time()
        async with self._connecting:
            if (wire := self._open_wire()) is not None:
                return wire
            if self._failure is not None and self._failure[0] >= asked:
                # All who waited for this attempt share its result; else they would fail one by one, each after its time.
                raise ConnectFailed(self._failure[1])
            return await self._connect()

    def _open_wire(self) -> Wire | None:
        if self._closed:
            raise ConnectFailed(_CLOSED)
        return self._wire if self._wire is not None and self._wire.ended is None else None

    async def _connect(self) -> Wire:
        self._retire()
        try:
            wire = await Wire.connect(
                self._options.url.get_secret_value(),
                heartbeat_seconds=self._options.heartbeat_seconds,
                name=f"outbox-relay sink {self._name}",
            )
        except ConnectFailed as failed:
            self._failure = (asyncio.get_running_loop().time(), failed.fault)
            raise
        self._wire = wire
        if self._closed:  # meanwhile
            await self.close()
            raise ConnectFailed(_CLOSED)
        return wire

    @property
    def blocked(self) -> bool:
        """There is a connection, and the broker has said that it takes no messages from it."""
        return self._wire is not None and self._wire.ended is None and self._wire.blocked

    def drop(self, reason: str) -> None:
        """Abort the connection; the next lease makes another."""
        if self._wire is not None:
            self._wire.abort(reason)
        self._retire()

    def drop_if_idle(self, reason: str) -> None:
        """Abort the connection unless a batch is using it, whose own deadline will then judge it."""
        if not self._leased:
            self.drop(reason)

    def _retire(self) -> None:
        """Let the client library's tasks of a lost connection end in the background."""
        wire, self._wire = self._wire, None
        self._idle.clear()
        if wire is not None:
            task = asyncio.create_task(wire.close(), name=f"rabbitmq {self._name}: close")
            self._retired.add(task)
            task.add_done_callback(self._retired.discard)

    async def close(self) -> None:
        """Close everything, within 2 s whatever the broker does. Idempotent."""
        self._closed = True
        self._retire()
        if self._retired:
            await asyncio.wait(self._retired)
