"""The last word: what the consumer counted, against what the database says was committed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from relay.demo.screen import latency

if TYPE_CHECKING:
    from relay.demo.scene import Scene

__all__ = ["Report"]


@dataclass(frozen=True)
class Report:
    """Counts at the end; `problems` is empty when every promise was kept."""

    scene: Scene
    truth: frozenset[str]

    @property
    def problems(self) -> list[str]:
        """What was not as promised, one sentence each."""
        left = self.scene.outbox_rows
        return self.scene.tally.problems(self.truth) + ([f"{left:,} rows are left in the outbox"] if left else [])

    def render(self) -> RenderableType:
        """The summary."""
        return Group(
            Text("\n  counted by the consumer, after the relay had stopped", "bold"), self._table(), self._verdict()
        )

    def _table(self) -> Table:
        tally = self.scene.tally
        arrived = len(tally.seen & self.truth)
        p50, p99 = latency(tally.calm_latency())
        longest = latency((tally.longest_wait, 0))[0]
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="dim")
        table.add_column(justify="right", style="bold")
        table.add_column()
        table.add_row("    committed", f"{len(self.truth):,}", "orders in the database")
        table.add_row("    delivered", f"{arrived:,}", f"of them; {len(self.truth) - arrived:,} missing")
        table.add_row(
            "    in order",
            f"{tally.in_order:,}",
            f"for each of {tally.customers} customers: 1, 2, 3, ... without a gap",
        )
        table.add_row("    rolled back", f"{len(tally.rolled_back):,}", f"{tally.rolled_back_seen} of them delivered")
        table.add_row(
            "    repeats",
            f"{tally.repeats:,}",
            "confirmations were lost: sent again, same id" if tally.repeats else "nothing was sent twice",
        )
        table.add_row("    latency p50", p50, f"p99 {p99}, commit to consumer (in the outage {longest})")
        return table

    def _verdict(self) -> Text:
        if self.problems:
            return Text("\n".join(f"  ✗ {problem}" for problem in self.problems), "bold red")
        return Text("  ✓ nothing lost, nothing invented, every customer's order kept", "bold green")
