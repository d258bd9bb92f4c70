"""All settings as an operator may see them: name, value without secrets, and where it came from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic import SecretStr

from relay.config.spelling import leaves
from relay.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Iterator

    from relay.config.loading import Loaded

__all__ = ["Setting", "settings"]

_SECRET: Final = re.compile(r"password|passwd|passphrase|secret|token|credential", re.IGNORECASE)


@dataclass(frozen=True)
class Setting:
    """One setting in force. `value` is made of JSON types; a secret is `***` or an address without its password."""

    name: str
    value: Any
    origin: str


def settings(loaded: Loaded) -> Iterator[Setting]:
    """Every setting in the order of the documentation, then the sinks' and the routes."""
    for path, _field in leaves():
        value: Any = loaded.config
        for part in path:
            value = getattr(value, "schema_" if part == "schema" else part)
        yield Setting(".".join(path), _visible(path[-1], value), loaded.origins.get(path, "default"))
    for name, sink in loaded.config.sinks.items():
        for option, value in {"type": sink.type, **sink.options}.items():
            yield Setting(f"sinks.{name}.{option}", _visible(option, value), _origin(loaded, ("sinks", name, option)))
    for number, route in enumerate(loaded.config.routes):
        yield Setting(f"routes.{number + 1}", route.model_dump(mode="json"), loaded.origins.get(("routes",), "default"))


def _origin(loaded: Loaded, path: tuple[str, ...]) -> str:
    """The origin of an option, or of what is inside it when it is a table."""
    return next((origin for known, origin in loaded.origins.items() if known[: len(path)] == path), "default")


def _visible(name: str, value: Any) -> Any:
    match value:
        case dict():
            return {key: _visible(str(key), item) for key, item in value.items()}
        case list() | tuple():
            return [_visible(name, item) for item in value]
        case SecretStr() | str():
            return _text(name, value)
        case _:
            return value


def _text(name: str, value: SecretStr | str) -> str:
    """An address without its password; everything else that is a secret is hidden whole."""
    plain = value.get_secret_value() if isinstance(value, SecretStr) else value
    secret = isinstance(value, SecretStr) or _SECRET.search(name)
    return "***" if secret and "://" not in plain else redact(plain)
