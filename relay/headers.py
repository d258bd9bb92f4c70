"""The one rule for headers, on every broker (docs/headers.md).

The column is `jsonb`, so a value may be anything. A string is itself; `null` stays null; every other
value is its compact JSON text, numbers digit for digit as PostgreSQL prints them (`11171330917854890490`
and `1.50` are neither rounded nor shortened).
"""

from __future__ import annotations

import json
from typing import Any

import orjson

__all__ = ["decode"]


def decode(text: str | None) -> dict[str, str | None]:
    """Header names and values of a message; `text` is a JSON object as PostgreSQL prints it, or None."""
    if text is None:
        return {}
    try:
        values: dict[str, Any] = orjson.loads(text)
    except orjson.JSONDecodeError:  # a number beyond float64: legal in jsonb, an error to orjson
        return _decode_mixed(text)
    for value in values.values():
        if value.__class__ is not str:
            return _decode_mixed(text)
    return values


class _Number(str):
    """A JSON number's own digits."""

    __slots__ = ()


def _decode_mixed(text: str) -> dict[str, str | None]:
    values = json.loads(text, parse_int=_Number, parse_float=_Number)
    return {name: value if value is None or type(value) is str else _compact(value) for name, value in values.items()}


def _compact(value: Any) -> str:
    match value:
        case _Number():
            return str(value)
        case list():
            return "[" + ",".join(map(_compact, value)) + "]"
        case dict():
            return "{" + ",".join(f"{_compact(k)}:{_compact(v)}" for k, v in value.items()) + "}"
        case _:
            return json.dumps(value, ensure_ascii=False)
