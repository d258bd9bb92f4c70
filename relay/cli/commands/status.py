"""`relay status`."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import click

from relay.cli.app import FINE
from relay.cli.options import as_json, configured, settings

if TYPE_CHECKING:
    from relay.config import Config


@click.command()
@click.option("--watch", is_flag=True, help="Keep showing it until Ctrl+C.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2, max=3600),
    default=2.0,
    show_default=True,
    help="Seconds that rates are measured over, and between refreshes of --watch.",
)
@click.option("--ping/--no-ping", default=True, show_default=True, help="Ask each sink whether it takes messages.")
@as_json
@configured
def status(
    *, config_path: str | None, flags: tuple[str, ...], watch: bool, interval: float, ping: bool, json_: bool
) -> int:
    """Show backlog, oldest age, rates, sinks, parked and dead deliveries, and who owns which lanes.

    Reads the database with the relay's own rights; no pod has to be running. Sinks are asked from here.
    """
    config = settings(config_path, flags, sinks_required=False).config
    try:
        asyncio.run(_show(config, watch=watch, interval=interval, ping=ping, json_=json_))
    except KeyboardInterrupt:
        if not watch:
            raise
    return FINE


async def _show(config: Config, *, watch: bool, interval: float, ping: bool, json_: bool) -> None:
    from relay.cli import snapshot  # noqa: PLC0415  # asyncpg is not needed for --help
    from relay.cli.output import print_json  # noqa: PLC0415

    # Closed here and not by the garbage collector: it holds a connection.
    async with aclosing(snapshot.looks(config, interval=interval, ping=ping)) as looks:
        if json_:
            async for look in looks:
                print_json(look.document())
                if not watch:
                    return
        from relay.cli import status_view  # noqa: PLC0415  # rich is 15 MB

        await status_view.show(looks, watch=watch)
