"""The Kafka sink: `acks=all`, idempotent, in order per key, in bulk (docs/sinks/kafka.md).

Confirmed means confirmed: each record batch's own answer from all in-sync replicas (DESIGN.md 2.3).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, ClassVar, Final

from pydantic import BaseModel  # noqa: TC002  # part of the public annotation

from relay.errors import InvalidConfig, PermissionMissing, SinkUnavailable
from relay.sink import Outcome, unavailable
from relay.sinks.kafka.cluster import Cluster, Settings, Unreachable
from relay.sinks.kafka.delivery import Context, Delivery
from relay.sinks.kafka.options import KafkaOptions, security
from relay.sinks.kafka.pace import Pace
from relay.sinks.kafka.partitioner import KeyHashes
from relay.sinks.kafka.topics import Topics
from relay.sinks.kafka.wire import CODECS, codec_is_available

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.types import Message

__all__ = ["KafkaSink"]

_log: Final = logging.getLogger(__name__)

_CLOSED: Final = unavailable("the sink is closed", sink_down=True)


class KafkaSink:
    """Publishes to one Kafka cluster; the contract is `relay.sink.Sink`.

    Ordering unit: the partition. A key is on one partition of its topic, which has one record batch in flight.
    """

    Options: ClassVar[type[BaseModel]] = KafkaOptions

    def __init__(self, name: str, options: KafkaOptions) -> None:
        self.name = name
        self._options = options
        self._context: Context | None = None

    @property
    def concurrency(self) -> int:
        """Batches in flight: one is built while another is on the wire."""
        return self._options.concurrency

    async def open(self) -> None:
        """Check the options; connects to nothing. Raises InvalidConfig."""
        options = self._options
        if not codec_is_available(options.compression):
            raise InvalidConfig(
                f"sinks.{self.name}.compression: {options.compression!r} needs a library that is not installed",
                hint="Install 'outbox-relay[compression]', or use compression = 'gzip' or 'none'.",
            )
        settings = Settings(
            bootstrap_servers=options.bootstrap_servers,
            client_id=options.client_id,
            request_timeout=min(options.request_timeout_seconds, options.publish_timeout_seconds / 2),
            linger=options.linger_seconds,
            security=security(self.name, options),
        )
        topics = Topics(options.metadata_max_age_seconds)
        self._context = Context(
            cluster=Cluster(settings, topics),
            topics=topics,
            hashes=KeyHashes(),
            pace=Pace(settings.request_timeout / 2),
            codec=CODECS[options.compression],
            request_bytes_max=options.max_request_size,
        )

    async def ping(self) -> None:
        """A broker answers and gives us a producer id.

        Raises SinkUnavailable, or PermissionMissing if the brokers or we refuse each other.
        """
        if self._context is None:
            raise SinkUnavailable(f"sink {self.name!r} is not open")
        try:
            async with asyncio.timeout(self._options.publish_timeout_seconds):
                await self._context.cluster.look_up(())
                await self._context.cluster.producer_id()
        except TimeoutError as error:
            raise SinkUnavailable(f"sink {self.name!r}: no broker answers") from error
        except Unreachable as error:
            text = f"sink {self.name!r}: {error.outcome.reason}"
            if error.outcome.misconfigured:
                hint = "Check security_protocol, sasl_* and ssl_* of the sink, and the rights of its user."
                raise PermissionMissing(text, hint=hint) from error
            raise SinkUnavailable(text) from error

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        """Send a batch; see `relay.sink.Sink.publish`."""
        if self._context is None:
            return [_CLOSED] * len(batch)
        delivery = Delivery(self._context, batch)
        timeout = self._options.publish_timeout_seconds
        try:
            async with asyncio.timeout(timeout):
                await delivery.run()
        except TimeoutError:
            down = self._context.cluster.is_down()
            reason = f"no answer within publish_timeout_seconds = {timeout:g}"
            delivery.fail(range(len(batch)), unavailable(reason, sink_down=down, misconfigured=not down))
        except Exception as error:  # noqa: BLE001  # the contract raises nothing; a bug must not lose events
            _log.exception("sink %s: unexpected error; the batch is tried again", self.name)
            delivery.fail(range(len(batch)), unavailable(f"internal error: {type(error).__name__}", sink_down=True))
        return [outcome or _UNKNOWN for outcome in delivery.outcomes]

    async def close(self) -> None:
        """Drop all connections without flushing; idempotent, done within a second or two."""
        context, self._context = self._context, None
        if context is not None:
            await context.cluster.close()


_UNKNOWN: Final = unavailable("no outcome is known", sink_down=True)  # never happens; never taken for a confirmation
