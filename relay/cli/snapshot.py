"""What `relay status` shows, as data: one look at the database and the sinks, and again after an interval."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from relay.cli.pings import Ping, ping_all
from relay.cli.session import address, connect
from relay.database.names import Names
from relay.maintenance import views

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import asyncpg

    from relay.config import Config

__all__ = ["Look", "SinkLook", "looks"]


@dataclass(frozen=True)
class SinkLook:
    """One sink: configured, or only named by rows that wait for it. `ping` None: not asked."""

    name: str
    type: str | None
    ping: Ping | None
    parked: int
    parked_at_least: bool
    parked_oldest_age_seconds: float
    dead: int
    holding: int


@dataclass(frozen=True)
class Look:
    """Everything at one moment. Rates are events per second since the look before."""

    at: datetime
    outbox: str
    database: str
    settle: str
    overview: views.Overview
    stored_per_second: float
    settled_per_second: float
    sinks: tuple[SinkLook, ...]

    def document(self) -> dict[str, Any]:
        """The JSON of `relay status --json`."""
        overview = self.overview
        return {
            "at": self.at,
            "outbox": self.outbox,
            "database": self.database,
            "settle": self.settle,
            "backlog": overview.backlog,
            "stored_per_second": round(self.stored_per_second, 1),
            "settled_per_second": round(self.settled_per_second, 1),
            "sinks": [_sink_document(sink) for sink in self.sinks],
            "dead_letters": overview.dead,
            "dead_letters_at_least": overview.dead_at_least,
            "pods": overview.members,
        }


async def looks(config: Config, *, interval: float, ping: bool) -> AsyncGenerator[Look, None]:
    """A look after one interval, then one for every further interval; without end."""
    names = Names.from_config(config.database)
    async with connect(config.database) as connection:
        before = await views.traffic(connection, names)
        while True:
            pings, _ = await asyncio.gather(ping_all(config.sinks if ping else {}), asyncio.sleep(interval))
            after = await views.traffic(connection, names)
            yield await _look(connection, names, config, pings, after.rates(before))
            before = after


async def _look(
    connection: asyncpg.Connection[Any],
    names: Names,
    config: Config,
    pings: list[Ping],
    rates: tuple[float, float],
) -> Look:
    overview = await views.overview(connection, names)
    return Look(
        at=datetime.now(UTC),
        outbox=names.outbox,
        database=address(config.database.dsn.get_secret_value()),
        settle=config.source.polling.settle,
        overview=overview,
        stored_per_second=rates[0],
        settled_per_second=rates[1],
        sinks=_sinks(config, overview, {ping.name: ping for ping in pings}),
    )


def _sinks(config: Config, overview: views.Overview, pings: dict[str, Ping]) -> tuple[SinkLook, ...]:
    parked = {count.sink: count for count in overview.parked}
    named = dict.fromkeys([*config.sinks, *parked, *(count.sink for count in overview.dead)])
    return tuple(_sink(name, config, parked.get(name), overview, pings.get(name)) for name in named)


def _sink(
    name: str, config: Config, parked: views.ParkedCount | None, overview: views.Overview, ping: Ping | None
) -> SinkLook:
    section = config.sinks.get(name)
    return SinkLook(
        name=name,
        type=section.type if section is not None else None,
        ping=ping,
        parked=parked.events if parked else 0,
        parked_at_least=parked.at_least if parked else False,
        parked_oldest_age_seconds=parked.oldest_age_seconds if parked else 0.0,
        dead=sum(count.events for count in overview.dead if count.sink == name),
        holding=sum(count.holding for count in overview.dead if count.sink == name),
    )


def _sink_document(sink: SinkLook) -> dict[str, Any]:
    document = asdict(sink)
    ping = document.pop("ping")
    document["up"] = sink.ping.up if sink.ping is not None else None
    document["reason"] = ping["problem"] if ping is not None else None
    return document
