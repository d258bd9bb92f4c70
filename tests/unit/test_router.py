"""First route whose glob matches, and what an event is called at the sink."""

from __future__ import annotations

import pytest

from relay.config import Route
from relay.pipeline.router import _REMEMBERED_MAX, Router


def route(topic: str, *sinks: str, **options: str) -> Route:
    return Route.model_validate({"topic": topic, "sinks": list(sinks), **options})


def sinks_of(router: Router, topic: str) -> list[str]:
    return [target.sink for target in router.targets(topic)]


def test_the_first_match_wins() -> None:
    router = Router([route("orders.vip", "a"), route("orders.*", "b", "c"), route("*", "d")])
    assert sinks_of(router, "orders.vip") == ["a"]
    assert sinks_of(router, "orders.new") == ["b", "c"]
    assert sinks_of(router, "users") == ["d"]


@pytest.mark.parametrize(
    ("glob", "topic", "matches"),
    [
        ("orders", "orders", True),
        ("orders", "orders.new", False),
        ("orders", "my-orders", False),
        ("order?", "orders", True),
        ("[ou]rders", "urders", True),
        ("orders.*", "Orders.new", False),
        ("a.b", "a-b", False),
        ("*", "line\nbreak", True),
        ("*", "", True),
    ],
)
def test_globs(glob: str, topic: str, matches: bool) -> None:
    """The whole topic, case-sensitive on every system; a dot is a dot."""
    assert bool(sinks_of(Router([route(glob, "a")]), topic)) is matches


def test_a_topic_without_a_route_has_no_targets() -> None:
    """It is told apart from one that has not been looked up yet, also the second time."""
    router = Router([route("orders", "a")])
    assert router.targets("users") == ()
    assert router.targets("users") == ()


@pytest.mark.parametrize(
    ("template", "key", "destination"),
    [
        ("{topic}", "k", "orders"),
        ("events.{topic}", "k", "events.orders"),
        ("{topic}.{key}", "k", "orders.k"),
        ("{topic}.{key}", None, "orders."),
        ("{key}", "{topic}", "{topic}"),
        ("{other}-{topic}", "k", "{other}-orders"),
    ],
)
def test_destinations(template: str, key: str | None, destination: str) -> None:
    """Fields are filled in once: a key that looks like a field stays what it is."""
    (target,) = Router([route("*", "a", destination=template)]).targets("orders")
    assert target.destination("orders", key) == destination


def test_holding_is_the_routes_choice() -> None:
    router = Router([route("a", "s", on_dead_letter="hold"), route("b", "s")])
    assert router.targets("a")[0].holds
    assert not router.targets("b")[0].holds


def test_topics_of_applications_do_not_fill_the_memory() -> None:
    router = Router([route("*", "a")])
    for number in range(_REMEMBERED_MAX + 10):
        router.targets(f"{number}")
    assert len(router._remembered) <= _REMEMBERED_MAX
    assert sinks_of(router, "0") == ["a"]
