"""An event as an application writes it, and as the columns take it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args
from uuid import UUID

import orjson
import uuid6

from relay.errors import RelayError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Event", "InvalidEvent", "PayloadType", "Row", "row"]

PayloadType: TypeAlias = Literal["json", "jsonb", "text", "bytea"]

Row: TypeAlias = tuple[str, str, str | None, str | bytes | None, str | None]
"""id, topic, key, payload, headers."""


class InvalidEvent(RelayError, ValueError):
    """The event cannot be stored as it is; the message names the part, never its content."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event for `enqueue_many`; the fields are the arguments of `enqueue`."""

    topic: str
    payload: Any
    key: str | None = None
    headers: Mapping[str, Any] | None = None
    id: UUID | str | None = None


def row(event: Event, payload_type: PayloadType) -> tuple[UUID, Row]:
    """The id and the values of the columns. Raises `InvalidEvent`, and `ValueError` for an unknown type."""
    if payload_type not in get_args(PayloadType):
        raise ValueError(f"payload_type {payload_type!r} is none of {', '.join(get_args(PayloadType))}")
    event_id = _id(event.id)
    payload = _payload(event.payload, payload_type)
    key = None if event.key is None else _text("key", event.key)
    return event_id, (str(event_id), _text("topic", event.topic), key, payload, _headers(event.headers))


def _id(value: UUID | str | None) -> UUID:
    if value is None:
        return UUID(int=uuid6.uuid7().int)
    try:
        return value if isinstance(value, UUID) else UUID(value)
    except (ValueError, AttributeError, TypeError):
        raise InvalidEvent("id is not a UUID") from None


def _payload(value: Any, payload_type: PayloadType) -> str | bytes | None:
    """None is a tombstone; text and bytes go as they are; anything else becomes JSON."""
    if value is None:
        return None
    data = bytes(value) if isinstance(value, bytes | bytearray | memoryview) else value
    if not isinstance(data, str | bytes):
        data = _json("payload", value)
    if payload_type == "bytea":
        return data if isinstance(data, bytes) else _encoded("payload", data)
    if isinstance(data, bytes):
        try:
            data = data.decode()
        except UnicodeDecodeError:
            raise InvalidEvent(f"payload is not UTF-8, which a {payload_type} column needs") from None
    return _text("payload", data)


def _headers(headers: Mapping[str, Any] | None) -> str | None:
    """JSON text of an object."""
    if headers is None:
        return None
    if not isinstance(headers, Mapping):
        raise InvalidEvent(f"headers are not a mapping but {type(headers).__name__}")
    return "{" + ",".join(_header(name, value) for name, value in headers.items()) + "}"


def _header(name: str, value: Any) -> str:
    what = f"header {name!r}"
    for text in _texts([_text(f"the name of {what}", name), value]):
        # `json` keeps these as escapes, `jsonb` cannot: found here, the error can say which header it is.
        if "\0" in text:
            raise InvalidEvent(f"{what} contains \\u0000, which PostgreSQL's jsonb refuses")
        _encoded(what, text)
    return f"{_json(what, name)}:{_json(what, value)}"


def _texts(value: Any) -> Iterator[str]:
    """All text inside a JSON-like value, names included."""
    match value:
        case str():
            yield value
        case Mapping():
            for pair in value.items():
                yield from _texts(pair)
        case list() | tuple():
            for item in value:
                yield from _texts(item)


def _json(what: str, value: Any) -> str:
    """Compact JSON. The standard library is asked for what orjson refuses: integers beyond 64 bits, surrogates."""
    try:
        return orjson.dumps(value).decode()
    except TypeError as refused:
        try:
            return json.dumps(value, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError):
            raise InvalidEvent(f"{what} cannot be written as JSON: {refused}") from refused


def _text(what: str, text: str) -> str:
    if not isinstance(text, str):
        raise InvalidEvent(f"{what} is not text but {type(text).__name__}")
    if "\0" in text:
        raise InvalidEvent(f"{what} contains a NUL character, which PostgreSQL cannot store in text")
    _encoded(what, text)
    return text


def _encoded(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidEvent(f"{what} contains half of a surrogate pair, which is not UTF-8") from None
