"""Dead letters in an operator's hands: list, retry in order, discard.

A retried delivery goes back to `outbox_parked` under the number that it always had, so it sorts before
what waits behind it; the pod that owns its lane finds it within seconds. Both moves lock the lanes' lease
rows FOR UPDATE, which no pod's decision (FOR SHARE, PROTOCOLS.md 2) can overlap, and leave each key with
one head: its first row, unless an earlier dead letter still holds the key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import asyncpg

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from datetime import datetime
    from uuid import UUID

    from relay.database.names import Names

    Connection: TypeAlias = asyncpg.Connection[Any]
    Targets: TypeAlias = Callable[[str], Sequence[str]]

__all__ = ["DeadLetter", "Selection", "discard", "find", "retry"]

_CHUNK: Final = 500
"""Rows of one transaction: the lease rows of their lanes stay locked for some milliseconds only."""

_DEADLOCKS_MAX: Final = 5

_COLUMNS: Final = """
number, seq, id, sink, topic, key, lane, kind, reason, attempts, holds, created_at::text AS created_at, stored_at,
died_at, headers, octet_length(payload) AS payload_bytes
"""  # created_at as text: it may be infinite or outside the years that Python knows (FIELD.md A5)

_SELECTED: Final = """
      ($1::text IS NULL OR sink = $1) AND ($2::text IS NULL OR topic = $2) AND ($3::text IS NULL OR key = $3)
  AND ($4::uuid[] IS NULL OR id = ANY($4)) AND ($5::text IS NULL OR kind = $5)
"""

_FIND: Final = """
SELECT {columns}, CASE WHEN $7 THEN payload END AS payload
  FROM {dead_letter} WHERE {selected} ORDER BY number LIMIT $6
"""

# What died after the start is left alone: a delivery that is retried and dies again at once would come round for ever.
_CHOOSE: Final = """
SELECT {columns}, NULL::bytea AS payload
  FROM {dead_letter} WHERE {selected} AND number > $7 AND died_at <= $8 ORDER BY number LIMIT $6
"""

_LOCK_LANES: Final = "SELECT FROM {lease} WHERE lane = ANY($1::smallint[]) ORDER BY lane FOR UPDATE"

_DISCARD: Final = "DELETE FROM {dead_letter} WHERE number = ANY($1::bigint[]) RETURNING number"

# An event that no route took has no sink of its own ('') and goes to those that its topic has now ($2, $3): the first
# copy keeps the number. It may be parked for a sink already, by a pod that had lost the lane: one copy is enough.
_RETRY: Final = """
WITH taken AS (
    DELETE FROM {dead_letter} WHERE number = ANY($1::bigint[]) RETURNING *
), delivery AS (
    SELECT t.*, coalesce(r.sink, t.sink) AS target, row_number() OVER (PARTITION BY t.number ORDER BY r.nth) AS copy
      FROM taken t
      LEFT JOIN unnest($2::text[], $3::text[]) WITH ORDINALITY AS r (topic, sink, nth) ON t.sink = '' AND r.topic = t.topic
), parked AS (
    INSERT INTO {parked} (number, seq, id, sink, topic, key, lane, payload, headers, created_at, stored_at,
                          attempts, retry_at, last_error)
    SELECT CASE copy WHEN 1 THEN number ELSE nextval({parked_number_literal}::regclass) END,
           seq, id, target, topic, key, lane, payload, headers, created_at, stored_at,
           0, CASE WHEN key IS NULL THEN now() END, reason
      FROM delivery ORDER BY number, copy
        ON CONFLICT (sink, seq) DO NOTHING
)
SELECT number FROM taken
"""

# Rows behind the head wait (NULL), also one that was the head until now; a head that waits for its backoff keeps its time.
_HEADS: Final = """
WITH keys AS (
    SELECT DISTINCT * FROM unnest($1::text[], $2::smallint[], $3::text[]) AS k (sink, lane, key)
), heads AS (
    SELECT k.*, first.number,
           NOT EXISTS (SELECT FROM {dead_letter} d
                        WHERE d.holds AND d.lane = k.lane AND d.sink = k.sink AND d.key = k.key
                          AND d.number < first.number) AS ready
      FROM keys k
     CROSS JOIN LATERAL (SELECT min(number) AS number FROM {parked} p
                          WHERE p.sink = k.sink AND p.lane = k.lane AND p.key = k.key) first
)
UPDATE {parked} p
   SET retry_at = CASE WHEN p.number = h.number AND h.ready THEN coalesce(p.retry_at, now()) END
  FROM heads h
 WHERE p.sink = h.sink AND p.lane = h.lane AND p.key = h.key
   AND (p.retry_at IS NOT NULL) <> (p.number = h.number AND h.ready)
