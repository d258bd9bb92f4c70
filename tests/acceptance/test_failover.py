"""A standby is promoted that does not have everything: numbers are given out again, and mean other events."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from tests.acceptance.consumers import redis_consumer
from tests.acceptance.pods import eventually, settings_of
from tests.servers.postgres import Postgres

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.acceptance.pods import Pods
    from tests.outbox import Outbox, OutboxFactory
    from tests.servers.redis import Valkey


class Standby(Postgres):
    """An asynchronous standby of another cluster."""

    def __init__(self, primary: Postgres) -> None:
        super().__init__()
        self._primary = primary

    def prepare(self) -> None:
        """Copy the primary instead of making a cluster."""
        self._make_installation_reachable()
        source = ("-h", self._primary.host, "-p", str(self._primary.port), "-U", "postgres")
        self.run(self.bin / "pg_basebackup", *source, "-D", self.data, "-R", "-c", "fast", "--no-sync")

    def has_everything(self) -> bool:
        """It has replayed all that the primary has written."""
        ((end,),) = self._primary.execute("SELECT pg_current_wal_lsn()::text")
        return self.execute(f"SELECT pg_last_wal_replay_lsn() >= '{end}'") == [(True,)]


@pytest.fixture
def outbox(own_postgres: Postgres, outbox_factory: OutboxFactory) -> Iterator[Outbox]:
    """An outbox on a primary that the test kills; it is back for the cleaning."""
    yield outbox_factory(server=own_postgres)
    if not own_postgres.running:
        own_postgres.start()


def insert(server: Postgres, outbox: Outbox, topic: str, count: int) -> list[str]:
    """Events of three keys, one transaction each; their ids in order."""
    ids = [str(uuid4()) for _ in range(count)]
    for number, event in enumerate(ids):
        server.execute(
            f"INSERT INTO outbox (id, topic, key, payload) VALUES ('{event}', '{topic}', '{number % 3}', '1')",
            outbox.name,
        )
    return ids


def last_number(server: Postgres, outbox: Outbox) -> int:
    ((number,),) = server.execute(outbox.names.format("SELECT last_value FROM {outbox_seq}"), outbox.name)
    return int(number)


@pytest.mark.time_limit(180)
async def test_after_a_failover_numbers_that_are_given_out_again_are_new_events(
    own_postgres: Postgres, outbox: Outbox, pods: Pods, valkey: Valkey, unique: str
) -> None:
    """What pods remember by number (floors, events in flight) is the old server's: nothing new is skipped or settled."""
    with Standby(own_postgres) as standby:
        hosts = f"{own_postgres.host}:{own_postgres.port},{standby.host}:{standby.port}"
        dsn = outbox.relay_dsn.replace(f"{own_postgres.host}:{own_postgres.port}", hosts)
        settings = settings_of(outbox, {"main": {"type": "redis", "url": valkey.url}}, database={"dsn": dsn})
        await pods.start_many(2, settings)
        async with redis_consumer(valkey.url, [unique]) as consumer:
            await consumer.wait_for(await asyncio.to_thread(insert, own_postgres, outbox, unique, 30))
            await eventually("the standby has it all", lambda: asyncio.to_thread(standby.has_everything))
            await asyncio.to_thread(standby.stop)
            await consumer.wait_for(await asyncio.to_thread(insert, own_postgres, outbox, unique, 150))
            old = last_number(own_postgres, outbox)

            await asyncio.to_thread(own_postgres.kill9)
            await asyncio.to_thread(standby.start)
            standby.execute("SELECT pg_promote()")
            assert last_number(standby, outbox) < old, "nothing is given out again: the test shows nothing"
            later = await asyncio.to_thread(insert, standby, outbox, unique, 60)
            await consumer.wait_for(later)
            await pods.stop_all()
            await consumer.drain()
            first = [event for event in dict.fromkeys(consumer.ids) if event in set(later)]
            for key in range(3):
                assert [event for event in first if event in later[key::3]] == later[key::3]
            assert standby.execute("SELECT count(*) FROM outbox", outbox.name) == [(0,)]
