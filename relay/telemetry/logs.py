"""Logs: one line per state change on standard error, as JSON or for people, never with a secret.

Our own lines go through structlog; what libraries write with `logging` joins them from warning up.
Every value, and every exception's text, is redacted before it is rendered.
"""

from __future__ import annotations

import logging
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

import orjson

from relay.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Iterator

    from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

    from relay.config import Logging


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Make `import module` fail for a moment, unless it is loaded already.

    structlog imports rich when it finds it, to print tracebacks that we do not print: 4 MB and 80 ms.
    """
    if module in sys.modules:
        yield
        return
    sys.modules[module] = cast("Any", None)
    try:
        yield
    finally:
        del sys.modules[module]


with _hidden("rich"):
    import structlog

__all__ = ["configure", "get_logger"]

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_SECRET_NAME: Final = re.compile(r"password|passwd|passphrase|secret|token", re.IGNORECASE)
_VALUE_CHARACTERS_MAX: Final = 4_000  # a server's error may quote what we sent; a log line is not the place for it


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger: `log.info("lane claimed", lane=3)`. `name` is the module's and shows as `logger`."""
    return cast("FilteringBoundLogger", structlog.get_logger(name))


def configure(section: Logging, stream: TextIO | None = None) -> None:
    """Send all logs to `stream` (standard error) as `section` says. May be called again."""
    target = stream or sys.stderr
    text = section.format == "text" or (section.format == "auto" and target.isatty())
    structlog.configure(
        processors=[*_COMMON, *(_for_people(target) if text else _AS_JSON)],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[section.level]),
        logger_factory=lambda *names: _Lines(target, *names),
        cache_logger_on_first_use=False,  # loggers are module constants: a cached one would keep the old stream
    )
    logging.basicConfig(level=max(logging.WARNING, _LEVELS[section.level]), handlers=[_FromLogging()], force=True)


def _redact_all(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    return {name: "***" if _SECRET_NAME.search(name) else _clean(value) for name, value in event.items()}


def _clean(value: Any) -> Any:
    """`value` made of plain JSON types only: what a renderer would turn to text later could not be redacted."""
    match value:
        case None | bool() | float():
            return value
        case int():
            return value if -(2**63) <= value < 2**64 else str(value)
        case dict():
            return {
                str(name): "***" if _SECRET_NAME.search(str(name)) else _clean(item) for name, item in value.items()
            }
        case list() | tuple() | set() | frozenset():
            return [_clean(item) for item in value]
        case _:
            text = redact(str(value))
            return text if len(text) <= _VALUE_CHARACTERS_MAX else f"{text[:_VALUE_CHARACTERS_MAX]}... (cut)"


def _as_json(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    first = {name: event.pop(name, None) for name in ("timestamp", "level", "logger")}
    return orjson.dumps({**first, "message": event.pop("event", None), **event}).decode()


def _for_people(stream: TextIO) -> list[Processor]:
    return [
        structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=34
        )
    ]


_COMMON: Final[list[Processor]] = [
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="timestamp"),
    structlog.processors.StackInfoRenderer(),
    structlog.processors.format_exc_info,
    _redact_all,
]
_AS_JSON: Final[list[Processor]] = [_as_json]


class _Lines:
    """One line for each call. A log that cannot be written (full disk, closed pipe) never stops the relay."""

    def __init__(self, stream: TextIO, name: str = "") -> None:
        self._stream = stream
        self.name = name

    def msg(self, line: str) -> None:
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            return

    log = debug = info = warning = error = critical = exception = fatal = msg


class _FromLogging(logging.Handler):
    """Takes what libraries write with `logging` into the same stream, in the same form."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            log = get_logger(record.name)
            log.log(min(record.levelno, logging.CRITICAL), "%s", record.getMessage(), exc_info=record.exc_info or None)
        except Exception:  # noqa: BLE001  # a library's broken log call must not break the library's caller
            self.handleError(record)
