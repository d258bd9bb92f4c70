"""`python -m relay.bench.raw JOB`: read, publish, settle, until SIGTERM. Its own process, as the relay is."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Final

import asyncpg
import orjson

from relay.bench.raw.publishers import publisher

_READ: Final = """
SELECT seq, id::text, key, payload::text, headers::text, created_at::text FROM outbox
 WHERE seq > $1 AND published_at IS NULL ORDER BY seq LIMIT 2000 FOR UPDATE SKIP LOCKED
"""
_SETTLE: Final = {
    "delete": "DELETE FROM outbox WHERE seq = ANY($1::bigint[])",
    "keep": "UPDATE outbox SET published_at = clock_timestamp() WHERE seq = ANY($1::bigint[])",
}
_POLL_SECONDS: Final = 0.001


async def _loop(job: dict[str, Any]) -> None:
    connection = await asyncpg.connect(job["dsn"])
    publish = await publisher(job["sink"], job["options"], job["topic"])
    settle, floor = _SETTLE[job["settle"]], 0
    while True:
        async with connection.transaction():
            if rows := await connection.fetch(_READ, floor):
                await publish(rows)
                await connection.execute(settle, [row[0] for row in rows])
                # Not safe (a late commit has a lower number), but a floor: without it every read would
                # walk over all that is settled.
                floor = rows[-1][0] if len(rows) > 1_000 else floor  # noqa: PLR2004
        if not rows:
            await asyncio.sleep(_POLL_SECONDS)


def _main() -> None:
    import uvloop  # noqa: PLC0415  # the relay uses it too

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_loop(orjson.loads(sys.argv[1])))


_main()
