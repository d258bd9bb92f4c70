"""What a run says: tables for the terminal, JSON for programs, Markdown and an SVG chart for documents."""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import asdict, dataclass, field
from html import escape
from typing import TYPE_CHECKING, Final

import orjson

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Cell", "Report", "Table", "shown"]

Cell = str | float | None

_PLAIN_WIDTH: Final = 140
_WIDTH: Final = 760
_BAR: Final = 22
_LABEL: Final = 300


@dataclass(frozen=True, slots=True)
class Table:
    """`bars`: the column that the chart shows, by name; the first column labels the bars."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    bars: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Report:
    """One run of one command."""

    command: str
    tables: tuple[Table, ...]
    server: str = ""
    load_before: float = 0.0
    load_after: float = field(default_factory=lambda: os.getloadavg()[0])
    at: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime()))
    machine: str = field(
        default_factory=lambda: f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    )

    def write(self, folder: Path) -> list[Path]:
        """`NAME.json`, `NAME.md` and for each table with bars an SVG; returns the paths."""
        folder.mkdir(parents=True, exist_ok=True)
        name = "-".join(self.command.split()[:4]).replace("--", "").replace("/", "_")
        charts = [(f"{name}-{n}.svg", svg(table)) for n, table in enumerate(self.tables, 1) if table.bars]
        texts = [(f"{name}.json", self.json()), (f"{name}.md", self.markdown([chart for chart, _ in charts])), *charts]
        for file, text in texts:
            (folder / file).write_text(text, encoding="utf-8")
        return [folder / file for file, _ in texts]

    def json(self) -> str:
        """Everything, for programs."""
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2).decode() + "\n"

    def heading(self) -> str:
        """When and where, with the load average: figures of a busy machine mean less."""
        return (
            f"{self.at}, {self.machine}, {self.server}, load average {self.load_before:.1f} before and "
            f"{self.load_after:.1f} after"
        )

    def markdown(self, charts: list[str] | None = None) -> str:
        """The tables, with their charts beside."""
        parts = [f"# relay bench {self.command}", self.heading(), *map(_markdown, self.tables)]
        parts += [f"![chart]({chart})" for chart in charts or ()]
        return "\n\n".join(parts) + "\n"

    def show(self) -> None:
        """Print the tables."""
        from rich.console import Console  # noqa: PLC0415  # 15 MB that only a terminal needs
        from rich.table import Table as RichTable  # noqa: PLC0415

        console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
        console.print(self.heading())
        for table in self.tables:
            shape = RichTable(title=table.title, caption=table.note or None, title_justify="left")
            for index, column in enumerate(table.columns):
                shape.add_column(column, justify="right" if index else "left")
            for row in table.rows:
                shape.add_row(*map(shown, row))
            console.print(shape)


def shown(cell: Cell) -> str:
    """12,345, 12.3, 0.123; a dash for nothing."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if cell == 0 or abs(cell) >= 100:  # noqa: PLR2004  # three digits say enough
        return f"{cell:,.0f}"
    return f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.2f}"  # noqa: PLR2004


def _markdown(table: Table) -> str:
    lines = [f"## {table.title}", "", "| " + " | ".join(table.columns) + " |"]
    lines.append("|" + "|".join(["---"] + ["---:"] * (len(table.columns) - 1)) + "|")
    lines += ["| " + " | ".join(shown(cell).replace("|", "\\|") for cell in row) + " |" for row in table.rows]
    return "\n".join([*lines, *(("", table.note) if table.note else ())])


def svg(table: Table) -> str:
    """Horizontal bars of one column."""
    column = table.columns.index(table.bars or table.columns[-1])
    bars = [(str(row[0]), float(value)) for row in table.rows if isinstance(value := row[column], int | float)]
    most = max([value for _, value in bars], default=0.0) or 1.0
    height = 50 + _BAR * len(bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<text x="8" y="20" font-weight="bold">{escape(table.title)}: {escape(table.columns[column])}</text>',
    ]
    for index, (label, value) in enumerate(bars):
        top = 36 + index * _BAR
        width = max(value / most * (_WIDTH - _LABEL - 90), 1)
        parts += [
            f'<text x="{_LABEL - 8}" y="{top + 12}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{_LABEL}" y="{top}" width="{width:.1f}" height="{_BAR - 6}" fill="#336791"/>',
            f'<text x="{_LABEL + width + 6:.1f}" y="{top + 12}">{shown(value)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"