"""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead letters; a field that is None selects all. `sink` '' means events that no route took."""

    sink: str | None = None
    topic: str | None = None
    key: str | None = None
    ids: tuple[UUID, ...] | None = None
    kind: str | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One delivery that was given up.

    `created_at` is PostgreSQL's own text. `holds`: later events of its key wait for it. `payload_bytes`
    None means that the payload is NULL; `payload` itself is None unless it was asked for.
    """

    number: int
    seq: int
    id: UUID
    sink: str
    topic: str
    key: str | None
    lane: int
    kind: str
    reason: str
    attempts: int
    holds: bool
    created_at: str
    stored_at: datetime
    died_at: datetime
    headers: str | None
    payload_bytes: int | None
    payload: bytes | None


async def find(
    connection: Connection, names: Names, selection: Selection, *, limit: int, payload: bool = False
) -> list[DeadLetter]:
    """The oldest `limit` dead letters of a selection, in the order of their numbers."""
    return await _fetch(connection, _select(names, _FIND), selection, limit, payload)


async def retry(
    connection: Connection, names: Names, selection: Selection, targets: Targets, *, limit: int | None = None
) -> AsyncIterator[list[DeadLetter]]:
    """Move dead letters back among the parked deliveries, in order, attempts at 0; yields what each transaction moved.

    `targets` gives the sinks of a topic, for events that no route took. One whose topic still has none stays.
    """

    async def move(letters: list[DeadLetter]) -> list[DeadLetter]:
        routed = [letter for letter in letters if letter.sink or targets(letter.topic)]
        topics = {letter.topic for letter in routed if not letter.sink}
        pairs = [(topic, sink) for topic in topics for sink in targets(topic)]
        found = await connection.fetch(
            names.format(_RETRY), _numbers(routed), [topic for topic, _ in pairs], [sink for _, sink in pairs]
        )
        return _only(routed, found)

    async for moved in _in_chunks(connection, names, selection, limit, move, targets):
        yield moved


async def discard(
    connection: Connection, names: Names, selection: Selection, *, limit: int | None = None
) -> AsyncIterator[list[DeadLetter]]:
    """Delete dead letters for good, in order; yields what each transaction deleted. A key that they held goes on."""

    async def delete(letters: list[DeadLetter]) -> list[DeadLetter]:
        return _only(letters, await connection.fetch(names.format(_DISCARD), _numbers(letters)))

    async for deleted in _in_chunks(connection, names, selection, limit, delete, lambda _topic: ()):
        yield deleted


async def _in_chunks(
    connection: Connection, names: Names, selection: Selection, limit: int | None, act: Any, targets: Targets
) -> AsyncIterator[list[DeadLetter]]:
    started = await connection.fetchval("SELECT clock_timestamp()")
    after, left = 0, limit
    while left is None or left > 0:
        size = _CHUNK if left is None else min(_CHUNK, left)
        chosen = await _fetch(connection, _select(names, _CHOOSE), selection, size, after, started)
        if not chosen:
            return
        yield await _transact(connection, names, chosen, act, targets)
        after = chosen[-1].number
        left = None if left is None else left - len(chosen)


async def _transact(
    connection: Connection, names: Names, chosen: list[DeadLetter], act: Any, targets: Targets
) -> list[DeadLetter]:
    for attempt in range(_DEADLOCKS_MAX):
        try:
            async with connection.transaction():
                await connection.execute(names.format(_LOCK_LANES), sorted({letter.lane for letter in chosen}))
                done: list[DeadLetter] = await act(chosen)
                await _order(connection, names, done, targets)
                return done
        except asyncpg.DeadlockDetectedError:  # a pod locked the same lanes in another order; one of us had to yield
            if attempt == _DEADLOCKS_MAX - 1:
                raise
    raise AssertionError


async def _order(connection: Connection, names: Names, letters: list[DeadLetter], targets: Targets) -> None:
    keys = [
        (sink, letter.lane, letter.key)
        for letter in letters
        if letter.key is not None
        for sink in ([letter.sink] if letter.sink else targets(letter.topic))
    ]
    if keys:
        await connection.execute(names.format(_HEADS), *map(list, zip(*keys, strict=True)))


async def _fetch(connection: Connection, sql: str, chosen: Selection, limit: int, *more: Any) -> list[DeadLetter]:
    ids = list(chosen.ids) if chosen.ids is not None else None
    rows = await connection.fetch(sql, chosen.sink, chosen.topic, chosen.key, ids, chosen.kind, limit, *more)
    return [DeadLetter(**row) for row in rows]


def _select(names: Names, sql: str) -> str:
    return names.format(sql, columns=_COLUMNS, selected=_SELECTED)


def _numbers(letters: Sequence[DeadLetter]) -> list[int]:
    return [letter.number for letter in letters]


def _only(letters: list[DeadLetter], rows: Sequence[asyncpg.Record]) -> list[DeadLetter]:
    """Those that were still there: somebody else may retry or discard at the same time."""
    there = {row["number"] for row in rows}
    return [letter for letter in letters if letter.number in there]
