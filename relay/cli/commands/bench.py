"""`relay bench`: one sub-command for each question; the measuring itself is in `relay.bench`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relay.cli.app import FINE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from relay.bench.report import Report
    from relay.bench.rig import Rig

_SINKS = ("null", "redis", "kafka", "rabbitmq")


@click.group()
def bench() -> None:
    """Measure the relay beside the raw loop of the same path.

    Figures are ratios within one run. PostgreSQL and Valkey are started from the extra `demo` unless an address
    is given; scratch databases are made and dropped, and the results go to bench-results/.
    """


def _common(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every sub-command; they arrive as one dictionary, `where`."""
    for option in (
        click.option("--dsn", metavar="URL", help="PostgreSQL whose user may create databases. Default: start one."),
        click.option("--url", metavar="URL", help="Redis or RabbitMQ. Default: start a Valkey."),
        click.option("--bootstrap-servers", metavar="HOST:PORT", help="Kafka."),
        click.option(
            "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write JSON here."
        ),
        click.option(
            "--out",
            type=click.Path(file_okay=False, path_type=Path),
            default=Path("bench-results"),
            show_default=True,
            help="Folder for JSON, Markdown and chart.",
        ),
    ):
        function = option(function)
    return function


_sink = click.option("--sink", type=click.Choice(_SINKS), default="null", show_default=True, help="Where events go.")
_rounds = click.option(
    "--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Interleaved rounds."
)
_settle = click.option(
    "--settle", type=click.Choice(["delete", "keep"]), default="delete", show_default=True, help="What settling does."
)


@bench.command()
@_sink
@click.option("--events", type=click.IntRange(5_000), default=200_000, show_default=True, help="Backlog.")
@click.option(
    "--shape", type=click.Choice(["single", "batched"]), default="batched", show_default=True, help="Inserts."
)
@_settle
@_rounds
@click.option("--profile", type=click.Path(dir_okay=False), help="One more round under cProfile; statistics go here.")
@_common
def drain(*, sink: str, events: int, shape: Any, settle: str, rounds: int, profile: str | None, **where: Any) -> int:
    """How fast a backlog is settled, start-up left out."""
    from relay.bench import drain as program  # noqa: PLC0415  # each imports the engine

    return _run(
        where,
        sink,
        lambda rig: program.drain(rig, events=events, shape=shape, settle=settle, rounds=rounds, profile=profile),
    )


@bench.command()
@click.option("--sink", type=click.Choice(_SINKS[1:]), default="redis", show_default=True, help="Where events go.")
@click.option("--rate", type=click.IntRange(1, 100_000), default=1_000, show_default=True, help="Commits per second.")
@click.option("--seconds", type=click.FloatRange(1), default=10.0, show_default=True, help="Length of a round.")
@_rounds
@_common
def latency(*, sink: str, rate: int, seconds: float, rounds: int, **where: Any) -> int:
    """From commit to a subscriber that sees the event, at a steady rate."""
    from relay.bench import latency as program  # noqa: PLC0415

    return _run(where, sink, lambda rig: program.latency(rig, rate=rate, seconds=seconds, rounds=rounds))


@bench.command()
@click.option("--clients", type=click.IntRange(1, 100), default=16, show_default=True, help="Connections that insert.")
@click.option("--seconds", type=click.FloatRange(1), default=5.0, show_default=True, help="Length of a case.")
@_rounds
@_common
def producers(*, clients: int, seconds: float, rounds: int, **where: Any) -> int:
    """What the trigger and a working relay cost applications that insert."""
    from relay.bench import producers as program  # noqa: PLC0415

    return _run(where, "null", lambda rig: program.producers(rig, clients=clients, seconds=seconds, rounds=rounds))


@bench.command()
@_sink
@click.option("--seconds", type=click.FloatRange(1), default=30.0, show_default=True, help="How long to look.")
@_common
def idle(*, sink: str, seconds: float, **where: Any) -> int:
    """Memory and CPU of one pod, and of its sessions, while nothing happens."""
    from relay.bench import idle as program  # noqa: PLC0415

    return _run(where, sink, lambda rig: program.idle(rig, seconds=seconds))


@bench.command()
@_sink
@click.option("--largest", type=click.IntRange(1_000), default=1_000_000, show_default=True, help="Largest backlog.")
@click.option("--events", type=click.IntRange(1_000), default=100_000, show_default=True, help="Of the other cases.")
@_common
def growth(*, sink: str, largest: int, events: int, **where: Any) -> int:
    """Cost of an event by backlog, lanes, keys, and beside an old snapshot."""
    from relay.bench import growth as program  # noqa: PLC0415

    return _run(where, sink, lambda rig: program.growth(rig, largest=largest, events=events))


@bench.command()
@_sink
@click.option("--events", type=click.IntRange(1_000), default=1_000_000, show_default=True, help="Backlog.")
@_common
def memory(*, sink: str, events: int, **where: Any) -> int:
    """Resident memory: idle, and the most through a backlog of one transaction."""
    from relay.bench import memory as program  # noqa: PLC0415

    return _run(where, sink, lambda rig: program.memory(rig, events=events))


def _run(where: dict[str, Any], sink: str, measure: Callable[[Rig], Awaitable[Report]]) -> int:
    import uvloop  # noqa: PLC0415

    from relay.bench.rig import Addresses, rig  # noqa: PLC0415

    addresses = Addresses(where["dsn"], where["url"], where["bootstrap_servers"])

    async def work() -> Report:
        async with rig(addresses, sink) as servers:
            return await measure(servers)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(work())
    report.show()
    for path in report.write(where["out"]):
        click.echo(path)
    if where["json_file"] is not None:
        where["json_file"].write_text(report.json(), encoding="utf-8")
    return FINE
