"""Databases inside a running cluster, and the clusters of the other supported PostgreSQL versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import psycopg
from psycopg import sql

from relay.demo.servers import Postgres

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Database", "Postgres"]


@dataclass(frozen=True)
class Database:
    """A database of its own for one test; made empty, dropped afterwards whoever is still connected."""

    server: Postgres
    name: str

    @property
    def dsn(self) -> str:
        """URL as the superuser."""
        return self.server.dsn(self.name)

    def dsn_of(self, user: str, password: str | None = None) -> str:
        """URL as another role."""
        return self.server.dsn(self.name, user, password)

    def execute(self, query: str) -> list[tuple[object, ...]]:
        """Run SQL as the superuser in autocommit; its rows, if it has any."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(sql.SQL(query))
            return cursor.fetchall() if cursor.description else []

    def __enter__(self) -> Self:
        self._administer(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self.name)))
        return self

    def __exit__(self, *_: object) -> None:
        for query in self._removal():
            self._administer(query)

    def _removal(self) -> Iterator[sql.Composed]:
        # An active slot refuses to be dropped, so its walsender ends first; both refer to this database only.
        name = sql.Literal(self.name)
        yield sql.SQL(
            "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots"
            " WHERE database = {} AND active_pid IS NOT NULL"
        ).format(name)
        yield sql.SQL(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = {}"
        ).format(name)
        yield sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(self.name))

    def _administer(self, query: sql.Composed) -> None:
        with psycopg.connect(self.server.superuser_dsn, autocommit=True) as connection:
            connection.execute(query)
