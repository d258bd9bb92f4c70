"""A log line is one line, says what happened, and never shows a secret (FIELD.md F9)."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from relay.config import Logging
from relay.telemetry.logs import configure, get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = "p@:/%w"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    out = io.StringIO()
    configure(Logging(format="json"), out)
    yield out
    root.handlers[:], root.level = before
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_has_time_level_logger_and_message_first(stream: io.StringIO) -> None:
    get_logger("relay.pipeline").info("lane claimed", lane=3)
    (line,) = lines(stream)
    assert list(line) == ["timestamp", "level", "logger", "message", "lane"]
    assert (line["level"], line["logger"], line["message"], line["lane"]) == (
        "info",
        "relay.pipeline",
        "lane claimed",
        3,
    )


def test_below_the_level_nothing_is_written(stream: io.StringIO) -> None:
    get_logger("relay.x").debug("invisible")
    assert stream.getvalue() == ""


@pytest.mark.parametrize("format_", ["json", "text"])
def test_secrets_never_reach_a_line(stream: io.StringIO, format_: Any) -> None:
    """In the message, values, nested values, exceptions as values, tracebacks, and libraries' own lines."""
    configure(Logging(format=format_), stream)
    log = get_logger("relay.x")
    url = f"amqp://guest:{SECRET}@host:5672/"
    log.info(f"to {url}", url=url, error=OSError(url), deep={"a": [url], "sasl_password": SECRET}, password=SECRET)  # noqa: G004  # the careless way is what is tested
    try:
        open(url)  # noqa: PTH123, SIM115  # any error that quotes the address
    except OSError:
        log.exception("lost")
    logging.getLogger("somebody.else").error("failed: %s", url)
    assert SECRET not in stream.getvalue()
    assert stream.getvalue().count("amqp://guest:***@host:5672/") >= 6


def test_libraries_join_from_warning_up(stream: io.StringIO) -> None:
    logging.getLogger("aiokafka").info("chatter")
    logging.getLogger("aiokafka").warning("%d%% lost", 5)
    (line,) = lines(stream)
    assert (line["level"], line["logger"], line["message"]) == ("warning", "aiokafka", "5% lost")


def test_what_json_cannot_say_is_text(stream: io.StringIO) -> None:
    """A log call with an odd value is no reason to lose the line, or the task that wrote it."""
    get_logger("relay.x").info("odd", big=2**70, raw=b"\xff", nan=float("nan"), items={1}, names={2: "b"})
    (line,) = lines(stream)
    assert (line["big"], line["nan"], line["items"], line["names"]) == (str(2**70), None, [1], {"2": "b"})


def test_a_huge_value_is_cut(stream: io.StringIO) -> None:
    get_logger("relay.x").info("long", error="x" * 1_000_000)
    assert len(stream.getvalue()) < 5_000


class ClosedPipe(io.StringIO):
    def write(self, _text: str) -> int:
        raise BrokenPipeError


def test_a_log_that_cannot_be_written_does_not_stop_the_relay(stream: io.StringIO) -> None:
    configure(Logging(), ClosedPipe())
    get_logger("relay.x").error("nobody reads this")
    assert stream.getvalue() == ""


def test_auto_is_json_when_nobody_watches(stream: io.StringIO) -> None:
    configure(Logging(format="auto"), stream)
    get_logger("relay.x").info("hello")
    assert lines(stream)[0]["message"] == "hello"


def test_logging_does_not_load_rich() -> None:
    """Structlog would import it: 4 MB in every pod for tracebacks that are never printed."""
    code = "import sys, relay.telemetry.logs; sys.exit('rich.console' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
