"""What cannot be stored is refused with the name of the part, before it reaches PostgreSQL."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from relay.client.event import Event, InvalidEvent, row


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Event("t", None, headers={"good": "v", "trace": "a\0b"}), r"header 'trace' contains \\u0000"),
        (Event("t", None, headers={"deep": {"l": [1, {"x\0": 1}]}}), r"header 'deep' contains \\u0000"),
        (Event("t", None, headers={"half": "\ud800"}), "header 'half' contains half of a surrogate pair"),
        (Event("t", None, headers={"n\0": 1}), r"the name of header 'n\\x00' contains a NUL"),
        (Event("t", None, headers={1: "v"}), "the name of header 1 is not text but int"),  # type: ignore[dict-item]
        (Event("t", None, headers=["h"]), "headers are not a mapping but list"),  # type: ignore[arg-type]
        (Event("t", None, headers={"h": object()}), "header 'h' cannot be written as JSON"),
        (Event("t\0", None), "topic contains a NUL"),
        (Event(None, None), "topic is not text but NoneType"),  # type: ignore[arg-type]
        (Event("t", None, key="\0"), "key contains a NUL"),
        (Event("t", None, key=5), "key is not text but int"),  # type: ignore[arg-type]
        (Event("t", "a\0"), "payload contains a NUL"),
        (Event("t", b"\xff"), "payload is not UTF-8, which a json column needs"),
        (Event("t", {"a": {1, 2}}), "payload cannot be written as JSON"),
        (Event("t", None, id="no-uuid"), "id is not a UUID"),
    ],
)
def test_what_cannot_be_stored_is_named(event: Event, message: str) -> None:
    """The message says which part, and never quotes a payload."""
    with pytest.raises(InvalidEvent, match=message):
        row(event, "json")


def test_an_escaped_backslash_is_no_nul() -> None:
    r"""The text `\u0000` (six characters) is legal in jsonb; only the character is not."""
    _, values = row(Event("t", None, headers={"h": "\\u0000"}), "json")
    assert values[4] == '{"h":"\\\\u0000"}'


def test_headers_keep_large_numbers() -> None:
    """Beyond 64 bits the standard library writes them (FIELD.md A9)."""
    headers: dict[str, Any] = {"big": 11171330917854890490, "bigger": 2**70, "o": {"a": 1.5}, "b": True, "l": [1]}
    _, values = row(Event("t", None, headers=headers), "json")
    assert values[4] == '{"big":11171330917854890490,"bigger":1180591620717411303424,"o":{"a":1.5},"b":true,"l":[1]}'


def test_an_unknown_payload_type_is_no_sql() -> None:
    """It becomes part of the statement, so only the four are let through."""
    with pytest.raises(ValueError, match="none of json, jsonb, text, bytea"):
        row(Event("t", None), "json; DROP TABLE x")  # type: ignore[arg-type]  # the mistake under test


def test_new_ids_rise() -> None:
    """UUIDv7 of one process, as the standard library's own class."""
    ids = [row(Event("t", None), "json")[0] for _ in range(1000)]
    assert ids == sorted(ids)
    assert {type(i) for i in ids} == {UUID}
