"""The events that are measured: about 200 bytes of JSON, a key out of 1,000, two headers.

Rows are made by the server in one DO block that commits as it goes, because only how they were inserted
(one transaction each, or 1,000 rows in one) shows in the table, not who sent them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from relay.database.names import Names

if TYPE_CHECKING:
    import asyncpg

__all__ = ["HEADERS", "SHAPES", "TOPIC", "Shape", "Workload", "fill", "fill_script", "insert_script", "payload"]

Shape = Literal["single", "batched"]
SHAPES: Final[tuple[Shape, ...]] = ("single", "batched")
TOPIC: Final = "bench"

_ROWS_BATCHED: Final = 1_000
_PAYLOAD: Final = (
    '{"order": %s, "customer": "customer-%s", "amount": "129.90", "currency": "EUR", '
    '"items": [{"sku": "A-1001", "count": 2}, {"sku": "B-2002", "count": 1}], '
    '"note": "leave it with the neighbours, please"}'
)
HEADERS: Final = '{"tenant": "t-17", "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}'


def payload(number: int) -> str:
    """JSON of about 200 bytes."""
    return _PAYLOAD % (number, number % 1000)


def _payload_sql(number: str) -> str:
    """The same as an SQL expression."""
    return "('" + _PAYLOAD % (f"' || {number} || '", f"' || {number} % 1000 || '") + "')::json"


@dataclass(frozen=True, slots=True)
class Workload:
    """What the outbox holds before a drain. `lanes`: only keys of so many lanes are used, of 64."""

    events: int
    shape: Shape = "batched"
    keys: int = 1_000
    lanes: int = 64
    topic: str = TOPIC


def fill_script(workload: Workload) -> str:
    """One DO block, to be executed outside of a transaction."""
    rows = 1 if workload.shape == "single" else _ROWS_BATCHED
    return f"""
DO $bench$
DECLARE
    keys text[] := (SELECT array_agg(key) FROM (
        SELECT 'customer-' || g AS key FROM generate_series(1, {workload.keys * 64 // workload.lanes * 2}) g
         WHERE hashtextextended(('customer-' || g) COLLATE "C", 0) & 63 < {workload.lanes}
         LIMIT {workload.keys}) k);
    used int := array_length(keys, 1);
BEGIN
    FOR begins IN 0 .. {workload.events - 1} BY {rows} LOOP
        INSERT INTO {Names().outbox} (topic, key, payload, headers)
        SELECT '{workload.topic}', keys[1 + n * 7919::bigint % used], {_payload_sql("n")}, '{HEADERS}'
          FROM generate_series(begins, least(begins + {rows}, {workload.events}) - 1) n;
        COMMIT;
    END LOOP;
END $bench$
"""


async def fill(connection: asyncpg.Connection, workload: Workload) -> None:
    """Put the events into an empty outbox, and leave it as autovacuum would: frozen hint bits favour nobody."""
    await connection.execute(fill_script(workload), timeout=None)
    await connection.execute("VACUUM (ANALYZE)", timeout=None)
    await connection.execute("CHECKPOINT", timeout=None)


def insert_script(topic: str = TOPIC) -> str:
    """One event in one transaction, in pgbench's language; `:n` is a random number."""
    return (
        "\\set n random(1, 1000000000)\n"
        f"INSERT INTO {Names().outbox} (topic, key, payload, headers) "
        f"VALUES ('{topic}', 'customer-' || :n % 1000, {_payload_sql(':n')}, '{HEADERS}');\n"
    )
