"""From messages to record batches: the format `raw` (DESIGN.md 6), and pieces that the broker takes whole or not at all.

key        the message's key in UTF-8, or null
value      the payload as it is; None is a null value, Kafka's tombstone; an empty payload is an empty value
timestamp  `created_at` in milliseconds, if Kafka can have it: see `timestamp`
headers    `id`, `created_at` (RFC 3339), then the event's own; those of its own that have these names are left out
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from relay.headers import decode
from relay.sinks.kafka.wire import batch_builder
from relay.timestamps import rfc3339

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relay.types import Message

__all__ = ["FUTURE_MAX_MS", "Header", "Piece", "headers", "timestamp"]

Header = tuple[str, bytes | None]

FUTURE_MAX_MS: Final = 3_600_000
"""Brokers refuse what is more than an hour ahead of their clock (`log.message.timestamp.after.max.ms`, Kafka 4)."""


def timestamp(created_at: int, now_ms: int) -> int:
    """Milliseconds of the record; the time of publishing if Kafka cannot have `created_at`.

    That is the case before 1970 (a negative timestamp means "none"), for `infinity`, and for more than an
    hour in the future. The header `created_at` is exact in any case (FIELD.md A5).
    """
    milliseconds = created_at // 1000
    return milliseconds if 0 <= milliseconds <= now_ms + FUTURE_MAX_MS else now_ms


def headers(message: Message) -> list[Header]:
    """Headers of the record. Raises ValueError for headers that are not a JSON object."""
    made: list[Header] = [("id", message.id.encode()), ("created_at", rfc3339(message.created_at).encode())]
    text = message.headers
    if text is not None:
        own = decode(text)
        if "id" in own or "created_at" in own:
            own = {name: value for name, value in own.items() if name not in {"id", "created_at"}}
        made += [(name, value if value is None else value.encode()) for name, value in own.items()]
    return made


class Piece:
    """Consecutive records of one partition in one record batch: the broker writes all of them or none.

    `indexes` are their places in the published batch.
    """

    __slots__ = ("_builder", "append", "indexes")

    def __init__(self, codec: int, bytes_max: int) -> None:
        self.indexes: list[int] = []
        self._builder = batch_builder(codec, bytes_max)
        self.append: Callable[..., Any] = self._builder.append
        """The builder's own, for the hot loop: what it takes has to be noted in `indexes`."""

    def __len__(self) -> int:
        return len(self.indexes)

    @property
    def size(self) -> int:
        """Bytes, uncompressed; only before `build`."""
        return int(self._builder.size())

    def add(self, index: int, milliseconds: int, key: bytes | None, message: Message, fields: Sequence[Header]) -> bool:
        """Add a record, unless the piece is full: then False. The first one always fits."""
        if self.append(len(self.indexes), milliseconds, key, message.payload, fields) is None:
            return False
        self.indexes.append(index)
        return True

    def build(self, producer_id: int, epoch: int, sequence: int) -> bytearray:
        """Bytes of the record batch, compressed; only once."""
        self._builder.set_producer_state(producer_id, epoch, sequence)
        built: bytearray = self._builder.build()
        return built
