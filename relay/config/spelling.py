"""The names of all settings, how each is written in the file and in the environment, and near misses.

Derived from the models alone, so a new setting is known everywhere at once.
"""

from __future__ import annotations

from difflib import get_close_matches
from types import UnionType
from typing import TYPE_CHECKING, Final, get_args

from pydantic import BaseModel

from relay.config.models import Config

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pydantic.fields import FieldInfo

__all__ = ["PREFIX", "did_you_mean", "fields", "file_name", "leaves", "section_of", "setting_near", "variable"]

PREFIX: Final = "RELAY_"
"""Of every environment variable."""

Path = tuple[str | int, ...]


def fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Fields of a section under the names that a file uses."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a section, else None."""
    annotation = field.annotation
    candidates = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return next((item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)), None)


def leaves(
    model: type[BaseModel] = Config, prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every setting with a fixed name: all but sinks and routes."""
    for name, field in fields(model).items():
        if (section := section_of(field)) is not None:
            yield from leaves(section, (*prefix, name))
        elif (*prefix, name) not in {("sinks",), ("routes",)}:
            yield (*prefix, name), field


def variable(path: Iterable[str]) -> str:
    """`RELAY_SOURCE__POLLING__SETTLE` for `source.polling.settle`."""
    return PREFIX + "__".join(part.upper().replace("-", "_") for part in path)


def file_name(path: Path) -> str:
    """`[source.polling] settle` for `source.polling.settle`; `[[routes]] #2 sinks` for the second route."""
    match path:
        case ():
            return "the file"
        case ("routes", int(number), *rest):
            return " ".join(["[[routes]]", f"#{number + 1}", *map(str, rest[:1])])
        case (str(name),):
            field = fields(Config).get(name)
            return f"[{name}]" if field is not None and section_of(field) is not None else name
        case (*section, name):
            return f"[{'.'.join(map(str, section))}] {name}"
    raise AssertionError(path)


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`, did you mean ...?` or nothing."""
    near = get_close_matches(word, list(candidates), n=1)
    return f", did you mean `{near[0]}`?" if near else ""


def setting_near(path: Path, siblings: Iterable[str]) -> str:
    """The near miss of an unknown setting: among its siblings, else the same word in another section."""
    word = str(path[-1])
    if near := did_you_mean(word, siblings):
        return near
    elsewhere = [leaf for leaf, _ in leaves() if leaf[-1] == word] or [
        leaf for leaf, _ in leaves() if leaf[-1] in get_close_matches(word, [word_ for (*_, word_), _ in leaves()], n=1)
    ]
    return f", did you mean `{file_name(elsewhere[0])}`?" if elsewhere else ""
