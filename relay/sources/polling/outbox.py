"""Reading the outbox by lane: one statement, one snapshot, index range scans only.

The statement's last row is not an event: it carries the sequence's last number, the server's identity and
the WAL positions, so that a read is one round trip. Rows of asynchronous commits are visible before
they are durable, so nothing is handed on before the WAL is flushed up to where the read was
(PROTOCOLS.md rule 10b); a flush is forced only when nobody else has caused one.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from relay.database.session import IDENTITY
from relay.errors import SourceUnavailable
from relay.sources.polling.contracts import Mark, Page
from relay.types import TIMESTAMP_INFINITY, TIMESTAMP_MINUS_INFINITY, Message

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    import asyncpg

    from relay.config import Database
    from relay.database.names import Names
    from relay.database.pool import Pool
    from relay.sources.polling.contracts import Cursor
    from relay.types import Lease

__all__ = ["PostgresOutbox"]

_WITHHELD_BYTES: Final = 32_768
"""A larger payload comes on its own: a read of 2,000 rows stays below 64 MB whatever they hold."""
_OVERHEAD_BYTES: Final = 600
"""What a message costs in memory besides its payload and headers."""
_MARK_LANE: Final = -1
_LANE: Final = attrgetter("lane")
_SEQ: Final = attrgetter("seq")

# The size of a payload is what is stored, without reading it; but a compressed one may hold a hundred times that.
#
# As integers from the server: a codec in Python costs a call for each value. date_part is a double, exact to the
# microsecond for two centuries around the epoch; what lies outside is exact by numeric arithmetic, or infinite.
_MICROSECONDS: Final = """
       CASE WHEN {0} > '1900-01-01' AND {0} < '2100-01-01' THEN (date_part('epoch', {0}) * 1000000)::bigint
            WHEN isfinite({0}) THEN (extract(epoch FROM {0}) * 1000000)::bigint
            WHEN {0} > 'epoch' THEN 9223372036854775807 ELSE -9223372036854775808 END"""

# Of one lane, but not said with `lane = ...`: then the primary key would give the same order, and statistics of one hot
# key promise rows of every lane right at its start. Each empty lane would walk over the whole backlog.
#
# And of a lane that is still ours in the snapshot of the read: a new owner that has parked an event has settled its row,
# and whoever reads without it would send the next one of its key too early (PROTOCOLS.md rule 2). The clock does not
# tell: others take this pod for dead as soon as its session ends.
#
# Before its first use a sequence shows the number that it *will* give out: is_called tells.
_COLUMNS: Final = f"""
SELECT o.seq, o.lane, o.id::text, o.topic, o.key,
       CASE WHEN o.bytes <= {_WITHHELD_BYTES} THEN o.payload{{as_text}} END AS payload,
       o.headers::text, {_MICROSECONDS.format("o.created_at")}, (date_part('epoch', o.stored_at) * 1000000)::bigint,
       CASE WHEN o.bytes > {_WITHHELD_BYTES} THEN o.bytes END AS withheld
"""

_SIZED: Final = """
       SELECT *, CASE WHEN pg_column_compression(payload) IS NULL THEN pg_column_size(payload)
                      ELSE octet_length(payload{as_text}) END AS bytes
         FROM {outbox}
"""

_MARK: Final = f"""
 UNION ALL
SELECT last_value - (NOT is_called)::int, {_MARK_LANE}::smallint, {IDENTITY}, pg_current_wal_insert_lsn()::text,
       (pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn())::text, NULL, NULL, NULL,
       (date_part('epoch', clock_timestamp()) * 1000000)::bigint, NULL
  FROM {{outbox_seq}}
