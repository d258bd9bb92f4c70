"""Names are quoted in one place, and agree between processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.config import Database
from relay.database.names import Names, identifier, literal
from relay.errors import InvalidConfig


def test_the_plain_names() -> None:
    """The names that the documents use."""
    names = Names()
    assert names.format("{outbox} {lease} {member} {parked} {dead_letter} {checkpoint} {migration}") == " ".join(
        f'"public"."outbox{suffix}"'
        for suffix in ("", "_lease", "_member", "_parked", "_dead_letter", "_checkpoint", "_migration")
    )
    assert names.channel == "outbox"
    assert names.outbox_seq == '"public"."outbox_seq_seq"'
    assert names.parked_number == '"public"."outbox_parked_number_seq"'


def test_from_config() -> None:
    """Schema and table come from `[database]`."""
    database = Database.model_validate({"dsn": "postgresql://", "schema": "shop", "table": "events"})
    assert Names.from_config(database) == Names("shop", "events")


def test_keys_and_channel_never_change() -> None:
    """The trigger has them as literals: another value in a later version would part it from the relay."""
    assert Names().lock_key == -2273979727797451126
    assert Names("My.App", "Out").channel == "My.App.Out"
    assert Names("s" * 63, "t" * 40).channel == "60ed9b7a6df820cf." + "t" * 40
    keys = {Names(s, t).advisory_key(p) for s in ("a", "ab") for t in ("bc", "c") for p in ("wake", "migrate")}
    assert len(keys) == 8


@given(schema=st.text(min_size=1, max_size=63), table=st.text(min_size=1, max_size=40))
def test_a_channel_always_fits(schema: str, table: str) -> None:
    """63 bytes, or the names are refused."""
    try:
        names = Names(schema, table)
    except InvalidConfig:
        return
    assert len(names.channel.encode()) <= 63


def test_a_name_is_never_formatted_twice() -> None:
    """Braces in a name are part of it; braces of SQL are left alone."""
    names = Names("{outbox}", "{lease}")
    assert names.format("{outbox}") == '"{outbox}"."{lease}"'
    assert (
        names.format("'{}'::json, '{1,2}', '{\"a\": 1}', {x}", x="{lease}")
        == "'{}'::json, '{1,2}', '{\"a\": 1}', {lease}"
    )


def test_an_unknown_placeholder_is_a_mistake() -> None:
    """Not silently left in the SQL."""
    with pytest.raises(KeyError, match="leese"):
        Names().format("SELECT FROM {leese}")


def test_literals_of_every_kind() -> None:
    """To cast, to compare with the catalog, and for the channel."""
    names = Names("My.App", "O'B\\")
    assert names.format("{outbox_literal}") == "E'\"My.App\".\"O''B\\\\\"'"
    assert names.format("{outbox_name} {schema_name} {channel_name}") == "E'O''B\\\\' 'My.App' E'My.App.O''B\\\\'"
    assert (identifier('a"b'), literal("a'b")) == ('"a""b"', "'a''b'")


@pytest.mark.parametrize(
    ("schema", "table", "message"),
    [
        ("", "outbox", "database.schema is not a usable name"),
        ("public", "a\0", "database.table is not a usable name"),
        ("public", "a$body$", "database.table is not a usable name"),
        ("public", "ü" * 21, "has 42 bytes, at most 40 fit"),
        ("ü" * 32, "outbox", "has 64 bytes, at most 63 fit"),
        ("public", "\ud800", "database.table is not a usable name"),
    ],
)
def test_names_that_postgresql_would_cut_or_refuse(schema: str, table: str, message: str) -> None:
    """Cut silently, two names could become one."""
    with pytest.raises(InvalidConfig, match=message):
        Names(schema, table)


def test_the_longest_derived_name_fits() -> None:
    """Every object of the longest table name stays within 63 bytes."""
    names = Names("public", "t" * 40)
    values = [v for k, v in names._values.items() if k.endswith("_name")]
    assert max(len(value) - 2 for value in values) <= 63
