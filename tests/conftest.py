"""Fixtures that every test may ask for: servers, and a place of one's own inside them.

Servers start once per run, with the first test that needs them; tests are kept apart by database,
topic, vhost or key prefix. A test that hurts a server asks for its own one (`own_...`).
"""

from __future__ import annotations

import os
import secrets
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import pytest

from relay.demo.processes import Server
from tests.servers.downloads import postgres_installation
from tests.servers.kafka import Kafka
from tests.servers.missing import reasons, skip_if_missing
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import Database, Postgres
from tests.servers.proxy import Proxy
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.redis import Redis, Valkey
from tests.timeouts import time_limit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterator

S = TypeVar("S", bound="Server")


pytest_plugins = ["tests.outbox"]


@pytest.fixture
def unique() -> str:
    """A short text that no other test has: for topics, key prefixes, slots, roles."""
    return f"t{secrets.token_hex(5)}"


MEMORY = "/dev/shm"


def memory_is_plenty() -> bool:
    """Whether there is a file system in memory that holds whatever tests write, and programs may run from it."""
    if not Path(MEMORY).is_dir():
        return False
    about = os.statvfs(MEMORY)
    return about.f_bavail * about.f_frsize >= 6 << 30 and not about.f_flag & os.ST_NOEXEC


def running(make: Callable[[], S]) -> Iterator[S]:
    """A server from start to end, or the skip that says what is missing."""
    with ExitStack() as stack:
        with skip_if_missing():
            server = make()
            stack.enter_context(server)
        yield server


# --- PostgreSQL ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """PostgreSQL 18, shared by the run: never stop or kill it (`own_postgres` is for that)."""
    yield from running(Postgres)


@pytest.fixture
def database(postgres: Postgres, unique: str) -> Iterator[Database]:
    """A fresh, empty database of PostgreSQL 18."""
    with Database(postgres, unique) as made:
        yield made


@pytest.fixture(scope="session")
def postgres_of_version() -> Iterator[Callable[[int], Postgres]]:
    """Starts each major version once."""
    servers: dict[int, Postgres] = {}
    with ExitStack() as stack:

        def get(version: int) -> Postgres:
            if version not in servers:
                with skip_if_missing():
                    servers[version] = stack.enter_context(Postgres(postgres_installation(version)))
            return servers[version]

        yield get


@pytest.fixture(params=[15, 16, 17, 18])
def any_postgres(request: pytest.FixtureRequest) -> Postgres:
    """Each supported version in turn: the test runs once with each."""
    server: Postgres
    if request.param == 18:
        server = request.getfixturevalue("postgres")
    else:
        server = request.getfixturevalue("postgres_of_version")(request.param)
    return server


@pytest.fixture
def any_database(any_postgres: Postgres, unique: str) -> Iterator[Database]:
    """A fresh, empty database of each supported version in turn."""
    with Database(any_postgres, unique) as made:
        yield made


@pytest.fixture
def own_postgres() -> Iterator[Postgres]:
    """A PostgreSQL 18 for one test, that it may stop, kill, freeze and start again."""
    yield from running(Postgres)


@pytest.fixture
def pgbouncer(database: Database) -> Iterator[PgBouncer]:
    """A pooler in transaction mode in front of `database`; `.dsn` as the superuser, `.dsn_of(role)`."""
    yield from running(lambda: PgBouncer(database))


# --- brokers -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def valkey() -> Iterator[Valkey]:
    """Valkey from its wheel, shared by the run; use keys that begin with `unique`."""
    yield from running(Valkey)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Redis]:
    """Redis, shared by the run; use keys that begin with `unique`."""
    yield from running(Redis)


@pytest.fixture
def own_redis() -> Iterator[Valkey]:
    """A Valkey for one test, that it may stop, kill, freeze, fill up and configure."""
    yield from running(Valkey)


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    """RabbitMQ, shared by the run; `vhost` is a test's own part of it."""
    yield from running(RabbitMQ)


@pytest.fixture
def vhost(rabbitmq: RabbitMQ, unique: str) -> Iterator[str]:
    """URL of a fresh vhost; removed afterwards with everything in it."""
    rabbitmq.add_vhost(unique)
    yield rabbitmq.url(unique)
    rabbitmq.delete_vhost(unique)


@pytest.fixture
def own_rabbitmq() -> Iterator[RabbitMQ]:
    """A RabbitMQ for one test, that it may stop, kill, freeze and start again (5 s to start)."""
    yield from running(RabbitMQ)


@pytest.fixture(scope="session")
def kafka() -> Iterator[Kafka]:
    """A Kafka broker, shared by the run; `await kafka.create_topic(unique)` makes a topic."""
    yield from running(Kafka)


@pytest.fixture
def own_kafka() -> Iterator[Kafka]:
    """A Kafka broker for one test, that it may stop, kill, freeze and start again (5 s to start)."""
    yield from running(Kafka)


# --- the wire ------------------------------------------------------------------------------------


class MakeProxy(Protocol):
    """What the fixture `proxy` gives."""

    async def __call__(self, host: str, port: int, *, listen_port: int | None = None) -> Proxy:
        """Start a proxy to that address."""


@pytest.fixture
async def proxy() -> AsyncIterator[MakeProxy]:
    """A TCP proxy that can be cut, delayed and so on; call it with host and port, and await it."""
    async with AsyncExitStack() as stack:

        async def make(host: str, port: int, *, listen_port: int | None = None) -> Proxy:
            return await stack.enter_async_context(Proxy(host, port, port=listen_port))

        yield make


@pytest.fixture
async def kafka_proxy(kafka: Kafka, proxy: MakeProxy) -> Proxy:
    """The proxy behind `kafka.proxied_bootstrap_servers`: clients that begin there stay behind it."""
    return await proxy(kafka.host, kafka.behind_proxy_port, listen_port=kafka.proxied_port)


# --- the run -------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Make our marker known, and keep the servers' files in memory: a database is made five times as fast."""
    if memory_is_plenty():
        Server.folders = (MEMORY, *Server.folders)
    config.addinivalue_line("markers", "time_limit(seconds): how long the test may take instead of the usual limit")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the time of a test's fixtures; the first use of a server may include its download."""
    with time_limit(item, 600):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the time of a test."""
    marker = item.get_closest_marker("time_limit")
    with time_limit(item, marker.args[0] if marker else 90):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the time of cleaning up."""
    with time_limit(item, 120):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, object, object]:
    """Say loudly, once each and after everything else, which servers were missing and how to get them."""
    result = yield
    for reason in reasons:
        terminalreporter.write_line(f"SKIPPED FOR WANT OF A SERVER: {reason}", red=True, bold=True)
    return result
