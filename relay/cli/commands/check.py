"""`relay check`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import click

from relay.cli.app import FAILED, FINE
from relay.cli.options import as_json, configured, settings
from relay.cli.output import print_json, safe
from relay.redaction import redact

if TYPE_CHECKING:
    from relay.cli.preflight import Finding
    from relay.config import Loaded

_COLOURS: Final = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@as_json
@configured
def check(*, config_path: str | None, flags: tuple[str, ...], json_: bool) -> int:
    """Say what would keep the relay from running, and what to do about it.

    Looks at settings, database, schema, rights, notifications, pods, leftovers, and asks each sink. Changes nothing.
    Exit code 1 when something fails; warnings are no failure.
    """
    found = asyncio.run(_look(settings(config_path, flags), quiet=json_))
    failed = any(finding.state == "fail" for finding in found)
    if json_:
        print_json({"ok": not failed, "findings": found})
    return FAILED if failed else FINE


async def _look(loaded: Loaded, *, quiet: bool) -> list[Finding]:
    from relay.cli.preflight import findings  # noqa: PLC0415  # asyncpg is not needed for --help

    found = []
    async for finding in findings(loaded):
        found.append(finding)
        if not quiet:
            _print(finding)
    return found


def _print(finding: Finding) -> None:
    state = click.style(f"{finding.state:<4}", fg=_COLOURS[finding.state])
    click.echo(f"{state}  {safe(finding.name):<12}  {safe(redact(finding.text))}")
    if finding.hint:
        click.echo(f"      {'':<12}  -> {safe(redact(finding.hint))}")