"""

_READ: Final = f"""
{_COLUMNS}
  FROM unnest($1::smallint[], $2::bigint[], $3::int[], $4::bigint[]) AS c (lane, floor, rows, epoch)
 CROSS JOIN LATERAL ({_SIZED}
        WHERE (lane, seq) > (c.lane, c.floor) AND lane <= c.lane AND published_at IS NULL{{prune}}
        ORDER BY lane, seq
        LIMIT CASE WHEN (SELECT l.epoch FROM {{lease}} l WHERE l.lane = c.lane) = c.epoch THEN c.rows ELSE 0 END) o
{_MARK}"""

# For a pod that owns all lanes and deletes what it settles: along the primary key, where rows lie side by side. The
# condition on published_at is one that the pending index does not match, or stale statistics could prefer it.
_READ_ALL: Final = f"""
{_COLUMNS}
  FROM ({_SIZED}
        WHERE seq > $3 AND coalesce(published_at, 'infinity') = 'infinity'
        ORDER BY seq
        LIMIT CASE WHEN (SELECT count(*) FROM {{lease}} l
                           JOIN unnest($1::smallint[], $2::bigint[]) AS c (lane, epoch) USING (lane, epoch))
                        = cardinality($1::smallint[]) THEN $4::int ELSE 0 END) o
{_MARK}"""

# Partitions that no number above the floors can be in: those of the past, and those made ahead (PROTOCOLS.md rule 10).
# stored_at is the server's clock; the margins are for a clock that is set, and a lane that is read from its start (also
# after a sweep has found something) looks everywhere.
_PRUNE: Final = " AND stored_at >= $5 AND stored_at <= $6"
_PAST_US: Final = 3_600_000_000
_FUTURE_US: Final = 86_400_000_000

# Null when the WAL has been flushed that far meanwhile: then nothing is written, and the statement costs one round trip.
_FLUSH: Final = """
SELECT CASE WHEN pg_current_wal_flush_lsn() < $1::text::pg_lsn
            THEN pg_logical_emit_message(true, 'outbox-relay flush', '')::text END
"""

_FLUSH_ALL: Final = """
SELECT CASE WHEN pg_current_wal_flush_lsn() < pg_current_wal_insert_lsn()
            THEN pg_logical_emit_message(true, 'outbox-relay flush', '')::text END
"""

# A number means something only on the server that the row was read from.
_PAYLOAD: Final = f"""
SELECT payload{{as_text}} FROM {{outbox}} WHERE seq = $1 AND published_at IS NULL AND (SELECT {IDENTITY}) = $2
"""

# Transactions that may still bring in a number: whoever inserts holds this lock from before nextval until its end, also
# when it is prepared. Partitions are locked by name of their own, and the parent with them.
_HOLDERS: Final = """
SELECT DISTINCT virtualtransaction FROM pg_locks
 WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND granted
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND relation IN (SELECT {outbox_literal}::regclass UNION ALL SELECT inhrelid FROM pg_inherits WHERE inhparent = {outbox_literal}::regclass)
"""

_CACHE: Final = "SELECT seqcache = 1 AND seqincrement = 1 AS ordered FROM pg_sequence WHERE seqrelid = {outbox_seq_literal}::regclass"

_BELOW: Final = """
SELECT c.lane, o.seq FROM unnest($1::smallint[], $2::bigint[], $3::int[]) AS c (lane, floor, rows)
 CROSS JOIN LATERAL (
       SELECT seq FROM {outbox} WHERE (lane, seq) <= (c.lane, c.floor) AND lane >= c.lane AND published_at IS NULL
        ORDER BY lane, seq LIMIT c.rows) o
