"""`relay run`."""

from __future__ import annotations

import asyncio

import click

from relay.cli.app import FINE
from relay.cli.options import as_json, configured, settings


@click.command()
@click.option(
    "--dry-run",
    is_flag=True,
    help="Publish and settle nothing: print where the oldest events would go, and end.",
)
@click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Events of --dry-run.")
@as_json
@configured
def run(*, config_path: str | None, flags: tuple[str, ...], dry_run: bool, limit: int, json_: bool) -> int:
    """Run the relay until SIGTERM or SIGINT; a second signal ends it at once."""
    loaded = settings(config_path, flags)
    if dry_run:
        from relay.cli import dry_run as rehearsal  # noqa: PLC0415  # needs the engine, --help does not

        return asyncio.run(rehearsal.print_plan(loaded.config, limit, json_=json_)) or FINE
    from relay.service import run as serve  # noqa: PLC0415
    from relay.telemetry import logs  # noqa: PLC0415

    logs.configure(loaded.config.logging)
    for warning in loaded.warnings:
        logs.get_logger("relay.config").warning(warning)
    return serve(loaded.config)
