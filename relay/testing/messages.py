"""Messages for tests: ordinary ones, and every odd value that a broker must carry unharmed (FIELD.md A1, A3, A5, A9)."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final

from relay.types import TIMESTAMP_INFINITY, TIMESTAMP_MINUS_INFINITY, Message

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CREATED_AT", "HEADERS", "PAYLOADS", "make_message", "make_messages"]

_NOON: Final = 1_767_960_000_123_456
_sequence = count(1)

PAYLOADS: Final[dict[str, bytes]] = {
    "object": b'{"order": 17}',
    "json null": b"null",
    "empty": b"",
    "spaces": b'{  "kept" :  1 }',
    "escaped nul and lone surrogate": rb'{"s":"\u0000\ud800"}',
    "numbers beyond float64": b'{"n":1234567890123456789012,"d":0.123456789012345678901,"e":1e1000}',
    "unicode": '{"s":"żółć 漢字 🦊 \u2028"}'.encode(),
    "raw bytes": bytes(range(256)),
    "line ends": b"a\r\nb\n$3\r\nc\x00d",
}
"""Payloads by what is odd about them. Each must arrive byte for byte."""

HEADERS: Final[dict[str, str | None]] = {
    "none": None,
    "empty": "{}",
    "strings": '{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tenant": "acme"}',
    "not strings": '{"b": true, "l": [1], "n": 128, "o": {"a": 1.5}, "x": null, "big": 11171330917854890490}',
    "digits kept": '{"p": 1.50, "q": 123456789012345678901234567890}',
    "unicode": '{"имя": "значение 🦊", "quote\\"d": "line\\nbreak"}',
    "empty strings": '{"": "nameless", "valueless": ""}',
    "long": '{"long": "' + "x" * 5_000 + '"}',
}
"""Headers by what is odd about them, as PostgreSQL prints a `jsonb` object; see docs/headers.md."""

CREATED_AT: Final[dict[str, int]] = {
    "ordinary": _NOON,
    "epoch": 0,
    "before the epoch": -1,
    "year 20231": 576_317_116_800_000_000,
    "44 BC": -63_517_824_000_000_000,
    "infinity": TIMESTAMP_INFINITY,
    "minus infinity": TIMESTAMP_MINUS_INFINITY,
}
"""Values of `created_at`, microseconds since the Unix epoch."""


def make_message(
    destination: str,
    *,
    key: str | None = "key",
    payload: bytes | None = b"{}",
    headers: str | None = None,
    created_at: int = _NOON,
    topic: str = "orders",
) -> Message:
    """One message with a fresh `seq` and `id`; later messages have higher ones."""
    seq = next(_sequence)
    return Message(
        seq=seq,
        id=f"01943a00-0000-7000-8000-{seq:012x}",
        topic=topic,
        key=key,
        payload=payload,
        headers=headers,
        created_at=created_at,
        stored_at=created_at,
        lane=0,
        destination=destination,
        size=len(payload or b"") + len(headers or ""),
    )


def make_messages(
    destination: str, number: int, *, keys: Sequence[str | None] = ("a", "b", "c"), payload: bytes | None = None
) -> list[Message]:
    """Several messages that take turns over `keys`; their payloads count from 0 unless one is given."""
    return [
        make_message(
            destination,
            key=keys[index % len(keys)],
            payload=b'{"n":%d}' % index if payload is None else payload,
            headers='{"tenant": "acme", "n": 1}',
        )
        for index in range(number)
    ]
