"""`relay bench drain`: a backlog is there, a process starts, how fast is it settled? Relay and raw loop take turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.bench.brokers import prepare
from relay.bench.contender import raw, relay
from relay.bench.databases import connected, filled, scratch
from relay.bench.figures import median_of, paired_ratio
from relay.bench.ports import free_port
from relay.bench.report import Report, Table
from relay.bench.watch import Drain, Watch
from relay.bench.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relay.bench.contender import Contender
    from relay.bench.rig import Rig
    from relay.bench.workload import Shape

__all__ = ["drain", "drained"]

_COLUMNS = (
    "contender", "events/s", "of raw", "CPU µs/event", "server's CPU µs/event", "both, of raw",
    "start to first event s", "peak RSS MB",
)  # fmt: skip


async def drain(rig: Rig, *, events: int, shape: Shape, settle: str, rounds: int, profile: str | None = None) -> Report:
    """Interleaved rounds on copies of one backlog; the medians of both, and their ratios round by round."""
    target = rig.target
    found: dict[str, list[Drain]] = {"raw loop": [], "relay": []}
    contenders: tuple[Callable[[str], Contender], ...] = (
        lambda dsn: raw(dsn, target, settle=settle),
        lambda dsn: relay(dsn, target, free_port(), settle=settle),
    )
    async with filled(rig.server, Workload(events, shape, topic=target.topic)) as template:
        if target.sink != "null":
            await drained(rig, template, contenders[0])  # a cold broker is 30 % slower
        for number in range(rounds):
            for make in contenders[:: 1 if number % 2 == 0 else -1]:
                name, result = await drained(rig, template, make)
                found[name].append(result)
        if profile is not None:
            prefix = ("-m", "cProfile", "-o", profile)
            await drained(rig, template, lambda dsn: relay(dsn, target, free_port(), settle=settle, prefix=prefix))
    title = f"{events:,} events, {shape} inserts → {target.sink}, settle = {settle}, {rounds} rounds"
    rows = tuple(_row(name, results, found["raw loop"]) for name, results in found.items())
    command = f"drain {target.sink} {shape} {settle}"
    return rig.report(command, Table(title, _COLUMNS, rows, bars="events/s"))


async def drained(rig: Rig, template: str, make: Callable[[str], Contender]) -> tuple[str, Drain]:
    """One contender on a fresh copy."""
    await prepare(rig.target)
    async with scratch(rig.server, template) as dsn, connected(dsn) as connection:
        watch = await Watch.on(connection)
        async with make(dsn).running() as running:
            return running.contender.name, await watch.drained(running)


def _row(name: str, results: Sequence[Drain], floors: Sequence[Drain]) -> tuple[str | float, ...]:
    def both(drains: Sequence[Drain]) -> list[float]:
        return [drain.cpu_us + drain.server_cpu_us for drain in drains]

    return (
        name,
        median_of(result.per_second for result in results),
        paired_ratio([result.per_second for result in results], [floor.per_second for floor in floors]),
        median_of(result.cpu_us for result in results),
        median_of(result.server_cpu_us for result in results),
        paired_ratio(both(results), both(floors)),
        median_of(result.first_event_seconds for result in results),
        max(result.rss_peak_mb for result in results),
    )
