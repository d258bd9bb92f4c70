"""Fixtures that every test may ask for: servers, and a name of one's own inside them.

Servers start once per run, with the first test that needs them; tests are kept apart by database,
topic, vhost or key prefix. A test that hurts a server asks for its own one (`own_...`).
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from relay.demo.servers import Valkey
from tests.servers import missing
from tests.servers.postgres import Database, Postgres

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ["tests.outbox"]

# --- names ---------------------------------------------------------------------------------------


@pytest.fixture
def unique() -> str:
    """A short text that no other test has: for topics, key prefixes, slots, roles."""
    return f"t{secrets.token_hex(5)}"


# --- PostgreSQL ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """PostgreSQL 18, shared by the run: never stop or kill it (`own_postgres` is for that)."""
    with Postgres() as server:
        yield server


@pytest.fixture
def own_postgres() -> Iterator[Postgres]:
    """A PostgreSQL 18 for one test, that it may stop, kill, freeze and start again."""
    with Postgres() as server:
        yield server


@pytest.fixture
def database(postgres: Postgres, unique: str) -> Iterator[Database]:
    """A fresh, empty database."""
    with Database(postgres, unique) as made:
        yield made


# --- Redis Streams -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def valkey() -> Iterator[Valkey]:
    """Valkey from its wheel, shared by the run; use keys that begin with `unique`."""
    with Valkey() as server:
        yield server


# --- reporting -----------------------------------------------------------------------------------


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly, once each, which servers were missing and how to get them."""
    for reason in missing.reasons:
        terminalreporter.write_line(f"SKIPPED FOR WANT OF A SERVER: {reason}", red=True, bold=True)
