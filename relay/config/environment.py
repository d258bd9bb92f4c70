"""Settings from environment variables and flags, put over what the file says.

`RELAY_` + path with `__`: `RELAY_DATABASE__DSN`, `RELAY_SINKS__MAIN__URL`. With `_FILE` behind it the
variable names a file that holds the value, as container secrets do; of a sink's options only those that
look like one (`..._url`, `..._password`, ...), because `ssl_ca_file` is an option of its own.
An empty variable counts as not set: that is what templates make of a missing value.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from relay.config.models import Config
from relay.config.spelling import PREFIX, did_you_mean, fields, leaves, section_of, variable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Override", "from_environment", "from_flags", "put"]

_NOT_SETTINGS: Final = re.compile(r"RELAY_CONFIG|RELAY_TEST_\w+")  # the file's place; switches of the test suite

# Kubernetes puts the addresses of every Service into every pod, so one that is called `relay` or `relay-metrics`
# sets RELAY_PORT, RELAY_SERVICE_HOST, RELAY_METRICS_PORT_9464_TCP_ADDR, ...
_SERVICE_LINK: Final = re.compile(
    r"RELAY_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SECRET_OPTION: Final = re.compile(r"(^|_)(url|uri|dsn|username|password|passphrase|secret|token)$")


@dataclass(frozen=True, slots=True)
class Override:
    """One setting from outside the file. `problem` instead of a value: it cannot be used, and why."""

    path: tuple[str, ...]
    value: Any
    origin: str
    problem: str | None = None


def from_environment(environ: Mapping[str, str], tree: Mapping[str, Any]) -> Iterator[Override]:
    """The overrides of all `RELAY_` variables; `tree` is the file, whose sinks they may name."""
    for name, text in sorted(environ.items()):
        if not name.startswith(PREFIX) or _NOT_SETTINGS.fullmatch(name) or _SERVICE_LINK.fullmatch(name) or text == "":
            continue
        parts = tuple(name.removeprefix(PREFIX).lower().split("__"))
        if _secret(parts) is not None and environ.get(name.removesuffix("_FILE")):
            yield _unusable(name, f"{name} and {name.removesuffix('_FILE')} are both set; keep one")
        else:
            yield _resolve(parts, text, name, tree) or _unusable(name, _unknown(name, parts))


def from_flags(flags: Mapping[str, str], tree: Mapping[str, Any]) -> Iterator[Override]:
    """The overrides of flags: dotted path to text."""
    for name, text in flags.items():
        override = _resolve(tuple(name.split(".")), text, f"flag {name}", tree)
        near = did_you_mean(name, (".".join(path) for path, _ in leaves()))
        yield override or _unusable(name, f"flag {name}: there is no such setting{near}")


def put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set one value in nested dictionaries. A value that stands where a section should is left to validation."""
    *sections, name = path
    at: Any = tree
    for section in sections:
        at = at.setdefault(section, {})
        if not isinstance(at, dict):
            return
    at[name] = value


def _resolve(parts: tuple[str, ...], text: str, origin: str, tree: Mapping[str, Any]) -> Override | None:
    if (secret := _secret(parts)) is not None:
        return _from_file(_spelled(secret, tree), text, origin)
    if _is_sink_option(parts):
        return Override(_spelled(parts, tree), _structured(text), origin)
    return Override(parts, text, origin) if _is_setting(parts) else None


def _secret(parts: tuple[str, ...]) -> tuple[str, ...] | None:
    """The setting whose value is in a file that `parts` names, or None: `parts` is a setting itself, or nothing."""
    *sections, name = parts
    secret = (*sections, name.removesuffix("_file"))
    if secret == parts or _is_setting(parts):
        return None
    if _is_sink_option(secret):
        return secret if _SECRET_OPTION.search(secret[-1]) else None
    return secret if _is_setting(secret) else None


def _is_setting(path: tuple[str, ...]) -> bool:
    model: Any = Config
    for part in path[:-1]:
        field = fields(model).get(part)
        if field is None or (model := section_of(field)) is None:
            return False
    field = fields(model).get(path[-1])
    return field is not None and section_of(field) is None and path[0] not in {"sinks", "routes"}


def _is_sink_option(path: tuple[str, ...]) -> bool:
    return path[0] == "sinks" and len(path) > len(("sinks", "name")) and all(path)


def _spelled(path: tuple[str, ...], tree: Mapping[str, Any]) -> tuple[str, ...]:
    """`path` with the file's own spelling of a sink: a variable has neither small letters nor hyphens."""
    sinks = tree.get("sinks")
    if path[0] != "sinks" or not isinstance(sinks, dict):
        return path
    plain = path[1].replace("-", "_")
    name = next((name for name in sinks if name.lower().replace("-", "_") == plain), path[1])
    return ("sinks", name, *path[2:])


def _structured(text: str) -> Any:
    """A list or table given as JSON; anything else, and what only looks like JSON, is text."""
    if text[:1] not in {"[", "{"}:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _from_file(path: tuple[str, ...], name: str, origin: str) -> Override:
    try:
        # Editors and `echo` end a file with a line break that is no part of the secret.
        value = Path(name).read_text("utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        return _unusable(origin, f"{origin}: cannot read the secret file {name}: {why}")
    return Override(path, value, f"{origin} ({name})")


def _unusable(origin: str, problem: str) -> Override:
    return Override((), None, origin, problem)


def _unknown(name: str, parts: tuple[str, ...]) -> str:
    if parts[0] == "routes":
        return f"{name}: routes are given in the file, not in the environment"
    if parts[0] == "sinks":
        return f"{name}: a sink's variable is RELAY_SINKS__<NAME>__<OPTION>, for example RELAY_SINKS__MAIN__URL"
    near = did_you_mean(name, (variable(path) for path, _ in leaves()))
    return f"unknown environment variable {name}{near}"
