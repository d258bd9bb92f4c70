"""What an operator sees of an outbox: backlog, parked and dead deliveries, pods and their lanes.

Every query has a bounded cost, whatever lies in the tables: it counts up to a limit along an index and says
`at_least` when it stopped there. They need the relay role's rights only, and a snapshot for milliseconds.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import asyncpg

    from relay.database.names import Names

    Connection: TypeAlias = asyncpg.Connection[Any]

__all__ = [
    "Backlog",
    "DeadCount",
    "Member",
    "Overview",
    "ParkedCount",
    "TopicBacklog",
    "Traffic",
    "along_indexes",
    "backlog",
    "dead",
    "members",
    "overview",
    "parked",
    "traffic",
]

PER_LANE_MAX: Final = 200
"""Rows of a lane that are looked at: 12,800 in all, about 20 ms. They lie together at the old end of the table."""

PER_SINK_MAX: Final = 10_000
DEAD_MAX: Final = 20_000

# Moments are text already: what a driver makes of them depends on the codecs of the connection.
_ISO: Final = """'YYYY-MM-DD"T"HH24:MI:SS"Z"'"""

# With some hundred rows a lane the planner likes to fetch them all by bitmap and sort them, which is no longer bounded
# when its statistics are old. Without bitmap and sequential scans the indexes in order are all that is left.
PLANNER: Final = "SELECT set_config('enable_bitmapscan', 'off', true), set_config('enable_seqscan', 'off', true)"

BACKLOG: Final = """
SELECT topic, count(*) AS events, extract(epoch FROM clock_timestamp() - min(stored_at))::float8 AS oldest_age_seconds,
       count(DISTINCT lane) FILTER (WHERE nth = {per_lane_max}) AS lanes_cut, min(seq) AS first_seq
  FROM generate_series(0, 63) AS lanes (number)
 CROSS JOIN LATERAL (SELECT lane, seq, topic, stored_at, row_number() OVER (ORDER BY seq) AS nth
                       FROM {outbox} o
                      WHERE o.lane = lanes.number::smallint AND o.published_at IS NULL
                      ORDER BY seq LIMIT {per_lane_max}) pending
 GROUP BY topic ORDER BY events DESC, topic
"""

LAST_SEQ: Final = "SELECT last_value FROM {outbox_seq}"

# Sinks by a loose index scan: one step down the index for each of them, not one for each row.
PARKED: Final = """
WITH RECURSIVE sinks (sink) AS (
    SELECT min(sink) FROM {parked}
     UNION ALL
    SELECT (SELECT min(p.sink) FROM {parked} p WHERE p.sink > s.sink) FROM sinks s WHERE s.sink IS NOT NULL
)
SELECT s.sink, counted.events, counted.oldest_age_seconds
  FROM sinks s
 CROSS JOIN LATERAL (SELECT count(*) AS events,
                            extract(epoch FROM clock_timestamp() - min(stored_at))::float8 AS oldest_age_seconds
                       FROM (SELECT stored_at FROM {parked} p WHERE p.sink = s.sink
                              ORDER BY lane, key, number LIMIT {per_sink_max}) bounded) counted
 WHERE s.sink IS NOT NULL ORDER BY s.sink
"""

DEAD: Final = """
SELECT sink, kind, count(*) AS events, count(*) FILTER (WHERE holds) AS holding,
       to_char(max(died_at) AT TIME ZONE 'UTC', {iso}) AS last_died_at
  FROM (SELECT sink, kind, holds, died_at FROM {dead_letter} ORDER BY number LIMIT {dead_max}) bounded
 GROUP BY sink, kind ORDER BY sink, kind
"""

MEMBERS: Final = """
SELECT coalesce(m.pod, l.owner) AS pod, m.version, to_char(m.started_at AT TIME ZONE 'UTC', {iso}) AS started_at,
       coalesce(m.expires_at > clock_timestamp(), false) AS alive,
       coalesce(array_agg(l.lane ORDER BY l.lane) FILTER (WHERE l.lane IS NOT NULL), '{}') AS lanes
  FROM {member} m FULL JOIN {lease} l ON l.owner = m.pod
 GROUP BY coalesce(m.pod, l.owner), m.version, m.started_at, m.expires_at
 ORDER BY pod NULLS LAST
"""

# Counters of the statistics system: each backend hands them in about once a second.
TRAFFIC: Final = """
SELECT extract(epoch FROM clock_timestamp())::float8 AS at, coalesce(sum(s.n_tup_ins), 0)::bigint AS stored,
       coalesce(sum(s.n_tup_del + s.n_tup_upd), 0)::bigint AS settled
  FROM (SELECT {outbox_literal}::regclass AS relid
         UNION ALL SELECT inhrelid FROM pg_inherits WHERE inhparent = {outbox_literal}::regclass) part
  JOIN pg_stat_user_tables s ON s.relid = part.relid
