"""What commands print: JSON for programs, text for people that no stored byte can turn into terminal commands."""

from __future__ import annotations

from typing import Any, Final

import click
import orjson

__all__ = ["age", "number", "print_json", "safe"]

_MINUTE: Final = 60
_HOUR: Final = 3_600
_DAY: Final = 86_400


def print_json(document: Any) -> None:
    """Dataclasses, dates and UUIDs (also the driver's own) included; `bytes` are the caller's business."""
    click.echo(orjson.dumps(document, default=str, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode())


def safe(text: str) -> str:
    """`text` with control characters spelled out: a topic or an error may hold escape sequences."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def number(count: float) -> str:
    """12,345."""
    return f"{count:,.0f}"


def age(seconds: float) -> str:
    """An age as people say it: `0.4 s`, `12 s`, `3 min 20 s`, `5 h 2 min`, `3 d 4 h`."""
    if seconds < 10:  # noqa: PLR2004  # below ten seconds a tenth says something
        return f"{seconds:.1f} s"
    for unit, name, below, smaller in ((_DAY, "d", _HOUR, "h"), (_HOUR, "h", _MINUTE, "min"), (_MINUTE, "min", 1, "s")):
        if seconds >= unit:
            rest = int(seconds % unit // below)
            return f"{int(seconds // unit)} {name}" + (f" {rest} {smaller}" if rest else "")
    return f"{seconds:.0f} s"
