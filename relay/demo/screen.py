"""What the demo looks like: a live picture of 80 by 24 on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from relay.demo.tally import BUCKET_SECONDS

if TYPE_CHECKING:
    from collections import Counter

    from relay.demo.scene import Scene

__all__ = ["Screen", "latency"]

_FRAME_SECONDS: Final = 0.25
_LINE_SECONDS: Final = 2.0
_CHART_STEPS: Final = 32
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_NOTES_SHOWN: Final = 9


class Screen:
    """Shows a scene until cancelled. `console` decides between the picture and the lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.is_live = console.is_terminal and not console.is_dumb_terminal

    def step(self, text: str, began: float) -> None:
        """One thing of the preparations is done; `began` is its `time.monotonic()`."""
        self._console.print(Text.assemble(("  ✓ ", "green"), text, (f"  {time.monotonic() - began:.1f} s", "dim")))

    async def show(self, scene: Scene) -> None:
        """Show it until cancelled; the picture is gone afterwards, the story stays."""
        await (self._picture(scene) if self.is_live else self._lines(scene))

    async def _picture(self, scene: Scene) -> None:
        try:
            with Live(console=self._console, auto_refresh=False, transient=True) as live:
                while True:
                    live.update(_frame(scene), refresh=True)
                    await asyncio.sleep(_FRAME_SECONDS)
        finally:
            self._console.print(Padding(_story(scene), (1, 0, 0, 2)))

    async def _lines(self, scene: Scene) -> None:
        scene.on_note = lambda at, text: self._console.print(f"{at:6.1f} s  * {text}", soft_wrap=True)
        for at, text in scene.notes:
            scene.on_note(at, text)
        while True:
            await asyncio.sleep(_LINE_SECONDS)
            self._console.print(f"{scene.elapsed:6.1f} s  {_line(scene)}", soft_wrap=True)


def latency(pair: tuple[float, float] | None) -> tuple[str, str]:
    """p50 and p99 as text."""
    if pair is None:
        return "-", "-"
    return _milliseconds(pair[0]), _milliseconds(pair[1])


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _line(scene: Scene) -> str:
    tally = scene.tally
    p50, p99 = latency(tally.recent_latency())
    return (
        f"committed {tally.committed:,}  delivered {len(tally.seen):,}  in order {tally.in_order:,}"
        f"  rolled back {len(tally.rolled_back):,}, seen of them {tally.rolled_back_seen}  repeats {tally.repeats}"
        f"  p50 {p50}  p99 {p99}  oldest {tally.oldest_age(time.time()):.1f} s"
    )


def _frame(scene: Scene) -> RenderableType:
    rule = Rule(style="dim")
    parts: list[RenderableType] = [_head(scene), rule, _flow(scene), rule, _counts(scene), rule, _story(scene)]
    if scene.keep:
        parts.append(Text("Ctrl-C closes the shop and counts" if scene.is_told else "Ctrl-C ends it", "dim"))
    return Padding(Group(*parts), (1, 2, 0, 2))


def _head(scene: Scene) -> Text:
    length = "" if scene.keep else f" of about {scene.seconds:.0f}"
    return Text.assemble(
        ("outbox-relay demo", "bold"),
        "   a shop, its outbox, relay pods, a broker",
        (f"   {scene.elapsed:.0f}{length} s", "dim"),
    )


# -- the way of an order -------------------------------------------------------------------------


def _flow(scene: Scene) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for width in (6, 8, _CHART_STEPS):
        table.add_column(min_width=width, no_wrap=True)
    table.add_column(justify="right", min_width=16, no_wrap=True)
    now = time.time()
    commits, arrivals = scene.tally.commits_by_bucket, scene.tally.arrivals_by_bucket
    top = max(1, *(_steps(commits, now)))
    table.add_row(
        Text("shop", "bold"), "commits", Text(_chart(commits, now, top), "cyan"), f"{_rate(commits, now):,.0f} orders/s"
    )
    table.add_row(Text("relay", "bold"), *_pods(scene))
    style = "green" if scene.broker_up else "red"
    state = Text("● up" if scene.broker_up else "✗ killed", style)
    delivered = Text(_chart(arrivals, now, top), "green")
    table.add_row(Text("broker", "bold"), state, delivered, f"{_rate(arrivals, now):,.0f} events/s")
    return table


def _pods(scene: Scene) -> tuple[RenderableType, RenderableType, RenderableType]:
    pods = Text()
    for pod in scene.stage.pods:
        lanes = scene.lanes_of(pod)
        if pod.running:
            pods.append("● " if lanes else "○ ", "green" if lanes else "yellow")
            pods.append(f"{pod.label} {lanes}  ")
        else:
            pods.append(f"✗ {pod.label}{f' {lanes}' if lanes else ''}  ", "red")
    return Text("lanes of"), pods, f"{scene.outbox_rows:,} in outbox"


def _steps(buckets: Counter[int], now: float) -> list[int]:
    """The last full buckets, oldest first."""
    last = int(now / BUCKET_SECONDS)
    return [buckets[step] for step in range(last - _CHART_STEPS, last)]


def _chart(buckets: Counter[int], now: float, top: int) -> str:
    highest = len(_BLOCKS) - 1
    # The burst after an outage is cut at the top: it is many times the shop's pace.
    return "".join(_BLOCKS[min(highest, -(-count * 5 // top))] for count in _steps(buckets, now))


def _rate(buckets: Counter[int], now: float) -> float:
    return sum(_steps(buckets, now)[-2:]) / (2 * BUCKET_SECONDS)


# -- counts and story ----------------------------------------------------------------------------


def _counts(scene: Scene) -> Table:
    tally = scene.tally
    p50, p99 = latency(tally.recent_latency())
    oldest = tally.oldest_age(time.time())
    table = Table.grid(padding=(0, 2, 0, 0))
    for column in range(3):
        table.add_column(style="dim", min_width=11)
        table.add_column(justify="right", min_width=9 if column < 2 else 8, style="bold")  # noqa: PLR2004  # the last one
    table.add_row(
        "committed", f"{tally.committed:,}", "delivered", f"{len(tally.seen):,}",
        "in order", _must_be(tally.in_order, len(tally.seen)),
    )  # fmt: skip
    table.add_row(
        "rolled back", f"{len(tally.rolled_back):,}", "seen of them", _must_be(tally.rolled_back_seen, 0),
        "repeats", f"{tally.repeats:,}",
    )  # fmt: skip
    table.add_row(
        "latency p50", p50, "p99", p99, "oldest", Text(f"{oldest:.1f} s", "yellow" if oldest > 1 else ""),
    )  # fmt: skip
    return table


def _must_be(value: int, wanted: int) -> Text:
    return Text(f"{value:,}", "green" if value == wanted else "bold red")


def _story(scene: Scene) -> Text:
    lines = [Text.assemble((f"{at:4.1f} s  ", "dim"), text) for at, text in scene.notes[-_NOTES_SHOWN:]]
    return Text("\n").join(lines)
