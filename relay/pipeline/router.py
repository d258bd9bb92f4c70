"""Topic to sinks: the first route whose glob matches wins.

A topic is matched once and remembered; the memory is bounded, because topics come from applications.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import translate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.config import Route

__all__ = ["Router", "Target"]

_REMEMBERED_MAX: Final = 10_000
_FIELD: Final = re.compile(r"\{(topic|key)\}")


@dataclass(frozen=True, slots=True)
class Target:
    """One sink that an event goes to. `template` None: the destination is the topic."""

    sink: str
    template: str | None
    holds: bool

    def destination(self, topic: str, key: str | None) -> str:
        """The Kafka topic, routing key or stream of an event."""
        if self.template is None:
            return topic
        if "{" not in self.template:
            return self.template
        values = {"topic": topic, "key": key or ""}
        return _FIELD.sub(lambda field: values[field[1]], self.template)


class Router:
    """Finds the targets of a topic; an empty tuple means that no route takes it."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = [(re.compile(translate(route.topic)), _targets(route)) for route in routes]
        self._remembered: dict[str, tuple[Target, ...]] = {}
        first = routes[0] if routes else None
        self.only = self._routes[0][1][0] if first and first.topic == "*" and len(first.sinks) == 1 else None
        """The one target of every topic, where there is one: the ordinary case."""

    def targets(self, topic: str) -> tuple[Target, ...]:
        """Targets of a topic, in the route's order."""
        found = self._remembered.get(topic)
        return found if found is not None else self._match(topic)

    def _match(self, topic: str) -> tuple[Target, ...]:
        found = next((targets for pattern, targets in self._routes if pattern.match(topic)), ())
        if len(self._remembered) >= _REMEMBERED_MAX:
            self._remembered.clear()
        self._remembered[topic] = found
        return found


def _targets(route: Route) -> tuple[Target, ...]:
    template = None if route.destination == "{topic}" else route.destination
    holds = route.on_dead_letter == "hold"
    return tuple(Target(sink, template, holds) for sink in route.sinks)
