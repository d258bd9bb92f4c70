"""`relay config show` and `relay config schema`."""

from __future__ import annotations

import click

from relay.cli.app import FINE
from relay.cli.options import as_json, configured, settings
from relay.cli.output import print_json, safe


@click.group()
def config() -> None:
    """Show the settings in force, or their schema."""


@config.command()
@as_json
@configured
def show(*, config_path: str | None, flags: tuple[str, ...], json_: bool) -> int:
    """Every setting in force, where it comes from, and no secret."""
    from relay.config import shown  # noqa: PLC0415  # pydantic is not needed for --help

    loaded = settings(config_path, flags, sinks_required=False)
    found = list(shown.settings(loaded))
    if json_:
        print_json({"file": str(loaded.file) if loaded.file else None, "settings": found, "warnings": loaded.warnings})
        return FINE
    width = max(len(setting.name) for setting in found)
    for setting in found:
        origin = "" if setting.origin == "default" else f"  # {setting.origin}"
        click.echo(f"{setting.name:<{width}} = {safe(_toml(setting.value))}{origin}")
    for warning in loaded.warnings:
        click.echo(f"warning: {safe(warning)}", err=True)
    return FINE


def _toml(value: object) -> str:
    import orjson  # noqa: PLC0415

    return "not set" if value is None else orjson.dumps(value).decode()


@config.command()
def schema() -> int:
    """JSON Schema of relay.toml, for editors: each sink type with its own options."""
    from relay.cli.reference import json_schema  # noqa: PLC0415  # it imports the clients of all brokers

    print_json(json_schema())
    return FINE
