"""Options that commands share, and how a command gets its settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.config import Loaded

__all__ = ["as_json", "configured", "settings"]

Command = Any  # click's decorators are typed for functions only before they become commands


def configured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--config` and `--set`; it receives both and hands them to `settings`."""
    path = click.option(
        "--config",
        "config_path",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Configuration file. Default: RELAY_CONFIG, or relay.toml in this folder.",
    )
    flags = click.option(
        "--set",
        "flags",
        multiple=True,
        metavar="KEY=VALUE",
        help="One setting, over file and environment: --set source.polling.settle=keep. May be repeated.",
    )
    return path(flags(function))


def as_json(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--json`."""
    return click.option("--json", "json_", is_flag=True, help="Print JSON for programs.")(function)


def settings(config_path: str | None, flags: tuple[str, ...], *, sinks_required: bool = True) -> Loaded:
    """The settings of this command line. Raises InvalidConfig, or UsageError for a `--set` without `=`."""
    from relay.config import read  # noqa: PLC0415  # pydantic costs 100 ms that --help should not pay

    if config_path is None:
        config_path = click.get_current_context().find_root().obj
    path = Path(config_path) if config_path is not None else None
    return read(path, os.environ, dict(map(_flag, flags)), sinks_required=sinks_required)


def _flag(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"--set {text}: write it as KEY=VALUE")
    return name.strip(), value
