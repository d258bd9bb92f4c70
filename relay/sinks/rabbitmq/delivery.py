"""One batch on one channel: writes what may go, reads the confirms, writes what they release.

There is no task and no future per message: frames are marshalled into few large writes, and one future
says that the batch, or the channel, is through. A key's next message leaves as soon as the confirm of
the one before it is read, without waiting for the rest of its wave.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from relay.errors import MessageRejected
from relay.sink import CONFIRMED, rejected, unavailable

if TYPE_CHECKING:
    from relay.sinks.rabbitmq.encoding import Encoder
    from relay.sinks.rabbitmq.faults import Fault
    from relay.sinks.rabbitmq.ledger import Ledger
    from relay.sinks.rabbitmq.wire import Channel

__all__ = ["Delivery"]

_WRITE_BYTES: Final = 64 * 1024
"""Bytes of one write: large enough to amortise it, small enough that the broker starts before all is encoded."""

_REFUSED: Final = unavailable("the broker refused it (basic.nack): a queue is full, or failed to store it")


class Delivery:
    """Listens on the channel until every message of the ledger has its outcome, or the channel ends.

    `finished` gets None, or the fault that ended the channel. `last_answer` is the loop's time at
    which the broker last answered.
    """

    def __init__(self, ledger: Ledger, channel: Channel, encoder: Encoder) -> None:
        self._loop = asyncio.get_running_loop()
        self._ledger = ledger
        self._channel = channel
        self._encoder = encoder
        self._pump_is_due = False
        self.finished: asyncio.Future[Fault | None] = self._loop.create_future()
        self.last_answer = self._loop.time()

    def start(self) -> None:
        """Send the first wave."""
        if self._channel.ended is not None:
            self.finished.set_result(self._channel.ended)
            return
        self._channel.listener = self
        self._ledger.attach(self._channel.published + 1)
        self._pump()

    def stop(self) -> None:
        """Listen no longer; whatever the broker says from now on is ignored."""
        if self._channel.listener is self:
            self._channel.listener = None
        if not self.finished.done():
            self.finished.cancel()

    @property
    def is_finished(self) -> bool:
        """All is answered or the channel ended, and it was not stopped before."""
        return self.finished.done() and not self.finished.cancelled()

    # --- Listener ---

    def acknowledged(self, tag: int, *, multiple: bool) -> None:
        """`basic.ack`: confirmed, unless it was returned before."""
        self._ledger.answer(tag, CONFIRMED, multiple=multiple)
        self._go_on()

    def refused(self, tag: int, *, multiple: bool) -> None:
        """`basic.nack`."""
        self._ledger.answer(tag, _REFUSED, multiple=multiple)
        self._go_on()

    def returned(self, event_id: str | None, code: int, text: str) -> None:
        """`basic.return`: no queue takes it, which may change; the others are not concerned."""
        self._ledger.returned(
            event_id, unavailable(f"the broker returned it: {text} ({code}), no queue is bound for it")
        )

    def ended(self, fault: Fault) -> None:
        """The channel is gone."""
        if not self.finished.done():
            self.finished.set_result(fault)

    # --- sending ---

    def _go_on(self) -> None:
        self.last_answer = self._loop.time()
        # Not at once: the reader handles all frames that it has before the loop goes on, so that
        # whatever they release leaves in one write.
        if not self._pump_is_due:
            self._pump_is_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_is_due = False
        if self.finished.done() or self._channel.ended is not None:
            return
        try:
            self._send_what_may_go()
        except Exception as error:  # noqa: BLE001  a callback's exception would reach nobody: publish would wait in vain
            self.finished.set_exception(error)
            return
        if not self._ledger.open:
            self._channel.listener = None
            self.finished.set_result(None)

    def _send_what_may_go(self) -> None:
        ledger, channel, buffer = self._ledger, self._channel, bytearray()
        batch, encode, number = ledger.batch, self._encoder.encode, channel.number
        while (index := ledger.take()) is not None:
            try:
                buffer += encode(batch[index], number)
            except MessageRejected as reason:
                ledger.settle(index, rejected(str(reason)))
                continue
            ledger.sent(index)
            channel.published += 1
            if len(buffer) >= _WRITE_BYTES:
                channel.write(buffer)
                buffer = bytearray()
        if buffer:
            channel.write(buffer)
