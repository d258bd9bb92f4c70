"""From a `[sinks.<name>]` section to a sink: finds its type, checks its options, and says what is wrong.

A type's module is imported when a sink of that type is made, never before: a relay that feeds Redis
does not pay for Kafka's client. Types from other packages are entry points of the group `relay.sinks`,
each naming a class like ours: `Options` (a frozen pydantic model that forbids unknown keys) and
`__init__(name, options)`; docs/sinks/contract.md is the guide.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, cast

from pydantic import BaseModel, ValidationError

from relay.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from relay.config import SinkSection
    from relay.sink import Sink

__all__ = ["GROUP", "SinkClass", "create", "options_models", "sink_class", "types"]

GROUP: Final = "relay.sinks"
"""The entry point group of sinks from other packages."""

_BUILT_IN: Final = {
    "kafka": ("relay.sinks.kafka", "KafkaSink"),
    "rabbitmq": ("relay.sinks.rabbitmq", "RabbitMQSink"),
    "redis": ("relay.sinks.redis", "RedisSink"),
    "memory": ("relay.sinks.memory", "MemorySink"),
    "null": ("relay.sinks.null", "NullSink"),
}


class SinkClass(Protocol):
    """What a type of sink is: options, and a constructor that does no I/O."""

    Options: ClassVar[type[BaseModel]]

    def __call__(self, name: str, options: Any) -> Sink:
        """A sink for the section `[sinks.<name>]`, not opened yet."""


def create(name: str, section: SinkSection) -> Sink:
    """The sink of `[sinks.<name>]`, with its options validated, not opened yet.

    Raises InvalidConfig for an unknown type, an unknown, missing or wrong option; it names
    `sinks.<name>.<key>` and a near miss, and never shows a value, which may be a secret.
    """
    kind = sink_class(section.type, where=f"sinks.{name}.type")
    return kind(name, _options(name, section, kind.Options))


def types() -> tuple[str, ...]:
    """Names of all types that `type = "..."` may have, ours first. Imports none of them."""
    return (*_BUILT_IN, *sorted(set(_third_party()) - set(_BUILT_IN)))


def options_models() -> dict[str, type[BaseModel]]:
    """The options of each type, for the schema and the documentation. Imports all of them."""
    return {kind: sink_class(kind).Options for kind in types()}


def sink_class(kind: str, *, where: str = "type") -> SinkClass:
    """The class of a type; `where` names the setting in the error. Raises InvalidConfig."""
    if kind in _BUILT_IN:
        module, name = _BUILT_IN[kind]
        return cast("SinkClass", getattr(import_module(module), name))
    if (entry_point := _third_party().get(kind)) is not None:
        return _load(entry_point, where)
    raise InvalidConfig(
        f"{where}: there is no sink of type {kind!r}{_did_you_mean(kind, types())}",
        hint=f"Types that are installed: {', '.join(types())}.",
    )


def _third_party() -> dict[str, EntryPoint]:
    return {entry_point.name: entry_point for entry_point in entry_points(group=GROUP)}


def _load(entry_point: EntryPoint, where: str) -> SinkClass:
    package = entry_point.dist.name if entry_point.dist is not None else entry_point.module
    try:
        loaded = entry_point.load()
    except Exception as error:  # somebody else's module: whatever it raises, the operator needs its name
        raise InvalidConfig(
            f"{where}: the sink {entry_point.name!r} of the package {package} cannot be imported: {error}",
            hint=f"Reinstall {package}, or report this to its authors.",
        ) from error
    options = getattr(loaded, "Options", None)
    if not (isinstance(options, type) and issubclass(options, BaseModel)):
        raise InvalidConfig(
            f"{where}: the sink {entry_point.name!r} of the package {package} has no `Options` model",
            hint=f"Report this to the authors of {package}; the contract is in docs/sinks/contract.md.",
        )
    return cast("SinkClass", loaded)


def _options(name: str, section: SinkSection, model: type[BaseModel]) -> BaseModel:
    try:
        return model.model_validate(section.options)
    except ValidationError as error:
        # `include_input` is off and the chain is cut: pydantic would print the value, which may be a password.
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        lines = [
            _problem(f"sinks.{name}", problem["loc"], problem["type"], problem["msg"], model) for problem in problems
        ]
        raise InvalidConfig("\n".join(lines), hint=_hint(section.type, model)) from None


def _problem(where: str, loc: tuple[int | str, ...], kind: str, message: str, model: type[BaseModel]) -> str:
    path = ".".join((where, *map(str, loc)))
    match kind:
        case "extra_forbidden":
            near = _did_you_mean(str(loc[-1]), _keys(model)) if len(loc) == 1 else ""
            return f"{path}: unknown option{near}"
        case "missing":
            return f"{path}: required, but not set"
        case _:
            return f"{path}: {message.removeprefix('Value error, ')}"


def _hint(kind: str, model: type[BaseModel]) -> str:
    return f"Options of a {kind} sink: {', '.join(_keys(model))}."


def _keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _did_you_mean(word: str, candidates: Iterable[str]) -> str:
    near = get_close_matches(word, list(candidates), n=1)
    return f", did you mean {near[0]!r}?" if near else ""
