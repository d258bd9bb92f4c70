"""Filling in a migration file: names, the payload's type, and the parts that only some databases get.

    --@if partitioned          options: partitioned, uuidv7_builtin, create_schema
    ...
    --@else
    ...
    --@end

Parts do not nest. Everything else is SQL that can be read as it stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from relay.database.names import Names

__all__ = ["Options", "render"]

_BUILTIN_UUIDV7: Final = 180_000

_OUTBOX_STORAGE: Final = (
    # A queue turns its rows over: vacuum by 1 % (+ 5,000) of dead rows, at five times the usual budget, or the
    # lane index fills with dead entries that every read crawls over.
    "autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_limit = 1000, "
    # Kept history is append-only: freeze it and summarise its BRIN ranges early, in small steps.
    "autovacuum_vacuum_insert_scale_factor = 0.02, autovacuum_vacuum_insert_threshold = 20000, "
    "autovacuum_analyze_scale_factor = 0.02, autovacuum_analyze_threshold = 5000, "
    # Giving empty pages back takes ACCESS EXCLUSIVE and would stop producers; a queue needs the pages again anyway.
    "vacuum_truncate = false"
)
"""No fillfactor: settling an event changes a column of a partial index, so no update of it can be HOT."""


@dataclass(frozen=True)
class Options:
    """What differs between databases. `server_version` as in `server_version_num`."""

    payload: str
    partitioned: bool
    server_version: int
    create_schema: bool

    def has(self, name: str) -> bool:
        """Whether a part `--@if name` is wanted. Raises `KeyError` for an unknown option."""
        return {
            "partitioned": self.partitioned,
            "uuidv7_builtin": self.server_version >= _BUILTIN_UUIDV7,
            "create_schema": self.create_schema,
        }[name]


def render(template: str, names: Names, options: Options) -> str:
    """The SQL of a migration for one database."""
    wanted = "\n".join(_wanted(template, options))
    return names.format(wanted, payload_type=options.payload, outbox_storage=_OUTBOX_STORAGE).strip() + "\n"


def _wanted(template: str, options: Options) -> Iterator[str]:
    wanted = True
    for line in template.splitlines():
        match line.split():
            case ["--@if", name]:
                wanted = options.has(name)
            case ["--@else"]:
                wanted = not wanted
            case ["--@end"]:
                wanted = True
            case _ if wanted:
                yield line
