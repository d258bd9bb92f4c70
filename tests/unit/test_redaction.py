"""Addresses lose their passwords, and nothing else, before anybody sees them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.redaction import redact


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://u:secret@h:1/0", "redis://u:***@h:1/0"),
        ("redis://:secret@h/0", "redis://:***@h/0"),
        ("amqps://u:se:cr@et/a?b#c@h/vhost", "amqps://u:***@h/vhost"),
        ("cannot reach redis://u:p@h/0, nor amqp://v:q@i", "cannot reach redis://u:***@h/0, nor amqp://v:***@i"),
        ("host=h user=u password=secret dbname=d", "host=h user=u password=*** dbname=d"),
        ("host=h password='a b\\' c' user=u", "host=h password=*** user=u"),
        ("postgresql://h/d?user=u&sslpassword=secret&x=1", "postgresql://h/d?user=u&sslpassword=***&x=1"),
        ("redis://user@h", "redis://user@h"),
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("nothing to hide from a@b.example", "nothing to hide from a@b.example"),
        ("", ""),
    ],
)
def test_only_the_password_is_hidden(text: str, shown: str) -> None:
    """User, host and path stay: they are what an operator looks for."""
    assert redact(text) == shown


@given(st.text(alphabet=st.characters(exclude_categories=["Z", "C"], exclude_characters="'\"<>"), min_size=1))
def test_no_password_gets_through_however_it_is_written(password: str) -> None:
    """Raw `@`, `:`, `/`, `%` in it included (FIELD.md F9)."""
    assert redact(f"redis://user:pre{password}post@host/0") == "redis://user:***@host/0"
