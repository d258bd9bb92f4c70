"""Migrated outboxes for tests, with the roles that production has: nothing runs as superuser.

`outbox` is a fresh default outbox; `outbox_factory(payload="bytea", partitioned=True, ...)` makes others (the
options are those of `[database]`; `server=` is another PostgreSQL than the shared one). Each set of options is
migrated once into a template, and a test's database is a copy of it (about 50 ms).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import psycopg
import pytest

from relay import config
from relay.database.names import Names
from relay.migrate import roles, run
from tests.servers.postgres import Database, Postgres

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

APP: Final = "test_app"
RELAY: Final = "test_relay"
OWNER: Final = "test_owner"


@dataclass(frozen=True)
class Outbox:
    """A migrated database. `database` is the relay's `[database]` section, `owner` the one that migrates."""

    server: Postgres
    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def admin_dsn(self) -> str:
        """As superuser: for what an operator does, never for what is under test."""
        return self.server.dsn(self.name)

    @property
    def owner_dsn(self) -> str:
        """As the role that migrated; it owns the database and the tables and is no superuser."""
        return self.server.dsn(self.name, OWNER)

    @property
    def app_dsn(self) -> str:
        """As an application: may insert, reads nothing."""
        return self.server.dsn(self.name, APP)

    @property
    def relay_dsn(self) -> str:
        """As the relay."""
        return self.server.dsn(self.name, RELAY)

    @property
    def database(self) -> config.Database:
        """The `[database]` section of the relay."""
        return config.Database.model_validate({"dsn": self.relay_dsn, **self.options})

    @property
    def owner(self) -> config.Database:
        """The `[database]` section of `relay migrate`."""
        return config.Database.model_validate({"dsn": self.owner_dsn, **self.options})

    @property
    def names(self) -> Names:
        """Quoted names of the tables."""
        return Names.from_config(self.database)

    def execute(self, query: str) -> list[tuple[Any, ...]]:
        """Run one statement as the superuser in autocommit, its `{outbox}` ... filled in; its rows, if it has any."""
        return self.server.execute(self.names.format(query), self.name)


class OutboxFactory(Protocol):
    """Makes databases that live as long as the test; `migrated=False` leaves the migration to it."""

    def __call__(self, *, server: Postgres | None = None, migrated: bool = True, **options: Any) -> Outbox: ...


class Templates:
    """One migrated template database for each server and set of options; they go with their server."""

    def __init__(self) -> None:
        self._made: dict[tuple[Postgres, str], Outbox] = {}
        self._servers: set[Postgres] = set()

    def copy(self, server: Postgres, options: dict[str, Any]) -> Outbox:
        """A fresh database that was migrated with `options`."""
        key = server, repr(sorted(options.items()))
        if key not in self._made:
            self._made[key] = self._make(server, options)
        copy = Outbox(server, f"t{secrets.token_hex(5)}", options)
        server.execute(f"CREATE DATABASE {copy.name} TEMPLATE {self._made[key].name} OWNER {OWNER}")
        return copy

    def create(self, server: Postgres, options: dict[str, Any]) -> Outbox:
        """A fresh database that was not migrated: only its owner exists."""
        if server not in self._servers:
            self._servers.add(server)
            for role in (APP, RELAY, OWNER):
                server.execute(f"CREATE ROLE {role} LOGIN")
        created = Outbox(server, f"t{secrets.token_hex(5)}", options)
        server.execute(f"CREATE DATABASE {created.name} OWNER {OWNER}")
        return created

    def _make(self, server: Postgres, options: dict[str, Any]) -> Outbox:
        template = self.create(server, options)
        run_async(run(template.owner))
        with psycopg.connect(template.owner_dsn, autocommit=True) as connection:
            connection.execute(roles.script(template.owner, app=APP, relay=RELAY).encode())
        return template


def run_async(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run in a thread of its own, so that the event loop of an asynchronous test is left alone."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, coroutine).result()


@pytest.fixture(scope="session")
def outbox_templates() -> Templates:
    """The templates of this run."""
    return Templates()


@pytest.fixture
def outbox_factory(postgres: Postgres, outbox_templates: Templates) -> Iterator[OutboxFactory]:
    """`outbox_factory(**options)`: a migrated database with other options than the default."""
    with contextlib.ExitStack() as stack:

        def make(*, server: Postgres | None = None, migrated: bool = True, **options: Any) -> Outbox:
            prepare = outbox_templates.copy if migrated else outbox_templates.create
            made = prepare(server or postgres, options)
            stack.push(Database(made.server, made.name).__exit__)
            return made

        yield make


@pytest.fixture
def outbox(outbox_factory: OutboxFactory) -> Outbox:
    """A fresh outbox with default options."""
    return outbox_factory()
