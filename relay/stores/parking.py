"""Parked events and dead letters on PostgreSQL (PROTOCOLS.md rules 2 to 7).

Every decision is a transaction of two statements: the first locks the lease rows FOR SHARE and
compares owner, epoch and server, the second writes, with a snapshot taken after the lock. A claim
(FOR UPDATE SKIP LOCKED) cannot come in between, and a new owner cannot miss what was written.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from relay.database.session import IDENTITY
from relay.errors import LeaseLost
from relay.store import HeldKey, ParkedRun
from relay.types import Message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    import asyncpg

    from relay.database.names import Names
    from relay.database.pool import Connection, Pool
    from relay.store import Burial, Parked, RunResult
    from relay.stores.outbox_rows import PostgresSettler
    from relay.types import Lease

__all__ = ["PostgresParking"]

_KEYS_MAX: Final = 1_000
"""Held keys of one sink in one lane that are listed; with more of them the lane is held as a whole."""
_RUN_BYTES_MAX: Final = 256 * 1024
_CYCLE_BYTES_MAX: Final = 16 * 1024 * 1024
_ERROR_CHARACTERS_MAX: Final = 2_000

_FENCE: Final = f"""
SELECT l.lane, l.epoch FROM {{lease}} l JOIN unnest($1::smallint[], $2::bigint[]) AS own (lane, epoch) USING (lane, epoch)
 WHERE l.owner = $3 AND (SELECT {IDENTITY}) = $4
   FOR SHARE OF l
"""

# One row more than the limit tells that there are too many. Keys are found by the index, row by row: skipping
# from key to key keeps a lane with a million parked rows of few keys cheap.
_HELD: Final = """
WITH RECURSIVE held AS (
    SELECT s.sink, l.lane, (SELECT min(p.key) FROM {parked} p WHERE p.sink = s.sink AND p.lane = l.lane) AS key, 1 AS n
      FROM unnest($1::text[]) AS s (sink), unnest($2::smallint[]) AS l (lane)
     UNION ALL
    SELECT h.sink, h.lane, (SELECT min(p.key) FROM {parked} p
                             WHERE p.sink = h.sink AND p.lane = h.lane AND p.key > h.key), h.n + 1
      FROM held h WHERE h.key IS NOT NULL AND h.n <= $3
)
SELECT sink, lane, key FROM held WHERE key IS NOT NULL
 UNION
SELECT sink, lane, key FROM {dead_letter} WHERE holds AND lane = ANY($2::smallint[]) AND sink = ANY($1::text[])
"""

# A row becomes the head of its key (retry_at) if nothing of the key is parked before it, in the table or in this
# batch, and no dead letter holds the key; otherwise it waits.
_PARK: Final = """
INSERT INTO {parked} (sink, seq, lane, id, topic, key, payload, headers, created_at, stored_at, attempts, last_error, retry_at)
SELECT $1, e.seq, e.lane, e.id, e.topic, e.key, e.payload, e.headers, e.created_at, e.stored_at, e.attempts, e.error,
       CASE WHEN e.key IS NULL
              OR (row_number() OVER (PARTITION BY e.lane, e.key ORDER BY e.nth) = 1
                  AND NOT EXISTS (SELECT FROM {parked} p WHERE p.sink = $1 AND p.lane = e.lane AND p.key = e.key)
                  AND NOT EXISTS (SELECT FROM {dead_letter} d
                                   WHERE d.holds AND d.sink = $1 AND d.lane = e.lane AND d.key = e.key))
            THEN clock_timestamp() + make_interval(secs => e.delay) END
  FROM unnest($2::bigint[], $3::smallint[], $4::uuid[], $5::text[], $6::text[], $7::bytea[], $8::text[],
              $9::timestamptz[], $10::timestamptz[], $11::int[], $12::text[], $13::float8[]) WITH ORDINALITY
       AS e (seq, lane, id, topic, key, payload, headers, created_at, stored_at, attempts, error, delay, nth)
 ORDER BY e.nth
    ON CONFLICT (sink, seq) DO NOTHING
