"""`relay migrate`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import click

from relay.cli.app import FAILED, FINE
from relay.cli.options import as_json, configured, settings
from relay.cli.output import print_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from relay.config import Database

Result = TypeVar("Result")


@click.command()
@click.option("--dry-run", is_flag=True, help="Print the SQL that would be executed, and change nothing.")
@click.option("--check", is_flag=True, help="Change nothing; exit 1 when something is missing.")
@click.option(
    "--roles",
    multiple=True,
    metavar="app=NAME|relay=NAME",
    help="Print the script that makes the two roles and grants them what they need. Give it once for each role.",
)
@click.option(
    "--wait", type=click.FloatRange(min=0), default=120.0, show_default=True, help="Seconds without progress."
)
@as_json
@configured
def migrate(
    *,
    config_path: str | None,
    flags: tuple[str, ...],
    dry_run: bool,
    check: bool,
    roles: tuple[str, ...],
    wait: float,
    json_: bool,
) -> int:
    """Create the tables or bring them up to date.

    Safe to run from many pods at once, and never in the way of producers. Connects to database.direct_dsn or
    database.dsn, as the role that is to own the tables.
    """
    if dry_run + check + bool(roles) > 1:
        raise click.UsageError("--dry-run, --check and --roles exclude each other")
    database = settings(config_path, flags, sinks_required=False).config.database
    if roles:
        return _roles(database, roles)
    if dry_run:
        return _plan(database)
    return _check(database, json_=json_) if check else _run(database, wait, json_=json_)


def _run(database: Database, wait: float, *, json_: bool) -> int:
    from relay import migrate as migrations  # noqa: PLC0415  # asyncpg is not needed for --help

    applied = asyncio.run(_reached(database, lambda: migrations.run(database, wait_seconds=wait)))
    if json_:
        print_json({"applied": applied})
    elif not applied:
        click.echo("Nothing to do: the tables are up to date.")
    for step in () if json_ else applied:
        click.echo(f"applied {step.name}")
    return FINE


def _plan(database: Database) -> int:
    from relay import migrate as migrations  # noqa: PLC0415

    script = asyncio.run(_reached(database, lambda: migrations.plan(database)))
    click.echo(script or "-- Nothing to do: the tables are up to date.", nl=not script)
    return FINE


def _check(database: Database, *, json_: bool) -> int:
    from relay import migrate as migrations  # noqa: PLC0415

    found = asyncio.run(_reached(database, lambda: migrations.check(database)))
    if json_:
        print_json(found)
    elif found.state == "behind":
        click.echo(f"behind: {', '.join(found.pending)} not applied; run `relay migrate`")
    else:
        click.echo(f"{found.state}: version {found.version}, this package has {found.latest}")
    return FAILED if found.state == "behind" else FINE


def _roles(database: Database, roles: tuple[str, ...]) -> int:
    from relay.migrate import roles as scripts  # noqa: PLC0415

    named = dict(role.partition("=")[::2] for role in roles)
    if not all(named.values()) or not named.keys() <= {"app", "relay"}:
        raise click.UsageError("--roles takes app=NAME and relay=NAME")
    click.echo(scripts.script(database, app=named.get("app"), relay=named.get("relay")), nl=False)
    return FINE


async def _reached(database: Database, work: Callable[[], Awaitable[Result]]) -> Result:
    """`work`, after a look whether the database can be reached at all: that error names host and port."""
    from relay.cli.session import connect  # noqa: PLC0415

    async with connect(database, direct=True):
        pass
    return await work()
