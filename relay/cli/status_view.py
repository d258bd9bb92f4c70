"""`relay status` for a person: one screen, the important numbers first, trouble in colour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from relay.cli.output import age, number, safe
from relay.types import LANES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from relay.cli.snapshot import Look, SinkLook
    from relay.maintenance.views import Backlog, Member

__all__ = ["render", "show"]

TOPICS_SHOWN: Final = 12
_OLD_SECONDS: Final = 60.0  # an event that waits for a minute is worth a colour
_BAR: Final = 16


async def show(looks: AsyncIterator[Look], *, watch: bool) -> None:
    """Print the first look, or keep the screen up to date."""
    console = Console(highlight=False)
    if not watch:
        console.print(render(await anext(looks)))
        return
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        async for look in looks:
            live.update(render(look), refresh=True)


def render(look: Look) -> RenderableType:
    """The whole screen."""
    parts: list[RenderableType] = [_head(look), "", _summary(look), ""]
    if look.overview.backlog.topics:
        parts += [_topics(look.overview.backlog), ""]
    parts += [_sinks(look), "", _pods(look.overview.members)]
    return Group(*parts)


def _head(look: Look) -> Text:
    return Text.assemble(
        (safe(look.outbox.replace('"', "")), "bold"),
        f"  {safe(look.database)}  settle = {look.settle}  ",
        (f"{look.at:%H:%M:%S} UTC", "dim"),
    )


def _summary(look: Look) -> Table:
    table = Table(box=None, padding=(0, 4, 0, 0), header_style="dim")
    for name in ("backlog", "oldest", "stored", "settled", "parked", "dead"):
        table.add_column(name)
    backlog = look.overview.backlog
    parked = sum(sink.parked for sink in look.sinks)
    dead = sum(sink.dead for sink in look.sinks)
    capped = any(sink.parked_at_least for sink in look.sinks)
    table.add_row(
        Text(_backlog(backlog), "bold"),
        _age(backlog.oldest_age_seconds) if backlog.events else Text("-", "dim"),
        f"{number(look.stored_per_second)}/s",
        f"{number(look.settled_per_second)}/s",
        Text(("≥ " if capped else "") + number(parked), "bold yellow" if parked else "bold"),
        Text(("≥ " if look.overview.dead_at_least else "") + number(dead), "bold red" if dead else "bold"),
    )
    return table


def _backlog(backlog: Backlog) -> str:
    if not backlog.at_least:
        return number(backlog.events)
    return f"{number(backlog.events)} to {number(backlog.events_max)}"


def _age(seconds: float) -> Text:
    return Text(age(seconds), "bold yellow" if seconds > _OLD_SECONDS else "")


def _table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


def _topics(backlog: Backlog) -> Table:
    table = _table("topic", "backlog", "oldest", numbers=("backlog", "oldest"))
    mark = "≥ " if backlog.at_least else ""
    for topic in backlog.topics[:TOPICS_SHOWN]:
        table.add_row(safe(topic.topic), mark + number(topic.events), _age(topic.oldest_age_seconds))
    if rest := backlog.topics[TOPICS_SHOWN:]:
        oldest = max(topic.oldest_age_seconds for topic in rest)
        events = sum(topic.events for topic in rest)
        table.add_row(Text(f"{len(rest)} more", "dim"), mark + number(events), _age(oldest))
    return table


def _sinks(look: Look) -> Table:
    table = _table("sink", "type", "state", "parked", "oldest", "dead", numbers=("parked", "oldest", "dead"))
    for sink in look.sinks:
        dead = number(sink.dead) + (f" ({number(sink.holding)} hold)" if sink.holding else "")
        table.add_row(
            safe(sink.name) if sink.name else Text("no route", "dim"),
            sink.type or "",
            _state(sink),
            Text(("≥ " if sink.parked_at_least else "") + number(sink.parked), "yellow" if sink.parked else ""),
            _age(sink.parked_oldest_age_seconds) if sink.parked else Text("-", "dim"),
            Text(dead, "red" if sink.dead else ""),
        )
    return table


def _state(sink: SinkLook) -> Text:
    if sink.type is None:
        return Text("") if sink.name == "" else Text("not configured: nobody delivers these", "yellow")
    if sink.ping is None:
        return Text("not asked", "dim")
    if sink.ping.problem is None:
        return Text(f"up, {sink.ping.seconds * 1000:.0f} ms", "green")
    return Text(safe(sink.ping.problem.splitlines()[0]), "red")


def _pods(members: tuple[Member, ...]) -> Table:
    table = _table("pod", "lanes", "", "version", "up since", numbers=("lanes",))
    for member in members:
        lanes = len(member.lanes)
        bar = "█" * round(lanes * _BAR / LANES)
        if member.pod is None:
            table.add_row(Text("no owner", "yellow"), str(lanes), Text(bar, "yellow"), "", "")
            continue
        started = member.started_at.replace("T", " ").removesuffix("Z") if member.started_at else ""
        style = "green" if member.alive else "red"
        name = Text(safe(member.pod) + ("" if member.alive else " (gone)"), "" if member.alive else "red")
        table.add_row(name, str(lanes), Text(bar, style), safe(member.version or ""), started)
    return table
