"""A message as the AMQP 0-9-1 frames that publish it: `basic.publish`, content header, body.

Written by hand because this is the hottest code of the sink: pamqp's objects cost five times as much
per message. tests/unit/test_rabbitmq_encoding.py reads every frame back with pamqp.

What AMQP or RabbitMQ cannot carry is refused here, before the wire: on the wire it would cost the
channel or the connection, and with it the confirms of innocent messages.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Final

from relay import headers
from relay.errors import MessageRejected
from relay.timestamps import rfc3339

if TYPE_CHECKING:
    from relay.types import Message

__all__ = ["SHORT_STRING_BYTES_MAX", "Encoder"]

SHORT_STRING_BYTES_MAX: Final = 255
"""Of names, routing keys and ids in AMQP 0-9-1."""

_METHOD, _HEADER, _BODY, _END = 1, 2, 3, b"\xce"
_FRAME_OVERHEAD: Final = 8
"""Bytes of a frame beyond its payload: type, channel, size, end octet. `frame_max` counts them."""

_UNLIMITED: Final = 128 * 1024
"""Body frame size when the broker negotiated `frame_max = 0`, no limit: RabbitMQ's own default."""

_frame_start = Struct(">BHI").pack
_header_start = Struct(">HHQH").pack
_long = Struct(">I").pack
_longlong = Struct(">Q").pack

_PUBLISH: Final = b"\x00\x3c\x00\x28\x00\x00"
"""Class 60, method 40, the reserved short."""
_MANDATORY: Final = b"\x01"
_PERSISTENT: Final = b"\x02"
_HEADERS_FLAG, _DELIVERY_MODE_FLAG, _MESSAGE_ID_FLAG, _TIMESTAMP_FLAG = 1 << 13, 1 << 12, 1 << 7, 1 << 6
_FLAGS: Final = _HEADERS_FLAG | _DELIVERY_MODE_FLAG | _MESSAGE_ID_FLAG

_TIMESTAMP_SECONDS_MAX: Final = 2**32 - 1
"""2106-02-07. AMQP could say more, but pamqp (so every aio-pika consumer) reads larger values as milliseconds,
and loses its connection over a year after 9999."""

_SENDER_SELECTED: Final = frozenset({"CC", "BCC"})
"""RabbitMQ reads these headers as arrays of routing keys and closes the channel on anything else."""

_RELAY_HEADERS: Final = frozenset({"created_at", "key", "tombstone"})
"""Names that the relay sets; an event's own header of such a name gives way."""

_TOMBSTONE: Final = b"\x09tombstonet\x01"


class Encoder:
    """Encodes for one exchange and one connection's `frame_max` (bytes; 0: no limit)."""

    __slots__ = ("_body_max", "_header_max", "_publish_frame", "frame_max")

    def __init__(self, exchange: str, frame_max: int) -> None:
        self.frame_max = frame_max
        self._header_max = frame_max - _FRAME_OVERHEAD if frame_max else 2**32
        self._body_max = (frame_max or _UNLIMITED) - _FRAME_OVERHEAD
        exchange_field = _short_string(exchange, "exchange")

        @lru_cache(maxsize=1024)  # destinations are few and repeat; `{key}` in a template makes them many
        def publish_frame(channel: int, destination: str) -> bytes:
            method = _PUBLISH + exchange_field + _short_string(destination, "routing key") + _MANDATORY
            return _frame(_METHOD, channel, method)

        self._publish_frame = publish_frame

    def encode(self, message: Message, channel: int) -> bytes:
        """All frames of a message for a channel number.

        Raises MessageRejected when AMQP or RabbitMQ cannot carry it; the reason names the limit, not the content.
        """
        try:
            return self._publish_frame(channel, message.destination) + self._content(message, channel)
        except UnicodeEncodeError:
            raise MessageRejected("its text is not valid Unicode and has no UTF-8 form") from None

    def _content(self, message: Message, channel: int) -> bytes:
        body = message.payload or b""
        size = len(body)
        header = _content_header(message, size)
        if len(header) > self._header_max:
            raise MessageRejected(
                f"headers and properties take {len(header)} bytes, the broker's frame_max leaves {self._header_max}"
            )
        start = _frame(_HEADER, channel, header)
        if size <= self._body_max:
            return start + _frame(_BODY, channel, body) if size else start
        return start + b"".join(
            _frame(_BODY, channel, body[at : at + self._body_max]) for at in range(0, size, self._body_max)
        )


def _content_header(message: Message, body_size: int) -> bytes:
    flags, timestamp = _FLAGS, b""
    if 0 <= (seconds := message.created_at // 1_000_000) <= _TIMESTAMP_SECONDS_MAX:
        flags |= _TIMESTAMP_FLAG
        timestamp = _longlong(seconds)
    table = _header_table(message)
    return b"".join(
        (
            _header_start(60, 0, body_size, flags),
            _long(len(table)),
            table,
            _PERSISTENT,
            _short_string(message.id, "event id"),
            timestamp,
        )
    )


def _header_table(message: Message) -> bytes:
    fields = [b"\x0acreated_atS", _long_string(rfc3339(message.created_at))]
    if message.key is not None:
        fields += (b"\x03keyS", _long_string(message.key))
    if message.payload is None:
        fields.append(_TOMBSTONE)
    if message.headers is not None:
        fields += _own_fields(message.headers)
    return b"".join(fields)


def _own_fields(text: str) -> list[bytes]:
    fields: list[bytes] = []
    for name, value in _decoded(text).items():
        if name in _RELAY_HEADERS:
            continue
        if name in _SENDER_SELECTED:
            raise MessageRejected(f"header {name!r} is reserved by RabbitMQ, which takes it for a list of routing keys")
        fields.append(_short_string(name, "header name"))
        fields.append(b"V" if value is None else b"S" + _long_string(value))
    return fields


def _decoded(text: str) -> dict[str, str | None]:
    try:
        return headers.decode(text)
    except (ValueError, AttributeError):
        raise MessageRejected("headers are not a JSON object") from None


def _short_string(text: str, what: str) -> bytes:
    data = text.encode()
    if len(data) > SHORT_STRING_BYTES_MAX:
        raise MessageRejected(f"{what} has {len(data)} bytes, AMQP allows {SHORT_STRING_BYTES_MAX}")
    return bytes((len(data),)) + data


def _long_string(text: str) -> bytes:
    data = text.encode()
    return _long(len(data)) + data


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return b"".join((_frame_start(kind, channel, len(payload)), payload, _END))
