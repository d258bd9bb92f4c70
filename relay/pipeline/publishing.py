"""One call to a sink, made safe: whatever a sink does, each message gets exactly one outcome.

A sink that raises, hangs or returns the wrong number of outcomes breaks its contract. The batch is
then tried again in halves until the messages that provoke it stand alone, so that a bug in one
event's encoding stays that event's problem (promise 4).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from relay.sink import CONFIRMED, DEFERRED, Outcome, Sink, unavailable
from relay.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.types import Message

__all__ = ["all_confirmed", "publish"]

_HANG_SECONDS: Final = 300.0
"""A sink has its own deadline; this only ends what would otherwise never end."""

_log = get_logger(__name__)


def all_confirmed(outcomes: Sequence[Outcome]) -> bool:
    """The ordinary case, checked without a loop in Python."""
    return list(outcomes).count(CONFIRMED) == len(outcomes)


async def publish(name: str, sink: Sink, batch: Sequence[Message]) -> Sequence[Outcome]:
    """Outcomes of a batch, never an exception other than a cancellation."""
    try:
        async with asyncio.timeout(_HANG_SECONDS):
            outcomes = await sink.publish(batch)
    except TimeoutError:
        return [unavailable(f"no answer within {_HANG_SECONDS:.0f} s", sink_down=True)] * len(batch)
    except Exception as error:  # noqa: BLE001  # a sink may come from a third party: its bugs must not stop the relay
        _log.error("sink raised instead of returning outcomes", sink=name, events=len(batch), error=repr(error)[:500])
        return await _in_halves(name, sink, batch, f"{type(error).__name__} in the sink")
    if len(outcomes) != len(batch):
        _log.error("sink returned a wrong number of outcomes", sink=name, events=len(batch), outcomes=len(outcomes))
        return await _in_halves(name, sink, batch, "wrong number of outcomes from the sink")
    return outcomes


async def _in_halves(name: str, sink: Sink, batch: Sequence[Message], reason: str) -> list[Outcome]:
    if len(batch) == 1:
        return [unavailable(reason)]
    middle = len(batch) // 2
    first = list(await publish(name, sink, batch[:middle]))
    failed = {m.key for m, outcome in zip(batch, first, strict=False) if outcome is not CONFIRMED and m.key is not None}
    rest = batch[middle:]
    sendable = [message for message in rest if message.key not in failed]
    second = iter(await publish(name, sink, sendable) if sendable else ())
    return first + [DEFERRED if message.key in failed else next(second) for message in rest]
