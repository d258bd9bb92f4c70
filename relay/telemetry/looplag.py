"""How late the event loop runs: the first sign of blocking code, and part of liveness.

A short sleep that ends late was kept waiting by something. The metric is the longest delay of the
last 15 seconds, so that a scrape every 15 seconds misses no peak.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from relay.telemetry.health import Health
    from relay.telemetry.metrics import Metrics

__all__ = ["LOOP", "watch_loop_lag"]

LOOP: Final = "event loop"
"""Name of this loop in `Health`."""

_INTERVAL_SECONDS: Final = 0.5  # two wake-ups a second are below 0.01 % of a core
_SAMPLES: Final = 30
_SILENCE_SECONDS: Final = 30.0


async def watch_loop_lag(metrics: Metrics, health: Health) -> None:
    """Sample until cancelled."""
    loop = asyncio.get_running_loop()
    lags: deque[float] = deque(maxlen=_SAMPLES)
    with health.running(LOOP, _SILENCE_SECONDS):
        while True:
            due = loop.time() + _INTERVAL_SECONDS
            await asyncio.sleep(_INTERVAL_SECONDS)
            lags.append(max(0.0, loop.time() - due))
            metrics.loop_lag.set(max(lags))
            health.beat(LOOP)