"""


class PostgresOutbox:
    """`relay.sources.polling.contracts.Outbox`."""

    def __init__(self, pool: Pool, names: Names, database: Database) -> None:
        self._pool = pool
        self._bytea = database.payload == "bytea"
        as_text = "" if self._bytea else "::text"
        self._partitioned = database.partitioned
        self._read_sql = names.format(_READ, as_text=as_text, prune=_PRUNE if self._partitioned else "")
        self._read_all_sql = names.format(_READ_ALL, as_text=as_text)
        self._payload_sql = names.format(_PAYLOAD, as_text=as_text)
        self._holders_sql, self._below_sql = names.format(_HOLDERS), names.format(_BELOW)
        self._cache_sql = names.format(_CACHE)
        self._ordered: bool | None = None
        self._server_at = 0

    async def read(self, cursors: Sequence[Cursor], durable: int = 0) -> Page:
        """Unsettled rows above each cursor's floor, in order by lane, once they are durable; none of a lane that is lost."""
        leases = {cursor.lease.lane: cursor.lease for cursor in cursors}
        rows = await self._pool.fetch(
            self._read_sql,
            list(leases),
            [cursor.floor for cursor in cursors],
            [cursor.limit for cursor in cursors],
            [cursor.lease.epoch for cursor in cursors],
            *self._bounds(cursors),
        )
        return await self._page(rows, leases, durable)

    async def read_all(self, leases: Sequence[Lease], floor: int, limit: int, durable: int = 0) -> Page:
        """Unsettled rows of all lanes above one floor, once they are durable."""
        by_lane = {lease.lane: lease for lease in leases}
        rows = await self._pool.fetch(
            self._read_all_sql, list(by_lane), [lease.epoch for lease in leases], floor, limit
        )
        return await self._page(rows, by_lane, durable)

    async def _page(self, rows: Sequence[asyncpg.Record], leases: Mapping[int, Lease], durable: int) -> Page:
        events = [row for row in rows if row[1] != _MARK_LANE]
        mark = next((row for row in reversed(rows) if row[1] == _MARK_LANE), None)
        if mark is None:
            raise SourceUnavailable("the outbox's sequence returned no row")
        if mark[4] == "true" and any(row[0] > durable for row in events):
            await self._pool.fetch(_FLUSH, mark[3])
        self._server_at = mark[8]
        messages = self._messages(events, leases)
        last = max(messages, key=_SEQ, default=None)
        messages.sort(key=_LANE)  # stable: each lane keeps its order
        by_lease: dict[Lease, list[Message]] = {}
        for lane, group in groupby(messages, _LANE):
            by_lease.setdefault(leases[lane], []).extend(group)
        withheld = {row[0]: row[9] for row in events if row[9] is not None}
        return Page(by_lease, Mark(mark[2], mark[0], mark[8]), withheld, last)

    async def payload(self, message: Message) -> bool:
        """Fetch a payload that a read withheld. False: the row is settled or gone, or this is another server."""
        assert message.lease is not None
        rows = await self._pool.fetch(self._payload_sql, message.seq, message.lease.server)
        if not rows:
            return False
        payload = rows[0][0]
        message.payload = payload if payload is None or self._bytea else payload.encode()
        return True

    async def holders(self) -> AbstractSet[str] | None:
        """Virtual transactions that may still insert; None when the sequence does not number in order."""
        if self._ordered is None:
            (row,) = await self._pool.fetch(self._cache_sql)
            self._ordered = row["ordered"]
        if not self._ordered:
            return None
        holders = {row[0] for row in await self._pool.fetch(self._holders_sql)}
        await self._pool.fetch(_FLUSH_ALL)
        return holders

    async def below(self, cursors: Sequence[Cursor]) -> Mapping[Lease, Sequence[int]]:
        """Unsettled numbers up to each floor."""
        leases = {cursor.lease.lane: cursor.lease for cursor in cursors}
        rows = await self._pool.fetch(
            self._below_sql, list(leases), [cursor.floor for cursor in cursors], [cursor.limit for cursor in cursors]
        )
        found: dict[Lease, list[int]] = {}
        for row in rows:
            found.setdefault(leases[row[0]], []).append(row[1])
        return found

    def _bounds(self, cursors: Sequence[Cursor]) -> tuple[int, ...]:
        if not self._partitioned:
            return ()
        since = min(cursor.since for cursor in cursors)
        if since == TIMESTAMP_MINUS_INFINITY:
            return TIMESTAMP_MINUS_INFINITY, TIMESTAMP_INFINITY
        return since - _PAST_US, self._server_at + _FUTURE_US

    def _messages(self, rows: Sequence[asyncpg.Record], leases: Mapping[int, Lease]) -> list[Message]:
        # The hottest lines of the relay: one comprehension, arguments by position.
        if self._bytea:
            return [
                Message(
                    seq, event, topic, key, payload, headers, created, stored, lane, topic, leases[lane], None, 0, None,
                    _OVERHEAD_BYTES + (len(payload) if payload else 0) + (len(headers) if headers else 0),
                )
                for seq, lane, event, topic, key, payload, headers, created, stored, _ in rows
            ]  # fmt: skip
        return [
            Message(
                seq, event, topic, key, None if text is None else text.encode(), headers, created, stored, lane, topic,
                leases[lane], None, 0, None,
                _OVERHEAD_BYTES + (len(text) if text else 0) + (len(headers) if headers else 0),
            )
            for seq, lane, event, topic, key, text, headers, created, stored, _ in rows
        ]  # fmt: skip
