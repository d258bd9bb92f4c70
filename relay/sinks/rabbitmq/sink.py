"""The RabbitMQ sink: one connection, a channel per batch in flight, a deadline, and who is charged with a fault.

Keeps DESIGN.md promises 2 to 4 on RabbitMQ. Batches of one key never overlap (contract of `publish`), so
its messages may take any channel: the one before was confirmed, or its channel was given up.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Final

from pamqp import commands as spec

from relay.errors import SinkUnavailable
from relay.sink import Outcome, Status, unavailable
from relay.sinks.rabbitmq.connections import Connections
from relay.sinks.rabbitmq.delivery import Delivery
from relay.sinks.rabbitmq.encoding import Encoder
from relay.sinks.rabbitmq.faults import Blame, Fault, verdict
from relay.sinks.rabbitmq.ledger import UNBOUNDED, Ledger
from relay.sinks.rabbitmq.options import RabbitMQOptions
from relay.sinks.rabbitmq.wire import Channel, ConnectFailed, Ended

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel

    from relay.types import Message

__all__ = ["RabbitMQSink"]

_PING_SECONDS_MAX: Final = 5.0
_PROBE_SECONDS_MAX: Final = 1.0
"""Kept back from the time for silence, to ask the broker whether it is alive."""
_PATIENCE: Final = 4
"""How many times `publish_timeout_seconds` a batch may take in all while the broker is slow but not silent."""

_BLOCKED: Final = "RabbitMQ blocks publishers: resource alarm (memory or disk, see `rabbitmqctl status`)"


class RabbitMQSink:
    """A `relay.sink.Sink` over AMQP 0-9-1."""

    Options: ClassVar[type[BaseModel]] = RabbitMQOptions

    def __init__(self, name: str, options: RabbitMQOptions) -> None:
        self.name = name
        self._options = options
        self._connections = Connections(name, options)
        self._free = asyncio.Semaphore(options.channels)
        self._encoder_made: Encoder | None = None

    @property
    def concurrency(self) -> int:
        """Batches in flight, each on its own channel."""
        return self._options.channels

    async def open(self) -> None:
        """Nothing to connect yet. Quiets the client library, whose log says each fault again, with a traceback."""
        logging.getLogger("aiormq").setLevel(logging.CRITICAL)

    async def ping(self) -> None:
        """Connect and look for the exchange. Raises SinkUnavailable, PermissionMissing or InvalidConfig."""
        seconds = min(_PING_SECONDS_MAX, self._silence_seconds)
        try:
            async with asyncio.timeout(seconds):
                await self._ping()
        except TimeoutError:
            blocked = self._connections.blocked
            self._connections.drop_if_idle("the broker did not answer")
            raise SinkUnavailable(_BLOCKED if blocked else f"RabbitMQ did not answer within {seconds:g} s") from None
        except (ConnectFailed, Ended) as failed:
            raise verdict(failed.fault).error() from None

    async def _ping(self) -> None:
        wire = await self._connections.wire()
        if wire.blocked:
            raise SinkUnavailable(_BLOCKED)
        channel = await wire.channel(confirms=False)
        try:
            if self._options.exchange:  # the default one always exists, and RabbitMQ refuses to speak about it
                await channel.call(spec.Exchange.Declare(exchange=self._options.exchange, passive=True))
        finally:
            channel.close()

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        """See `relay.sink.Sink.publish`.

        Given up when the broker has been silent for `publish_timeout_seconds`, connecting included, and
        after four times as long whatever happens.
        """
        ledger = Ledger(batch)
        try:
            await self._deliver(ledger)
        except TimeoutError:
            self._connections.drop_if_idle("the broker did not answer")
            ledger.fail(unavailable(self._after_seconds("RabbitMQ did not answer"), sink_down=True))
        except (ConnectFailed, Ended) as failed:
            ledger.fail(verdict(failed.fault).outcome)
        except Exception as error:  # noqa: BLE001  the contract: one outcome each, whatever happened
            self._connections.drop("after an unexpected error")
            ledger.fail(unavailable(f"unexpected {type(error).__name__} in the RabbitMQ sink", sink_down=True))
        return ledger.outcomes

    async def close(self) -> None:
        """Close the connection, politely if nothing is in flight and the broker answers; within 2 s."""
        await self._connections.close()

    # --- one batch ---

    async def _deliver(self, ledger: Ledger) -> None:
        latest = self._now() + _PATIENCE * self._silence_seconds
        async with asyncio.timeout(self._silence_seconds):
            await self._free.acquire()
        try:
            while ledger.open:
                async with asyncio.timeout_at(min(self._now() + self._silence_seconds, latest)):
                    channel = await self._connections.lease()
                try:
                    await self._transmit(ledger, channel, latest)
                finally:
                    self._connections.release(channel)
        finally:
            self._free.release()

    async def _transmit(self, ledger: Ledger, channel: Channel, latest: float) -> None:
        """Send on one channel until all is answered, the channel ends, or the broker is silent for too long."""
        delivery = Delivery(ledger, channel, self._encoder(channel.wire.frame_max))
        try:
            delivery.start()
            await self._wait(delivery, latest)
            answers = delivery.is_finished or await self._answers(channel)
        except asyncio.CancelledError:
            channel.wire.abort("a batch was abandoned")  # not a byte of it may follow
            await channel.wire.gone()
            raise
        finally:
            delivery.stop()
        if not delivery.is_finished:
            await self._give_up(ledger, channel, delivery, answers=answers)
        elif (fault := delivery.finished.result()) is not None:
            _charge(ledger, fault)

    async def _wait(self, delivery: Delivery, latest: float) -> None:
        """Until the delivery is finished or the broker is silent; a second is left for `_answers`.

        A broker that is slow is not given up: what is in flight would be sent again, and make it slower.
        """
        while not delivery.finished.done():
            until = min(delivery.last_answer + self._silence_seconds, latest) - self._probe_seconds
            if (seconds := until - self._now()) <= 0:
                return
            await asyncio.wait({delivery.finished}, timeout=seconds)

    async def _give_up(self, ledger: Ledger, channel: Channel, delivery: Delivery, *, answers: bool) -> None:
        outcome = self._why_silent(channel, delivery, answers=answers)
        if answers:
            channel.close()  # the broker has read the whole batch, so nothing of it is still to be sent
        else:
            channel.wire.abort(outcome.reason)
            await channel.wire.gone()
        ledger.fail_in_flight(outcome)
        ledger.fail(outcome)

    def _why_silent(self, channel: Channel, delivery: Delivery, *, answers: bool) -> Outcome:
        if channel.wire.blocked:
            return unavailable(_BLOCKED, sink_down=True)
        if not answers:
            return unavailable(self._after_seconds("RabbitMQ did not answer"), sink_down=True)
        if self._now() - delivery.last_answer < self._silence_seconds / 2:
            return unavailable("RabbitMQ is too slow: it confirmed only a part of the batch", sink_down=True)
        # The channel is alive and the queue is not, such as a quorum queue without its majority.
        return unavailable(self._after_seconds("RabbitMQ answers, but the queue did not confirm"))

    async def _answers(self, channel: Channel) -> bool:
        """Whether the broker has come to the end of what this channel sent."""
        try:
            async with asyncio.timeout(self._probe_seconds):
                await channel.call(spec.Basic.Qos(prefetch_count=0))
        except (TimeoutError, Ended):
            return False
        return True

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    @property
    def _silence_seconds(self) -> float:
        return self._options.publish_timeout_seconds

    @property
    def _probe_seconds(self) -> float:
        return min(_PROBE_SECONDS_MAX, self._silence_seconds / 5)

    def _encoder(self, frame_max: int) -> Encoder:
        if self._encoder_made is None or self._encoder_made.frame_max != frame_max:
            self._encoder_made = Encoder(self._options.exchange, frame_max)
        return self._encoder_made

    def _after_seconds(self, what: str) -> str:
        return f"{what} within {self._silence_seconds:g} s; whether it arrived is unknown"


def _charge(ledger: Ledger, fault: Fault) -> None:
    """A channel or connection ended under a batch: fail it, or find the one message that is to blame.

    The broker closes for the first message that it cannot take, ignores what follows, and names none.
    So what was in flight goes again in halves, on a fresh channel each time, until one is alone.
    """
    found = verdict(fault)
    suspects = ledger.in_flight
    if found.blame is Blame.SINK or not suspects:
        ledger.fail(replace(found.outcome, status=Status.UNAVAILABLE, sink_down=True))
    elif suspects == 1:
        ledger.fail_in_flight(found.outcome)
        ledger.window = UNBOUNDED
    else:
        ledger.window = suspects // 2
        ledger.rewind()