"""


@dataclass(frozen=True, slots=True)
class TopicBacklog:
    """Events of one topic that are not settled."""

    topic: str
    events: int
    oldest_age_seconds: float


@dataclass(frozen=True, slots=True)
class Backlog:
    """Events that are not settled. With `at_least`, there are between `events` and `events_max`."""

    topics: tuple[TopicBacklog, ...]
    events: int
    events_max: int
    at_least: bool
    oldest_age_seconds: float


@dataclass(frozen=True, slots=True)
class ParkedCount:
    """Deliveries of one sink that are set aside."""

    sink: str
    events: int
    at_least: bool
    oldest_age_seconds: float


@dataclass(frozen=True, slots=True)
class DeadCount:
    """Dead letters of one sink ('' when no route took them) and kind; `holding` keep their keys waiting."""

    sink: str
    kind: str
    events: int
    holding: int
    last_died_at: str


@dataclass(frozen=True, slots=True)
class Member:
    """One pod, alive or not, and the lanes in its name. `pod` None: the lanes that nobody owns."""

    pod: str | None
    version: str | None
    started_at: str | None
    alive: bool
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counters at a moment (seconds since the epoch, the server's clock); two of them make a rate."""

    at: float
    stored: int
    settled: int

    def rates(self, earlier: Traffic) -> tuple[float, float]:
        """Events stored and settled per second since then."""
        seconds = max(self.at - earlier.at, 1e-3)
        return max(0, self.stored - earlier.stored) / seconds, max(0, self.settled - earlier.settled) / seconds


@dataclass(frozen=True, slots=True)
class Overview:
    """All of it, as of one moment or nearly."""

    backlog: Backlog
    parked: tuple[ParkedCount, ...]
    dead: tuple[DeadCount, ...]
    dead_at_least: bool
    members: tuple[Member, ...]


def sql(names: Names, template: str) -> str:
    """One of the queries above for this outbox, with its limits."""
    return names.format(
        template, per_lane_max=str(PER_LANE_MAX), per_sink_max=str(PER_SINK_MAX), dead_max=str(DEAD_MAX), iso=_ISO
    )


@asynccontextmanager
async def along_indexes(connection: Connection) -> AsyncIterator[None]:
    """A transaction (the caller's, if there is one) whose queries read tables by their indexes only, until it ends."""
    if connection.is_in_transaction():
        await connection.execute(PLANNER)
        yield
        return
    async with connection.transaction(readonly=True):
        await connection.execute(PLANNER)
        yield


async def backlog(connection: Connection, names: Names) -> Backlog:
    """Events that are not settled, by topic, the largest first."""
    async with along_indexes(connection):
        rows = await connection.fetch(sql(names, BACKLOG))
    last = await connection.fetchval(sql(names, LAST_SEQ))
    topics = tuple(TopicBacklog(row["topic"], row["events"], max(0.0, row["oldest_age_seconds"])) for row in rows)
    events = sum(topic.events for topic in topics)
    cut = any(row["lanes_cut"] for row in rows)
    # Every number between the first unsettled one and the last one handed out might still be there.
    most = max(events, last - min(row["first_seq"] for row in rows) + 1) if cut else events
    return Backlog(topics, events, most, cut, max((topic.oldest_age_seconds for topic in topics), default=0.0))


async def parked(connection: Connection, names: Names) -> tuple[ParkedCount, ...]:
    """Deliveries that are set aside, by sink."""
    async with along_indexes(connection):
        rows = await connection.fetch(sql(names, PARKED))
    return tuple(
        ParkedCount(row["sink"], row["events"], row["events"] >= PER_SINK_MAX, max(0.0, row["oldest_age_seconds"]))
        for row in rows
    )


async def dead(connection: Connection, names: Names) -> tuple[DeadCount, ...]:
    """Dead letters by sink and kind; the oldest `DEAD_MAX` are counted."""
    return tuple(DeadCount(**row) for row in await connection.fetch(sql(names, DEAD)))


async def members(connection: Connection, names: Names) -> tuple[Member, ...]:
    """Pods and their lanes, and last the lanes without an owner."""
    rows = await connection.fetch(sql(names, MEMBERS))
    return tuple(
        Member(row["pod"], row["version"], row["started_at"], row["alive"], tuple(row["lanes"])) for row in rows
    )


async def traffic(connection: Connection, names: Names) -> Traffic:
    """What went through the outbox since its statistics began."""
    row = await connection.fetchrow(sql(names, TRAFFIC))
    assert row is not None
    return Traffic(**row)


async def overview(connection: Connection, names: Names) -> Overview:
    """Everything but the traffic, which needs two looks."""
    letters = await dead(connection, names)
    return Overview(
        backlog=await backlog(connection, names),
        parked=await parked(connection, names),
        dead=letters,
        dead_at_least=_total(letters) >= DEAD_MAX,
        members=await members(connection, names),
    )


def _total(letters: Sequence[DeadCount]) -> int:
    return sum(letter.events for letter in letters)
