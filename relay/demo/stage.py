"""Everything that the demo starts: the database with its roles, the broker, the relay pods; and all of it ended.

Starting blocks, so it happens in threads: the terminal and Ctrl-C stay alive. `close` is safe at any time,
and what it cannot do (after SIGKILL) the guardian of `relay.demo.processes` does.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

import psycopg

from relay import migrate
from relay.config import Database
from relay.demo import shop
from relay.demo.pod import Pod
from relay.demo.servers import Postgres, Valkey
from relay.migrate import roles

if TYPE_CHECKING:
    from relay.demo.processes import Server

__all__ = ["PODS", "Stage"]

S = TypeVar("S", bound="Server")

PODS: Final = 2
_DATABASE: Final = "shop"
_RELAY_ROLE: Final = "relay"


class Stage:
    """The servers of one demo."""

    def __init__(self) -> None:
        self._servers: list[Server] = []
        self.pods: list[Pod] = []
        self.postgres = self._add(Postgres())
        # It is killed on purpose, and nothing that it confirmed may be lost then. "no": each write is handed to the
        # kernel before its reply is sent, and survives the process. "everysec" may reply first while the disk is slow.
        self.broker = self._add(Valkey(settings={"appendfsync": "no"}))

    def _add(self, server: S) -> S:
        self._servers.append(server)
        return server

    @property
    def owner_dsn(self) -> str:
        """The shop's database, as the owner of everything in it."""
        return self.postgres.dsn(_DATABASE)

    @property
    def shop_dsn(self) -> str:
        """As the application: inserts into the outbox and cannot read it."""
        return self.postgres.dsn(_DATABASE, shop.ROLE)

    async def start_database(self) -> None:
        """PostgreSQL with an empty database."""
        await asyncio.to_thread(self.postgres.start)
        await asyncio.to_thread(self.postgres.execute, f"CREATE DATABASE {_DATABASE}")

    async def migrate(self) -> None:
        """What `relay migrate` and the script of `relay migrate --roles` do, and the shop's own tables."""
        database = Database.model_validate({"dsn": self.owner_dsn})
        await migrate.run(database)
        script = roles.script(database, app=shop.ROLE, relay=_RELAY_ROLE)
        await asyncio.to_thread(self._execute, script + shop.SCHEMA)

    def _execute(self, script: str) -> None:
        with psycopg.connect(self.owner_dsn, autocommit=True) as connection:
            connection.execute(script.encode())

    async def start_broker(self) -> None:
        """Start it for the first time, or again with what it had written."""
        await asyncio.to_thread(self.broker.start)

    async def kill_broker(self) -> None:
        """SIGKILL: no goodbye, connections break, then every new one is refused."""
        await asyncio.to_thread(self.broker.kill9)

    async def start_pod(self) -> Pod:
        """One more relay; returns when it is ready."""
        pod = self._add(Pod(f"pod-{len(self.pods) + 1}", self.postgres.dsn(_DATABASE, _RELAY_ROLE), self.broker.url))
        self.pods.append(pod)
        await asyncio.to_thread(pod.start)
        return pod

    async def kill_pod(self, pod: Pod) -> None:
        """SIGKILL: its lanes stay in its name, its sessions break."""
        await asyncio.to_thread(pod.kill9)

    async def stop_pods(self) -> None:
        """SIGTERM to all of them: they settle what is in flight and hand over."""
        await asyncio.gather(*(asyncio.to_thread(pod.stop) for pod in self.pods))

    def hurry(self) -> None:
        """Do not wait for pods that are about to start or to stop in good order: threads that do come back at once."""
        for pod in self.pods:
            pod.kill9()

    def close(self) -> None:
        """End everything and remove its files. Blocks for a moment."""
        with ThreadPoolExecutor(len(self._servers)) as threads:
            list(threads.map(lambda server: server.close(), reversed(self._servers)))
