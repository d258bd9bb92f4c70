"""What `relay run` would do with the oldest events, without doing it: nothing is claimed, published or settled.

Running the engine with a sink that swallows everything would settle the events, which is the one thing
that a rehearsal must not do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click

from relay.cli.output import print_json, safe
from relay.cli.session import connect
from relay.database.names import Names
from relay.pipeline.router import Router

if TYPE_CHECKING:
    from relay.config import Config

__all__ = ["Planned", "plan", "print_plan"]

_OLDEST: Final = """
SELECT seq, id::text, topic, key, octet_length({payload}) AS payload_bytes
  FROM generate_series(0, 63) AS lanes (number)
 CROSS JOIN LATERAL (SELECT * FROM {outbox} o WHERE o.lane = lanes.number::smallint AND o.published_at IS NULL
                      ORDER BY seq LIMIT {limit}) pending
 ORDER BY seq LIMIT {limit}
"""


@dataclass(frozen=True)
class Planned:
    """One event and where it would go: (sink, destination) for each; empty: no route takes its topic."""

    seq: int
    id: str
    topic: str
    key: str | None
    payload_bytes: int | None
    targets: tuple[tuple[str, str], ...]


async def plan(config: Config, limit: int) -> list[Planned]:
    """The oldest events that are not settled."""
    router, names = Router(config.routing), Names.from_config(config.database)
    # json and jsonb have no length of their own; the text of a bytea would be twice its length.
    payload = "payload" if config.database.payload == "bytea" else "payload::text"
    async with connect(config.database) as connection:
        rows = await connection.fetch(names.format(_OLDEST, limit=str(limit), payload=payload))
    return [
        Planned(
            **row,
            targets=tuple((t.sink, t.destination(row["topic"], row["key"])) for t in router.targets(row["topic"])),
        )
        for row in rows
    ]


async def print_plan(config: Config, limit: int, *, json_: bool) -> None:
    """Print one line for each event."""
    events = await plan(config, limit)
    if json_:
        print_json({"events": events})
        return
    for event in events:
        size = "NULL" if event.payload_bytes is None else f"{event.payload_bytes} B"
        where = ", ".join(f"{sink}: {destination}" for sink, destination in event.targets)
        unrouted = "dead letter: no route takes it" if config.unrouted == "dead_letter" else "stop: no route takes it"
        click.echo(safe(f"{event.seq}  {event.topic}  key={event.key or '-'}  {size}  -> {where or unrouted}"))
    click.echo(f"{len(events)} events looked at; nothing was published or settled.", err=True)
