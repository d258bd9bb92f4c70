"""Scratch databases: one is filled, and every round gets a copy, so that all contenders start from the same pages."""

from __future__ import annotations

import secrets
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from relay.bench.workload import Workload, fill
from relay.config import Database
from relay.migrate import run as migrate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["connected", "filled", "scratch"]


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    """A connection without a statement time limit."""
    connection = await asyncpg.connect(dsn, server_settings={"application_name": "relay bench"})
    try:
        yield connection
    finally:
        await connection.close(timeout=5)


@asynccontextmanager
async def scratch(server: str, template: str | None = None) -> AsyncIterator[str]:
    """DSN of a new database with an outbox, or a copy of another one; dropped at the end."""
    name = f"relay_bench_{secrets.token_hex(4)}"
    dsn = _with_database(server, name)
    async with connected(server) as admin:
        source = f" TEMPLATE {_database(template)}" if template else ""
        await admin.execute(f"CREATE DATABASE {name}{source}")
    try:
        if template is None:
            await migrate(Database.model_validate({"dsn": dsn}))
        else:
            await _warm(dsn)
        yield dsn
    finally:
        async with connected(server) as admin:
            await admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


@asynccontextmanager
async def filled(server: str, workload: Workload) -> AsyncIterator[str]:
    """DSN of a database that holds the workload; nobody may be connected when it is copied."""
    async with scratch(server) as dsn:
        async with connected(dsn) as connection:
            await fill(connection, workload)
        yield dsn


async def _warm(dsn: str) -> None:
    async with connected(dsn) as connection:
        await connection.fetchval("SELECT count(payload::text) FROM outbox")


def _database(dsn: str) -> str:
    return urlsplit(dsn).path.lstrip("/")


def _with_database(dsn: str, name: str) -> str:
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{name}"))
