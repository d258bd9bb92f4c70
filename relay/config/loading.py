"""From a file, the environment and flags to one valid, frozen `Config`, or to a list of what is wrong.

Flags win over the environment, the environment over the file. Every failure is `InvalidConfig`; no text
of it holds a secret. The merge is our own and not pydantic-settings': docs/adr/0004-config-and-cli.md.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from relay.config import checks, problems
from relay.config.environment import Override, from_environment, from_flags, put
from relay.config.models import Config
from relay.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["DEFAULT_PATH", "Loaded", "load", "read"]

DEFAULT_PATH: Final = Path("relay.toml")
_HINT: Final = "All settings are in docs/configuration.md; `relay config schema` prints them for an editor."


@dataclass(frozen=True)
class Loaded:
    """The settings, where each that is not a default came from, and what is legal but surely not meant."""

    config: Config
    origins: Mapping[tuple[str, ...], str]
    warnings: tuple[str, ...]
    file: Path | None


def load(path: Path | None, environ: Mapping[str, str], flags: Mapping[str, str] | None = None) -> Config:
    """The settings alone; see `read`."""
    return read(path, environ, flags).config


def read(
    path: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, str] | None = None,
    *,
    sinks_required: bool = True,
) -> Loaded:
    """Read and validate everything.

    `path` None means `RELAY_CONFIG`, or else `relay.toml` in the current folder if it is there. `flags` are
    dotted paths with their text (`{"source.polling.settle": "keep"}`). Raises InvalidConfig; its message has
    one line for each problem. `sinks_required` False is for commands that only need the database.
    """
    file = _file(path, environ)
    tree = _parse(file) if file is not None else {}
    origins = dict.fromkeys(_paths(tree), file.name) if file is not None else {}
    overrides = [*from_environment(environ, tree), *from_flags(flags or {}, tree)]
    found = [override.problem for override in overrides if override.problem is not None]
    outside = _apply(overrides, tree)
    name = str(file or DEFAULT_PATH)
    config = _validate(tree, outside, name, found, sinks_required=sinks_required)
    return Loaded(config, {**origins, **outside}, tuple(checks.warnings(config)), file)


def _file(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    if path is not None:
        return path
    if named := environ.get("RELAY_CONFIG"):
        return Path(named)
    return DEFAULT_PATH if DEFAULT_PATH.exists() else None


def _parse(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InvalidConfig(
            f"cannot read {file}: {error.strerror}", hint="Name the file with --config or RELAY_CONFIG."
        ) from None
    except UnicodeDecodeError:
        raise InvalidConfig(f"{file} is not UTF-8", hint="Save it as UTF-8; TOML knows no other encoding.") from None
    except tomllib.TOMLDecodeError as error:
        # From None: the exception holds the document, passwords included (3.14).
        raise InvalidConfig(
            f"{file} is not valid TOML: {error.args[0]}",
            hint='Text is quoted (mode = "polling"), sections are [in.brackets].',
        ) from None


def _paths(tree: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterable[tuple[str, ...]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _paths(value, (*prefix, name))
        else:
            yield (*prefix, name)


def _apply(overrides: Iterable[Override], tree: dict[str, Any]) -> dict[tuple[str, ...], str]:
    usable = [override for override in overrides if override.problem is None]
    for override in usable:
        put(tree, override.path, override.value)
    return {override.path: override.origin for override in usable}


def _validate(
    tree: dict[str, Any], outside: Mapping[tuple[str, ...], str], file: str, found: list[str], *, sinks_required: bool
) -> Config:
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        missing = [checks.NO_SINK] if sinks_required and not tree.get("sinks") else []
        # From None: pydantic's own text shows the values, passwords included.
        raise _invalid([*found, *problems.lines(error, outside, file), *missing]) from None
    found = [*found, *(line for line in checks.problems(config) if sinks_required or line != checks.NO_SINK)]
    if found:
        raise _invalid(found)
    return config


def _invalid(found: list[str]) -> InvalidConfig:
    if len(found) == 1:
        return InvalidConfig(found[0], hint=_HINT)
    return InvalidConfig("\n".join([f"{len(found)} settings are wrong:", *(f"- {line}" for line in found)]), hint=_HINT)
