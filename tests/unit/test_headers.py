"""The one rule for headers: strings as they are, null stays null, everything else is its JSON text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.headers import decode


@pytest.mark.parametrize(
    ("text", "headers"),
    [
        (None, {}),
        ("{}", {}),
        ('{"a": "b"}', {"a": "b"}),
        ('{"n": 128, "x": null, "b": true, "f": false}', {"n": "128", "x": None, "b": "true", "f": "false"}),
        ('{"big": 11171330917854890490}', {"big": "11171330917854890490"}),
        ('{"d": 1.50, "e": 1e1000, "neg": -0.0}', {"d": "1.50", "e": "1e1000", "neg": "-0.0"}),
        (f'{{"huge": 1{"0" * 400}, "s": "x"}}', {"huge": f"1{'0' * 400}", "s": "x"}),
        ('{"l": [1, "a", null, {"b": 1.50}]}', {"l": '[1,"a",null,{"b":1.50}]'}),
        ('{"o": {"a": 1.5, "ż": "ó\\"q"}}', {"o": '{"a":1.5,"ż":"ó\\"q"}'}),
        ('{"": "", "empty": [], "none": {}}', {"": "", "empty": "[]", "none": "{}"}),
        ('{"s": "1.50", "n": 2}', {"s": "1.50", "n": "2"}),
    ],
)
def test_headers(text: str | None, headers: dict[str, str | None]) -> None:
    """Digits as PostgreSQL prints them, never through float64 (FIELD.md A9)."""
    assert decode(text) == headers


TEXT = st.text(max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(TEXT, JSON, max_size=4))
def test_no_header_is_lost_or_changed(values: dict[str, object]) -> None:
    """Whatever is in the column: a text or null for each name, and the JSON texts mean the same as before."""
    decoded = decode(json.dumps(values, ensure_ascii=False))
    assert decoded.keys() == values.keys()
    for name, value in values.items():
        text = decoded[name]
        if value is None or isinstance(value, str):
            assert text == value
        else:
            assert text is not None
            assert json.loads(text) == value