"""

_BURY: Final = """
INSERT INTO {dead_letter} (sink, seq, lane, id, topic, key, payload, headers, created_at, stored_at, attempts, kind, reason, holds)
SELECT e.sink, e.seq, e.lane, e.id, e.topic, e.key, e.payload, e.headers, e.created_at, e.stored_at, e.attempts,
       e.kind, e.reason, e.holds
  FROM unnest($1::text[], $2::bigint[], $3::smallint[], $4::uuid[], $5::text[], $6::text[], $7::bytea[], $8::text[],
              $9::timestamptz[], $10::timestamptz[], $11::int[], $12::text[], $13::text[], $14::boolean[]) WITH ORDINALITY
       AS e (sink, seq, lane, id, topic, key, payload, headers, created_at, stored_at, attempts, kind, reason, holds, nth)
 ORDER BY e.nth
    ON CONFLICT (sink, seq) DO NOTHING
"""

# Heads whose time has come, oldest first, and behind each head the rows of its key. A row is a head only if it is
# its key's first; bytes are summed without reading the payloads (octet_length of a bytea is in its header). After an
# outage every lane may have a hundred thousand due heads: each lane is read by its index in order, no further than a
# part of what is asked for. `sink || ''` is what that index has and the one by key has not: with statistics of an empty
# table the planner would take that one, and go through everything that is parked.
_DUE: Final = """
WITH due AS (
    SELECT d.number, d.lane, d.key, d.retry_at, sum(d.size) OVER (ORDER BY d.retry_at, d.number) - d.size AS bytes_before
      FROM (SELECT first.* FROM unnest($2::smallint[]) AS l (lane)
             CROSS JOIN LATERAL (
                   SELECT p.number, p.lane, p.key, p.retry_at, coalesce(octet_length(p.payload), 0) AS size
                     FROM {parked} p
                    WHERE p.lane = l.lane AND p.sink || '' = $1 AND p.retry_at <= statement_timestamp()
                      AND (p.key IS NULL OR NOT EXISTS (
                           SELECT FROM {parked} b
                            WHERE b.sink = p.sink AND b.lane = p.lane AND b.key = p.key AND b.number < p.number))
                    ORDER BY p.retry_at LIMIT greatest($3::int / 8, 1)) first
             ORDER BY first.retry_at, first.number LIMIT $3) d
), head AS (
    SELECT * FROM due WHERE bytes_before <= $5
), run AS (
    SELECT h.number AS head, h.retry_at AS head_at, r.number, r.size,
           sum(r.size) OVER (PARTITION BY h.number ORDER BY r.number) AS bytes,
           count(*) OVER (PARTITION BY h.number) AS rows_found
      FROM head h
     CROSS JOIN LATERAL (
           SELECT f.number, coalesce(octet_length(f.payload), 0) AS size FROM {parked} f
            WHERE f.sink = $1 AND f.lane = h.lane AND f.key = h.key AND f.number >= h.number
            ORDER BY f.number LIMIT $4 + 2) r
     WHERE h.key IS NOT NULL
     UNION ALL
    SELECT number, retry_at, number, 0, 0, 1 FROM head WHERE key IS NULL
), chosen AS (
    SELECT head, head_at, number, rows_found, row_number() OVER (PARTITION BY head ORDER BY number) AS nth
      FROM run WHERE number = head OR bytes <= $6
)
SELECT c.head, c.rows_found, p.number, p.seq, p.lane, p.id::text AS id, p.topic, p.key, p.payload, p.headers,
       p.created_at, p.stored_at, p.attempts
  FROM chosen c JOIN {parked} p USING (number)
 WHERE c.nth <= $4 + 1
 ORDER BY c.head_at, c.head, p.number
"""

_NEXT_DUE: Final = """
SELECT extract(epoch FROM min(p.retry_at) - clock_timestamp())::float8 AS seconds
  FROM unnest($2::smallint[]) AS l (lane)
 CROSS JOIN LATERAL (SELECT retry_at FROM {parked} WHERE lane = l.lane AND sink || '' = $1 AND retry_at IS NOT NULL
                      ORDER BY retry_at LIMIT 1) p
"""

_DELETE: Final = "DELETE FROM {parked} WHERE number = ANY($1::bigint[])"

_FAIL: Final = """
UPDATE {parked} p SET attempts = f.attempts, last_error = f.error, retry_at = clock_timestamp() + make_interval(secs => f.delay)
  FROM unnest($1::bigint[], $2::int[], $3::text[], $4::float8[]) AS f (number, attempts, error, delay)
 WHERE p.number = f.number
