"""From a section of the settings to a sink, and what an operator reads when that fails."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel, SecretStr

from relay.config import SinkSection
from relay.errors import InvalidConfig
from relay.sinks import registry
from relay.sinks.memory import MemorySink
from relay.sinks.null import NullSink
from relay.sinks.redis import RedisSink

if TYPE_CHECKING:
    from collections.abc import Callable


class ThirdPartyOptions(BaseModel):
    """Options of a sink that is not ours."""

    token: SecretStr


class ThirdPartySink(NullSink):
    """A sink that is not ours."""

    Options = ThirdPartyOptions

    def __init__(self, name: str, options: Any) -> None:
        self.name = name
        self.token = options.token


class NoOptionsSink:
    """What somebody forgot."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that packages with these entry points are installed."""

    def install(**targets: str) -> None:
        points = [EntryPoint(name, target, registry.GROUP) for name, target in targets.items()]
        monkeypatch.setattr(registry, "entry_points", lambda *, group: points if group == registry.GROUP else [])

    return install


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        (SinkSection.model_validate({"type": "null"}), NullSink),
        (SinkSection.model_validate({"type": "memory", "concurrency": "3"}), MemorySink),
        (SinkSection.model_validate({"type": "redis", "url": "redis://h"}), RedisSink),
    ],
)
def test_a_built_in_type_makes_its_sink(section: SinkSection, kind: type) -> None:
    """Numbers may be text: they come from environment variables as well."""
    sink = registry.create("events", section)
    assert type(sink) is kind


def test_an_unknown_type_names_the_setting_and_the_near_miss() -> None:
    """With the list of what there is."""
    with pytest.raises(InvalidConfig, match=r"^sinks\.events\.type: .* 'reddis', did you mean 'redis'\?$") as caught:
        registry.create("events", SinkSection(type="reddis"))
    assert "kafka, rabbitmq, redis, memory, null" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"url": "redis://h", "max_len": 5}, "sinks.events.max_len: unknown option, did you mean 'maxlen'?"),
        ({"url": "redis://h", "colour": 5}, "sinks.events.colour: unknown option"),
        ({}, "sinks.events.url: required, but not set"),
        ({"url": "http://h"}, "sinks.events.url: must begin with redis://, rediss:// or unix://"),
        ({"url": "redis://h", "concurrency": "many"}, "sinks.events.concurrency: Input should be a valid integer"),
        (
            {"url": "redis://h", "concurrency": 0},
            "sinks.events.concurrency: Input should be greater than or equal to 1",
        ),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], problem: str) -> None:
    """One line for each problem, and the list of options as the hint."""
    with pytest.raises(InvalidConfig) as caught:
        registry.create("events", SinkSection.model_validate({"type": "redis", **options}))
    assert str(caught.value).startswith(problem)
    assert "url, username, password" in caught.value.hint


def test_every_problem_is_told_at_once() -> None:
    """Nobody fixes a file one start at a time."""
    with pytest.raises(InvalidConfig) as caught:
        registry.create("events", SinkSection.model_validate({"type": "redis", "url": "x", "maxlen": 0, "urk": 1}))
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("url", ["http://u:p-secret@h", "redis://u:p-secret@h:port", "redis://u:p-secret@h/p-secret"])
def test_a_bad_url_is_reported_without_its_password(url: str) -> None:
    """Neither in the message nor in what a traceback shows (FIELD.md F9)."""
    with pytest.raises(InvalidConfig) as caught:
        registry.create("events", SinkSection.model_validate({"type": "redis", "url": url}))
    assert caught.value.__suppress_context__
    assert "p-secret" not in f"{caught.value} {caught.value.hint} {caught.value.__cause__}"


def test_a_type_from_another_package_is_made_like_ours(installed: Callable[..., None]) -> None:
    """Entry points of the group `relay.sinks`."""
    installed(pigeon=f"{__name__}:ThirdPartySink")
    sink = registry.create("events", SinkSection.model_validate({"type": "pigeon", "token": "t"}))
    assert isinstance(sink, ThirdPartySink)
    assert sink.token.get_secret_value() == "t"
    assert registry.types()[-1] == "pigeon"


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("relay_sink_that_is_missing:Sink", "cannot be imported"),
        (f"{__name__}:Missing", "cannot be imported"),
        (f"{__name__}:NoOptionsSink", "has no `Options` model"),
    ],
)
def test_a_broken_package_is_named(installed: Callable[..., None], target: str, problem: str) -> None:
    """The operator learns which package, not only which line of ours."""
    installed(pigeon=target)
    with pytest.raises(InvalidConfig, match=problem) as caught:
        registry.create("events", SinkSection(type="pigeon"))
    assert "'pigeon'" in str(caught.value)


def test_another_package_cannot_replace_a_type_of_ours(installed: Callable[..., None]) -> None:
    """`type = "redis"` is ours, whatever is installed."""
    installed(null=f"{__name__}:ThirdPartySink")
    assert type(registry.create("events", SinkSection(type="null"))) is NullSink
    assert registry.types().count("null") == 1


def test_every_built_in_type_has_a_frozen_options_model_that_forbids_unknown_keys() -> None:
    """And each option says what it is for: the configuration reference is made of it."""
    models = registry.options_models()
    assert tuple(models) == ("kafka", "rabbitmq", "redis", "memory", "null")
    for model in models.values():
        assert model.model_config.get("frozen")
        assert model.model_config.get("extra") == "forbid"
        assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_a_sinks_module_is_imported_only_when_it_is_used() -> None:
    """A relay with one broker does not pay for the clients of the others."""
    script = (
        "import sys; from relay.config import SinkSection; from relay.sinks import registry; registry.types();"
        "registry.create('n', SinkSection(type='null'));"
        "print([m for m in ('relay.sinks.redis', 'relay.sinks.kafka', 'relay.sinks.rabbitmq') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
