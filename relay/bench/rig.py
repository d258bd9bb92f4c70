"""The servers of a run: those that the command line names, else PostgreSQL and Valkey from their wheels."""

from __future__ import annotations

import os
import secrets
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from relay.bench.brokers import Target
from relay.bench.databases import connected
from relay.bench.report import Report
from relay.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from relay.bench.report import Table

__all__ = ["Addresses", "Rig", "rig"]

_SETTINGS: Final = {"shared_buffers": "256MB", "max_wal_size": "4GB", "checkpoint_timeout": "30min"}


@dataclass(frozen=True, slots=True)
class Addresses:
    """Of servers that run already; None: start one."""

    dsn: str | None = None
    url: str | None = None
    bootstrap_servers: str | None = None


@dataclass(frozen=True, slots=True)
class Rig:
    """Where things are. `server` is a DSN whose user may create databases."""

    server: str
    target: Target
    version: str
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])

    def report(self, command: str, *tables: Table) -> Report:
        """A report about a run on these servers."""
        return Report(command, tables, self.version, self.load_before)


@asynccontextmanager
async def rig(addresses: Addresses, sink: str = "null") -> AsyncIterator[Rig]:
    """Start what is missing. Raises InvalidConfig for a broker that we do not start ourselves."""
    async with AsyncExitStack() as stack:
        topic = f"bench_{secrets.token_hex(3)}"
        options = _options(addresses, sink, stack)
        server = addresses.dsn or _postgres(stack)
        async with connected(server) as connection:
            version = "PostgreSQL " + await connection.fetchval("SHOW server_version")
        yield Rig(server, Target(sink, options, topic), version)


def _options(addresses: Addresses, sink: str, stack: AsyncExitStack) -> dict[str, Any]:
    if sink == "null":
        return {}
    if sink == "kafka":
        if addresses.bootstrap_servers is None:
            raise InvalidConfig(
                "where is Kafka?", hint="--bootstrap-servers HOST:PORT, or `make bench`, which starts one"
            )
        return {"bootstrap_servers": addresses.bootstrap_servers}
    if addresses.url is not None:
        return {"url": addresses.url}
    if sink == "redis":
        from relay.demo.servers import Valkey  # noqa: PLC0415  # comes with the extra `demo`

        valkey = stack.enter_context(Valkey(persistent=False))
        return {"url": f"redis://{valkey.host}:{valkey.port}/0"}
    raise InvalidConfig(f"where is {sink}?", hint="--url amqp://..., or `make bench`, which starts one")


def _postgres(stack: AsyncExitStack) -> str:
    from relay.demo.servers import Postgres  # noqa: PLC0415  # comes with the extra `demo`

    return stack.enter_context(Postgres(settings=_SETTINGS)).superuser_dsn
