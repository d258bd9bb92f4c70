"""`relay bench idle`: what one pod costs while nothing happens, itself and its sessions in PostgreSQL."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from relay.bench.accounts import Sessions, ended_children_seconds, postmaster_of
from relay.bench.contender import relay
from relay.bench.databases import connected, scratch
from relay.bench.ports import free_port
from relay.bench.report import Report, Table

if TYPE_CHECKING:
    from relay.bench.rig import Rig

__all__ = ["idle"]

_SETTLE_SECONDS: Final = 3.0
"""After the start: until the cluster sleeps and the imports are paid."""
_COLUMNS = ("pod", "RSS MB", "relay CPU %", "PostgreSQL CPU %", "together %", "sessions")


async def idle(rig: Rig, *, seconds: float) -> Report:
    """Shares of one core over so many seconds."""
    async with scratch(rig.server) as dsn, connected(dsn) as connection:
        postmaster = await postmaster_of(connection)
        async with relay(dsn, rig.target, free_port()).running() as running:
            await running.ready()
            await asyncio.sleep(_SETTLE_SECONDS)
            sessions = Sessions(connection)
            await sessions.begin()
            began, cpu, ended = time.monotonic(), running.cpu_seconds(), ended_children_seconds(postmaster)
            await asyncio.sleep(seconds)
            took = time.monotonic() - began
            own = (running.cpu_seconds() - cpu) / took * 100
            served = await sessions.seconds() + ended_children_seconds(postmaster) - ended
            count = await connection.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            share = served / took * 100
            row = ("idle", running.rss_mb(), own, share, own + share, float(count))
    title = f"one idle pod, sink {rig.target.sink}, {seconds:g} s, shares of one core"
    note = "PostgreSQL counts the relay's sessions, and whatever else the server ended meanwhile (autovacuum workers)."
    return rig.report(f"idle {rig.target.sink}", Table(title, _COLUMNS, (row,), note=note))
