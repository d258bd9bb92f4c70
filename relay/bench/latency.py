"""`relay bench latency`: from the commit of one event to a subscriber that sees it, at a steady rate."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from relay.bench.brokers import prepare
from relay.bench.consumers import consuming
from relay.bench.contender import raw, relay
from relay.bench.databases import connected, scratch
from relay.bench.figures import percentile
from relay.bench.ports import free_port
from relay.bench.report import Report, Table
from relay.bench.workload import HEADERS, payload

if TYPE_CHECKING:
    from collections.abc import Callable

    import asyncpg

    from relay.bench.contender import Contender, Running
    from relay.bench.rig import Rig

__all__ = ["latency"]

_WRITERS: Final = 4
_WARM_SECONDS: Final = 1.0
_PATIENCE_SECONDS: Final = 10.0
_INSERT: Final = "INSERT INTO outbox (id, topic, key, payload, headers) VALUES ($1, $2, $3, $4, $5)"
_COLUMNS = ("contender", "events", "per second", "p50 ms", "p99 ms", "max ms", "CPU % of a core", "missing")


@dataclass(slots=True)
class _Round:
    """Latencies in seconds. An event may be seen before its writer hears of its own commit: that counts as 0."""

    latencies: list[float]
    seconds: float
    cpu_seconds: float
    missing: int


async def latency(rig: Rig, *, rate: int, seconds: float, rounds: int) -> Report:
    """Interleaved rounds; percentiles over all events of all rounds of a contender."""
    target = rig.target
    contenders: tuple[Callable[[str], Contender], ...] = (
        lambda dsn: raw(dsn, target),
        lambda dsn: relay(dsn, target, free_port()),
    )
    found: dict[str, list[_Round]] = {}
    for _ in range(rounds):
        for make in contenders:
            await prepare(target)
            async with scratch(rig.server) as dsn, make(dsn).running() as running:
                await running.ready()
                found.setdefault(running.contender.name, []).append(await _measure(rig, dsn, running, rate, seconds))
    title = f"{rate:,} transactions per second for {seconds:g} s → {target.sink}, commit to seen by a subscriber"
    rows = tuple(_row(name, results) for name, results in found.items())
    return rig.report(f"latency {target.sink} {rate}", Table(title, _COLUMNS, rows, bars="p50 ms"))


async def _measure(rig: Rig, dsn: str, running: Running, rate: int, seconds: float) -> _Round:
    async with consuming(rig.target) as seen:
        await _write(dsn, rig.target.topic, rate, _WARM_SECONDS)
        cpu, began = running.cpu_seconds(), time.monotonic()
        committed = await _write(dsn, rig.target.topic, rate, seconds)
        took, cpu_seconds = time.monotonic() - began, running.cpu_seconds() - cpu
        patience_ends = time.monotonic() + _PATIENCE_SECONDS
        while (missing := len(committed.keys() - seen.keys())) and time.monotonic() < patience_ends:
            running.check()
            await asyncio.sleep(0.05)
    latencies = [max(seen[event] - at, 0.0) for event, at in committed.items() if event in seen]
    return _Round(latencies, took, cpu_seconds, missing)


async def _write(dsn: str, topic: str, rate: int, seconds: float) -> dict[str, float]:
    """Commit events at the rate, one in each transaction. Returns when each was known to be committed."""
    committed: dict[str, float] = {}
    begins = time.monotonic()

    async def writer(connection: asyncpg.Connection[Any], number: int) -> None:
        statement = await connection.prepare(_INSERT)
        for index in range(number, int(rate * seconds), _WRITERS):
            if (pause := begins + index / rate - time.monotonic()) > 0:
                await asyncio.sleep(pause)
            event = uuid.uuid4()
            await statement.fetch(event, topic, f"customer-{index % 1000}", payload(index), HEADERS)
            committed[str(event)] = time.monotonic()

    async with asyncio.TaskGroup() as group:
        for number in range(_WRITERS):
            group.create_task(_with_connection(dsn, number, writer))
    return committed


async def _with_connection(dsn: str, number: int, write: Callable[..., Any]) -> None:
    async with connected(dsn) as connection:
        await write(connection, number)


def _row(name: str, rounds: list[_Round]) -> tuple[str | float, ...]:
    latencies = [seconds * 1_000 for result in rounds for seconds in result.latencies]
    seconds = sum(result.seconds for result in rounds)
    return (
        name,
        float(len(latencies)),
        len(latencies) / seconds,
        percentile(latencies, 50),
        percentile(latencies, 99),
        max(latencies, default=0.0),
        sum(result.cpu_seconds for result in rounds) / seconds * 100,
        float(sum(result.missing for result in rounds)),
    )