"""

# A delivery keeps its number when it dies, so that a retry puts it back before what waited behind it.
_BURY_PARKED: Final = """
WITH gone AS (
    DELETE FROM {parked} p USING unnest($1::bigint[], $2::int[], $3::text[], $4::text[], $5::boolean[])
              AS b (number, attempts, kind, reason, holds)
     WHERE p.number = b.number
 RETURNING p.number, p.sink, p.seq, p.lane, p.id, p.topic, p.key, p.payload, p.headers, p.created_at, p.stored_at,
           b.attempts, b.kind, b.reason, b.holds
)
INSERT INTO {dead_letter} (number, sink, seq, lane, id, topic, key, payload, headers, created_at, stored_at, attempts, kind, reason, holds)
SELECT number, sink, seq, lane, id, topic, key, payload, headers, created_at, stored_at, attempts, kind, reason, holds FROM gone
    ON CONFLICT (sink, seq) DO NOTHING
"""

# The first row that is left of each key becomes its head, unless a dead letter before it holds the key. Returns the
# keys that are still held: by rows, or by a dead letter.
_PROMOTE: Final = """
WITH keys AS (
    SELECT DISTINCT * FROM unnest($2::smallint[], $3::text[]) AS k (lane, key)
), state AS (
    SELECT k.lane, k.key, first.number,
           EXISTS (SELECT FROM {dead_letter} d WHERE d.holds AND d.sink = $1 AND d.lane = k.lane AND d.key = k.key
                      AND d.number < coalesce(first.number, d.number + 1)) AS behind
      FROM keys k
     CROSS JOIN LATERAL (SELECT min(p.number) AS number FROM {parked} p
                          WHERE p.sink = $1 AND p.lane = k.lane AND p.key = k.key) first
), promoted AS (
    UPDATE {parked} p SET retry_at = clock_timestamp() FROM state s
     WHERE p.number = s.number AND NOT s.behind AND p.retry_at IS NULL
)
SELECT lane, key FROM state WHERE number IS NOT NULL OR behind
"""


class PostgresParking:
    """`relay.store.ParkingStore` for one pod. `sinks` are the configured names."""

    def __init__(self, pool: Pool, names: Names, pod: str, sinks: Iterable[str], settler: PostgresSettler) -> None:
        self._pool, self._pod, self._sinks, self._settler = pool, pod, list(sinks), settler
        self._fence_sql, self._held_sql = names.format(_FENCE), names.format(_HELD)
        self._park_sql, self._bury_sql = names.format(_PARK), names.format(_BURY)
        self._due_sql, self._next_due_sql = names.format(_DUE), names.format(_NEXT_DUE)
        self._delete_sql, self._fail_sql = names.format(_DELETE), names.format(_FAIL)
        self._bury_parked_sql, self._promote_sql = names.format(_BURY_PARKED), names.format(_PROMOTE)

    async def held(self, leases: Sequence[Lease]) -> Sequence[HeldKey]:
        """Held keys by sink and lane; one entry without a key for a lane that has too many."""
        rows = await self._pool.fetch(self._held_sql, self._sinks, [lease.lane for lease in leases], _KEYS_MAX)
        keys: dict[tuple[str, int], list[str]] = {}
        for row in rows:
            keys.setdefault((row["sink"], row["lane"]), []).append(row["key"])
        return [
            HeldKey(sink, lane, key)
            for (sink, lane), found in keys.items()
            for key in (found if len(found) <= _KEYS_MAX else [None])
        ]

    async def park(self, sink: str, entries: Sequence[Parked], settle: Sequence[Message]) -> None:
        """Park and settle in one transaction."""
        messages = [entry.message for entry in entries]
        async with self._fenced(_leases(messages)) as connection:
            await connection.execute(
                self._park_sql,
                sink,
                *_columns(messages),
                [entry.attempts for entry in entries],
                [_clean(entry.error) for entry in entries],
                [entry.delay_seconds for entry in entries],
            )
            if settle:
                await self._settler.settle_within(connection, settle)

    async def bury(self, entries: Sequence[Burial], settle: Sequence[Message]) -> None:
        """Write dead letters and settle in one transaction."""
        messages = [entry.message for entry in entries]
        async with self._fenced(_leases(messages)) as connection:
            await connection.execute(
                self._bury_sql,
                [entry.sink for entry in entries],
                *_columns(messages),
                [entry.attempts for entry in entries],
                [entry.kind for entry in entries],
                [_clean(entry.reason) for entry in entries],
                [entry.holds for entry in entries],
            )
            if settle:
                await self._settler.settle_within(connection, settle)

    async def due(self, sink: str, leases: Sequence[Lease], heads: int, followers: int) -> Sequence[ParkedRun]:
        """Runs whose head's time has come."""
        by_lane = {lease.lane: lease for lease in leases}
        rows = await self._pool.fetch(
            self._due_sql, sink, list(by_lane), heads, followers, _CYCLE_BYTES_MAX, _RUN_BYTES_MAX
        )
        runs = []
        for _, group in groupby(rows, key=lambda row: row["head"]):
            run = list(group)
            messages = [_message(row, by_lane[row["lane"]]) for row in run]
            runs.append(ParkedRun(messages, complete=len(run) == run[0]["rows_found"]))
        return runs

    async def finish(self, sink: str, results: Sequence[RunResult]) -> set[tuple[int, str | None]]:
        """Delete, retry or bury rows, and promote the next ones, in one transaction."""
        if not results:
            return set()
        confirmed = [message.parked for result in results for message in result.confirmed]
        failed = [result for result in results if result.failed is not None and result.burial is None]
        buried = [burial for result in results if (burial := result.burial)]
        keyed = [result for result in results if result.key is not None]
        async with self._fenced(_unique(result.lease for result in results)) as connection:
            if confirmed:
                await connection.execute(self._delete_sql, confirmed)
            if failed:
                await connection.execute(self._fail_sql, *_failures(failed))
            if buried:
                await connection.execute(self._bury_parked_sql, *_burials(buried))
            rows = await connection.fetch(
                self._promote_sql, sink, [result.lease.lane for result in keyed], [result.key for result in keyed]
            )
        return {(row["lane"], row["key"]) for row in rows}

    async def next_due(self, sink: str, leases: Sequence[Lease]) -> float | None:
        """Seconds until the first head of these lanes is due."""
        (row,) = await self._pool.fetch(self._next_due_sql, sink, [lease.lane for lease in leases])
        return None if row["seconds"] is None else max(row["seconds"], 0.0)

    @asynccontextmanager
    async def _fenced(self, leases: Sequence[Lease]) -> AsyncIterator[Connection]:
        async with self._pool.transaction() as connection:
            own = await connection.fetch(
                self._fence_sql, [le.lane for le in leases], [le.epoch for le in leases], self._pod, leases[0].server
            )
            kept = {(row["lane"], row["epoch"]) for row in own}
            lost = [le.lane for le in leases if (le.lane, le.epoch) not in kept or le.server != leases[0].server]
            if lost:
                raise LeaseLost(lost)
            yield connection


