"""The downstream team's side: a plain Redis client that reads the stream and knows nothing of the relay."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any, Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import TimeoutError as NoAnswer

from relay.demo.tally import Arrival

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Consumer"]

_BLOCK_MS: Final = 200
_COUNT: Final = 500
_PAUSE_SECONDS: Final = 0.02  # between two attempts to reach a broker that is down


class Consumer:
    """Reads a stream from its first entry on, through any outage of the broker."""

    def __init__(self, url: str, stream: str, on_arrival: Callable[[Arrival], None]) -> None:
        self._client = Redis.from_url(
            url,
            protocol=2,
            decode_responses=True,
            # The client would retry in silence with pauses of its own, up to seconds.
            retry=Retry(NoBackoff(), 0),
            # With a timeout it sends through asyncio.wait_for, which before Python 3.12 loses a cancellation that
            # comes as the bytes leave: this consumer would then read on for ever.
            socket_timeout=None,
        )
        self._stream, self._on_arrival = stream, on_arrival
        self._last = "0-0"

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            try:
                await self._read(block=_BLOCK_MS)
            except (NotConnected, NoAnswer, OSError):
                await asyncio.sleep(_PAUSE_SECONDS)

    async def read_to_end(self) -> None:
        """Read what is left in the stream, once nobody writes any more. Raises when the broker is down."""
        while await self._read(block=None):
            pass

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()

    async def _read(self, block: int | None) -> int:
        streams: Any = await self._client.xread({self._stream: self._last}, count=_COUNT, block=block)
        arrived_at = time.time()
        entries = [entry for _name, entries in streams for entry in entries]
        for position, fields in entries:
            self._last = position
            order = json.loads(fields["payload"])
            arrival = Arrival(fields["id"], order["customer"], order["number"], order["committed_at"], arrived_at)
            self._on_arrival(arrival)
        return len(entries)
