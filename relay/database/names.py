"""Names of every database object, derived from one schema and one table name.

The one place that quotes identifiers: mixed case, dots, quotes and braces in `schema` and `table`
are ordinary characters (FIELD.md A7). `migrate` creates the objects and the relay reads them under
the same names, and both take the wake-up lock and the channel from here, so they cannot disagree.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Self

from relay.errors import InvalidConfig

if TYPE_CHECKING:
    from relay.config import Database

__all__ = ["BODY", "Names", "identifier", "literal"]

BODY: Final = "$body$"
"""Dollar quote around function bodies in the migrations; the one text that a name may not contain."""

_IDENTIFIER_BYTES_MAX: Final = 63
"""NAMEDATALEN - 1. PostgreSQL cuts longer identifiers silently, so two names could become one."""

_TABLE_BYTES_MAX: Final = 40
"""Leaves 23 bytes for the longest suffix of a derived name."""

_PLACEHOLDER: Final = re.compile(r"\{([a-z][a-z0-9_]*)\}")

_RELATIONS: Final = {
    "outbox": "",
    "lease": "_lease",
    "member": "_member",
    "parked": "_parked",
    "dead_letter": "_dead_letter",
    "checkpoint": "_checkpoint",
    "migration": "_migration",
    "outbox_seq": "_seq_seq",
    "parked_number": "_parked_number_seq",
    "publish": "_publish",
    "uuidv7": "_uuidv7",
    "wake": "_wake",
    "ensure_partitions": "_ensure_partitions",
}
"""Schema-qualified objects: placeholder and suffix. The last four are functions, two are sequences."""

_OBJECTS: Final = {
    "wake_trigger": "_wake",
    "outbox_pkey": "_pkey",
    "outbox_pending": "_pending",
    "outbox_xid": "_xid",
    "outbox_headers_object": "_headers_object",
    "lease_pkey": "_lease_pkey",
    "member_pkey": "_member_pkey",
    "parked_pkey": "_parked_pkey",
    "parked_event": "_parked_event",
    "parked_due": "_parked_due",
    "parked_key": "_parked_key",
    "dead_letter_pkey": "_dead_letter_pkey",
    "dead_letter_event": "_dead_letter_event",
    "dead_letter_kind": "_dead_letter_kind",
    "dead_letter_holds": "_dead_letter_holds",
    "dead_letter_died": "_dead_letter_died",
    "checkpoint_pkey": "_checkpoint_pkey",
    "migration_pkey": "_migration_pkey",
}
"""Objects that PostgreSQL names without a schema where they are created: indexes, constraints, triggers."""


def identifier(name: str) -> str:
    """`name` as an SQL identifier, always quoted."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """`text` as an SQL string literal, whatever `standard_conforming_strings` says."""
    quoted = "'" + text.replace("'", "''") + "'"
    return "E" + quoted.replace("\\", "\\\\") if "\\" in text else quoted


@dataclass(frozen=True)
class Names:
    """Quoted names of the outbox and of what belongs to it; `schema` and `table` are the plain ones.

    Raises `InvalidConfig` for names that PostgreSQL would cut or refuse.
    """

    schema: str = "public"
    table: str = "outbox"

    def __post_init__(self) -> None:
        _require("schema", self.schema, _IDENTIFIER_BYTES_MAX)
        _require("table", self.table, _TABLE_BYTES_MAX)

    @classmethod
    def from_config(cls, database: Database) -> Self:
        """Names for the `[database]` section."""
        return cls(database.schema_, database.table)

    def relation(self, suffix: str) -> str:
        """Quoted and qualified name of the table, index or sequence called `table` + `suffix`."""
        return f"{identifier(self.schema)}.{identifier(self.table + suffix)}"

    @cached_property
    def outbox(self) -> str:
        """The table that applications insert into."""
        return self.relation("")

    @cached_property
    def lease(self) -> str:
        """Who owns which lane."""
        return self.relation(_RELATIONS["lease"])

    @cached_property
    def member(self) -> str:
        """The pods and their heartbeats."""
        return self.relation(_RELATIONS["member"])

    @cached_property
    def parked(self) -> str:
        """Deliveries that are set aside."""
        return self.relation(_RELATIONS["parked"])

    @cached_property
    def dead_letter(self) -> str:
        """Deliveries that were given up."""
        return self.relation(_RELATIONS["dead_letter"])

    @cached_property
    def checkpoint(self) -> str:
        """Positions of the slot and of the sinks."""
        return self.relation(_RELATIONS["checkpoint"])

    @cached_property
    def migration(self) -> str:
        """The migrations that were applied."""
        return self.relation(_RELATIONS["migration"])

    @cached_property
    def outbox_seq(self) -> str:
        """The sequence behind `outbox.seq`."""
        return self.relation(_RELATIONS["outbox_seq"])

    @cached_property
    def ensure_partitions(self) -> str:
        """The function that makes partitions ahead of time (partitioned outboxes only)."""
        return self.relation(_RELATIONS["ensure_partitions"])

    @cached_property
    def publish(self) -> str:
        """The function that applications may insert with."""
        return self.relation(_RELATIONS["publish"])

    @cached_property
    def parked_number(self) -> str:
        """The sequence behind `parked.number`."""
        return self.relation(_RELATIONS["parked_number"])

    @cached_property
    def lock_key(self) -> int:
        """K of PROTOCOLS.md 9: the doorman holds it exclusively while the cluster sleeps."""
        return self.advisory_key("wake")

    @cached_property
    def channel(self) -> str:
        """Channel of the wake-up, plain text: the table's name; outside `public` with its schema in front.

        A schema that would make it longer than the 63 bytes of a channel is replaced by its hash.
        """
        if self.schema == "public":
            return self.table
        name = f"{self.schema}.{self.table}"
        if len(name.encode()) <= _IDENTIFIER_BYTES_MAX:
            return name
        return f"{hashlib.sha256(self.schema.encode()).hexdigest()[:16]}.{self.table}"

    def advisory_key(self, purpose: str) -> int:
        """An advisory lock key of this outbox (bigint), the same in every process and version."""
        text = f"outbox-relay\0{self.schema}\0{self.table}\0{purpose}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)

    def format(self, sql: str, **values: str) -> str:
        """`sql` with each `{name}` replaced, in one pass, so that braces inside a name stay what they are.

        Placeholders: the relations (`{outbox}`, `{lease}`, `{parked_number}`, ...), each also as a literal to
        cast (`{outbox_literal}::regclass`) and as a literal of its plain name (`{outbox_name}`) to compare with
        the catalog; `{schema}` and `{schema_name}`; `{lock_key}`; `{channel}` as an identifier and
        `{channel_name}`; and the texts in `values`. Braces around anything but lower-case letters, digits and
        underscores are left alone. Raises `KeyError` for an unknown name. Keep placeholders out of SQL
        comments: a name may hold a line break.
        """
        known = self._values | values if values else self._values
        return _PLACEHOLDER.sub(lambda match: known[match[1]], sql)

    @cached_property
    def _values(self) -> dict[str, str]:
        relations = {name: self.relation(suffix) for name, suffix in _RELATIONS.items()}
        plain = {name: self.table + suffix for name, suffix in (_RELATIONS | _OBJECTS).items()}
        plain |= {"schema": self.schema, "channel": self.channel}
        return (
            {name: identifier(text) for name, text in plain.items()}
            | relations
            | {f"{name}_literal": literal(text) for name, text in relations.items()}
            | {f"{name}_name": literal(text) for name, text in plain.items()}
            | {"lock_key": str(self.lock_key), "partitions_key": str(self.advisory_key("partitions"))}
        )


def _require(option: str, name: str, bytes_max: int) -> None:
    if not name or "\0" in name or BODY in name or any("\ud800" <= character <= "\udfff" for character in name):
        raise InvalidConfig(f"database.{option} is not a usable name: {name!r}", hint=f"choose another {option} name")
    length = len(name.encode())
    if length > bytes_max:
        raise InvalidConfig(
            f"database.{option} {name!r} has {length} bytes, at most {bytes_max} fit",
            hint=f"choose a shorter {option} name",
        )