def _unique(leases: Iterable[Lease]) -> list[Lease]:
    return list({id(lease): lease for lease in leases}.values())


def _leases(messages: Sequence[Message]) -> list[Lease]:
    return _unique(message.lease for message in messages if message.lease is not None)


def _columns(messages: Sequence[Message]) -> tuple[list[Any], ...]:
    return (
        [m.seq for m in messages],
        [m.lane for m in messages],
        [m.id for m in messages],
        [m.topic for m in messages],
        [m.key for m in messages],
        [m.payload for m in messages],
        [m.headers for m in messages],
        [m.created_at for m in messages],
        [m.stored_at for m in messages],
    )


def _failures(results: Sequence[RunResult]) -> tuple[list[Any], ...]:
    return (
        [result.failed.parked for result in results if result.failed],
        [result.attempts for result in results],
        [_clean(result.error) for result in results],
        [result.delay_seconds for result in results],
    )


def _burials(burials: Sequence[Burial]) -> tuple[list[Any], ...]:
    return (
        [burial.message.parked for burial in burials],
        [burial.attempts for burial in burials],
        [burial.kind for burial in burials],
        [_clean(burial.reason) for burial in burials],
        [burial.holds for burial in burials],
    )


def _message(row: asyncpg.Record, lease: Lease) -> Message:
    payload, headers = row["payload"], row["headers"]
    return Message(
        seq=row["seq"],
        id=row["id"],
        topic=row["topic"],
        key=row["key"],
        payload=payload,
        headers=headers,
        created_at=row["created_at"],
        stored_at=row["stored_at"],
        lane=row["lane"],
        destination=row["topic"],
        lease=lease,
        parked=row["number"],
        attempts=row["attempts"],
        size=len(payload or b"") + len(headers or ""),
    )


def _clean(text: str | None) -> str | None:
    """A broker's words may hold what a text column refuses: NUL, lone surrogates (FIELD.md A1)."""
    if text is None:
        return None
    return text[:_ERROR_CHARACTERS_MAX].replace("\0", "\ufffd").encode("utf-8", "replace").decode()
