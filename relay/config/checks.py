"""What the sections must be together: sinks and routes that fit, and what is legal but surely not meant.

Pure functions over a valid `Config`. A problem stops the start; a warning is logged and shown by
`relay check`.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from relay.config.spelling import did_you_mean, file_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from relay.config.models import Config, Route

__all__ = ["NO_SINK", "problems", "warnings"]

NO_SINK: Final = (
    'no sink is configured: add a section like [sinks.main] with type = "redis" and '
    'url = "redis://localhost:6379/0", or set RELAY_SINKS__MAIN__TYPE and RELAY_SINKS__MAIN__URL'
)

_SINK_NAME: Final = re.compile(r"[A-Za-z0-9]+([_-][A-Za-z0-9]+)*")
_SINK_NAME_MAX: Final = 63
_RESERVED: Final = frozenset({"none", "other"})
_PLACEHOLDER: Final = re.compile(r"\{([^{}]*)\}")
_WILDCARD: Final = re.compile(r"[*?\[]")


def problems(config: Config) -> Iterator[str]:
    """One line for each contradiction, naming the setting and the rule."""
    yield from _sink_problems(config)
    for number, route in enumerate(config.routes):
        yield from _route_problems(config, number, route)
    polling = config.source.polling
    if polling.poll_interval_seconds > polling.poll_interval_max_seconds:
        yield "[source.polling] poll_interval_seconds: must not be above poll_interval_max_seconds"


def warnings(config: Config) -> Iterator[str]:
    """One line for each thing that works and is surely not meant."""
    used = {sink for route in config.routes for sink in route.sinks}
    for name, sink in config.sinks.items():
        if config.routes and name not in used:
            yield f"[sinks.{name}] is used by no route: nothing is sent to it"
        elif sink.type in {"null", "memory"}:
            yield f'[sinks.{name}] type = "{sink.type}" throws events away: settled, and delivered to nobody'
    for number, route in enumerate(config.routes):
        earlier = next((n for n, other in enumerate(config.routes[:number]) if _covers(other.topic, route.topic)), None)
        if earlier is not None:
            yield (
                f"[[routes]] #{number + 1} (topic = {route.topic!r}) is never reached: "
                f"#{earlier + 1} (topic = {config.routes[earlier].topic!r}) matches first"
            )


def _sink_problems(config: Config) -> Iterator[str]:
    if not config.sinks:
        yield NO_SINK
    elif len(config.sinks) > 1 and not config.routes:
        names = ", ".join(config.sinks)
        yield f"there are {len(config.sinks)} sinks ({names}) and no [[routes]]: say which topics go to which sink"
    spelled: dict[str, str] = {}
    for name in config.sinks:
        if not _SINK_NAME.fullmatch(name) or len(name) > _SINK_NAME_MAX or name in _RESERVED:
            yield (
                f"[sinks.{name}]: a sink's name is made of letters, digits and single `-` or `_` between them, "
                f"{_SINK_NAME_MAX} at most, and is not `none` or `other`"
            )
        other = spelled.setdefault(name.lower().replace("-", "_"), name)
        if other != name:
            yield f"[sinks.{name}] and [sinks.{other}] have the same environment variables: rename one"


def _route_problems(config: Config, number: int, route: Route) -> Iterator[str]:
    where = file_name(("routes", number))
    for sink in route.sinks:
        if sink not in config.sinks:
            yield f"{where} sinks: there is no [sinks.{sink}]{did_you_mean(sink, config.sinks)}"
    if len(set(route.sinks)) < len(route.sinks):
        yield f"{where} sinks: names a sink twice"
    if (problem := _template_problem(route.destination)) is not None:
        yield f"{where} destination: {problem}"


def _template_problem(template: str) -> str | None:
    unknown = [name for name in _PLACEHOLDER.findall(template) if name not in {"topic", "key"}]
    return f"{{{unknown[0]}}} is unknown; `{{topic}}` and `{{key}}` are known" if unknown else None


def _covers(earlier: str, later: str) -> bool:
    """Whether the earlier glob surely takes all that the later one would. False when it is not plain to see."""
    return earlier in {"*", later} or (not _WILDCARD.search(later) and fnmatchcase(later, earlier))
