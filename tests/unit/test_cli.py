"""The command line by itself: quick help, small imports, exit codes, and errors that an operator can read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relay import __version__
from relay.cli import app
from relay.cli.output import age, safe
from relay.cli.session import address
from relay.errors import InvalidConfig, SinkUnavailable, SlotLost

COMMANDS = ("migrate", "run", "check", "status", "dead-letters", "config", "demo")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RELAY_DATABASE__DSN", "RELAY_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def main(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(app._relay, "main", main)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], *([name, "--help"] for name in COMMANDS)])
def test_every_command_has_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(arguments) == 0
    assert "Usage: relay" in capsys.readouterr().out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--version"]) == 0
    assert capsys.readouterr().out == f"outbox-relay {__version__}\n"


def test_an_unknown_command_has_a_near_miss(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["statos"]) == 2
    assert "there is no command 'statos', did you mean 'status'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (InvalidConfig("wrong", hint="do this"), 2, "error: wrong\nhint: do this\n"),
        (SlotLost("gone", hint="do that"), 3, "error: gone\nhint: do that\n"),
        (SinkUnavailable("redis://u:geheim@h is down"), 1, "error: redis://u:***@h is down\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_exit_codes_and_two_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, text: str
) -> None:
    raising(monkeypatch, error)
    assert app.run([]) == code
    assert capsys.readouterr().err == text


def test_a_bug_keeps_its_traceback_and_loses_its_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, TypeError("amqp://guest:geheim@host"))
    assert app.run([]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "amqp://guest:***@host" in err
    assert "geheim" not in err


def test_a_mistake_in_the_settings_is_exit_code_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["status"]) == 2
    assert capsys.readouterr().err.startswith("error: the DSN is missing: set RELAY_DATABASE__DSN")


def test_the_file_may_be_named_before_or_after_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.toml").write_text('[database]\ndsn = "postgresql://a/a"\n', "utf-8")
    (folder / "b.toml").write_text('[database]\ndsn = "postgresql://b/b"\n', "utf-8")
    assert app.run(["--config", "a.toml", "config", "show"]) == 0
    assert "postgresql://a/a" in capsys.readouterr().out
    assert app.run(["--config", "a.toml", "config", "show", "--config", "b.toml"]) == 0
    assert "postgresql://b/b" in capsys.readouterr().out


def test_config_show_tells_value_and_origin(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "relay.toml").write_text('[database]\ndsn = "postgresql://u:geheim@h/d"\n', "utf-8")
    assert app.run(["config", "show", "--set", "source.polling.settle=keep"]) == 0
    lines = {line.split(" ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["source.polling.settle"].endswith('= "keep"  # flag source.polling.settle')
    assert lines["database.dsn"].endswith('= "postgresql://u:***@h/d"  # relay.toml')
    assert app.run(["config", "show", "--set", "nonsense"]) == 2


def test_config_schema_knows_every_sink(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["config", "schema"]) == 0
    out = capsys.readouterr().out
    for text in ('"sink_kafka"', '"sink_rabbitmq"', '"sink_redis"', '"bootstrap_servers"', '"settle"'):
        assert text in out


def test_the_reference_is_up_to_date() -> None:
    from relay.cli import reference  # noqa: PLC0415  # imports all brokers' clients

    document = Path(__file__).parents[2] / reference.DOCUMENT
    assert document.read_text("utf-8") == reference.markdown(), "run `python -m relay.cli.reference`"


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (["--help"], ["pydantic", "asyncpg", "asyncio", "structlog", "rich"]),
        (["migrate", "--help"], ["pydantic", "asyncpg", "structlog", "rich"]),
        (["run", "--help"], ["pydantic", "asyncpg", "rich"]),
    ],
)
def test_help_imports_next_to_nothing(arguments: list[str], unwanted: list[str]) -> None:
    """What keeps `relay --help` below 0.3 s, said in a way that does not depend on the machine."""
    code = f"import sys; from relay.cli.app import run; run({arguments!r}); print([m for m in {unwanted!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("dsn", "text"),
    [
        ("postgresql://u:p@db:6432/shop", "db:6432/shop"),
        ("postgresql://db/shop", "db:5432/shop"),
        ("postgresql://u:p%40@a,b:1/shop?sslmode=require", "a:5432,b:1/shop"),
        ("postgresql://[::1]/shop", "[::1]:5432/shop"),
        ("postgresql:///shop?host=/run/postgresql", "/run/postgresql/shop"),
        ("postgresql:///shop", "localhost:5432/shop"),
    ],
)
def test_an_address_is_host_port_and_database(dsn: str, text: str) -> None:
    assert address(dsn) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (42, "42 s"),
        (60, "1 min"),
        (200, "3 min 20 s"),
        (18_120, "5 h 2 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_ages_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_control_characters_are_spelled_out() -> None:
    assert safe("a\x1b[31m\x00\u202eb\nä") == "a\\x1b[31m\\x00\\u202eb\nä"
