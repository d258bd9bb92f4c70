"""Validation errors as lines for an operator: the setting as it was written, and the rule it breaks.

Values are shown only where they can hold no secret.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relay.config.models import Config, Route
from relay.config.spelling import fields, file_name, section_of, setting_near

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

__all__ = ["lines"]

_VALUE_CHARACTERS_MAX = 40
_MISSING_DSN = (
    "the DSN is missing: set RELAY_DATABASE__DSN (or RELAY_DATABASE__DSN_FILE), or write "
    '[database] dsn = "postgresql://relay@localhost:5432/shop" in {file}'
)


def lines(error: ValidationError, origins: Mapping[tuple[str, ...], str], file: str) -> list[str]:
    """One line for each error. `origins` says which settings came from a variable or flag, to name that instead."""
    return [_line(detail, origins, file) for detail in error.errors(include_url=False)]


def _line(detail: ErrorDetails, origins: Mapping[tuple[str, ...], str], file: str) -> str:
    path = detail["loc"]
    if detail["type"] == "missing" and path in {("database",), ("database", "dsn")}:
        return _MISSING_DSN.format(file=file)
    where = file_name(path)
    if detail["type"] == "extra_forbidden":
        return f"unknown key `{where}`{setting_near(path, _siblings(path))}"
    if (origin := origins.get(tuple(map(str, path)))) is not None:
        where = origin
    return f"{where}: {_rule(detail)}{_shown(detail)}"


def _rule(detail: ErrorDetails) -> str:
    match detail["type"]:
        case "missing":
            return "is missing"
        case "model_type" | "dict_type":
            return "must be a section, a table in square brackets"
        case "tuple_type" | "list_type":
            return 'must be a list, like ["main"]'
        case "value_error":
            return detail["msg"].removeprefix("Value error, ")
    text = detail["msg"].replace("Input should be", "must be")
    return text[:1].lower() + text[1:]


def _shown(detail: ErrorDetails) -> str:
    """`, not 'x'`, for plain settings of the relay itself; sinks' options and DSNs may be secrets."""
    value, path = detail["input"], detail["loc"]
    if detail["type"] in {"missing", "value_error"} or path[0] == "sinks" or "dsn" in str(path[-1]):
        return ""
    if not isinstance(value, str | int | float) or "://" in str(value) or len(str(value)) > _VALUE_CHARACTERS_MAX:
        return ""
    return f", not {value!r}"


def _siblings(path: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] | None = Config
    for part in path[:-1]:
        if isinstance(part, int):
            continue
        model = _section(model, part)
        if model is None:
            return []
    return list(fields(model)) if model is not None else []


def _section(model: Any, part: str) -> type[BaseModel] | None:
    if model is Config and part == "routes":
        return Route
    field = fields(model).get(part)
    return section_of(field) if field is not None else None
