"""Asking each sink whether it would take messages now, all at once and bounded in time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from relay.errors import RelayError, StopError
from relay.redaction import redact
from relay.sinks import registry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relay.config import SinkSection

__all__ = ["Ping", "ping_all"]

_TIMEOUT_SECONDS: Final = 10.0


@runtime_checkable
class Advising(Protocol):
    """A sink that knows settings of its broker that lose events sooner or later."""

    async def advice(self) -> list[str]:
        """One sentence for each such setting."""


@dataclass(frozen=True)
class Ping:
    """What a sink said. `problem` None: it would take messages. `hint` is there when an operator has to act."""

    name: str
    type: str
    seconds: float
    problem: str | None = None
    hint: str = ""
    advice: tuple[str, ...] = ()
    """What the sink says against the broker's settings, though it takes messages."""

    @property
    def up(self) -> bool:
        """Whether it would take messages."""
        return self.problem is None


async def ping_all(sinks: Mapping[str, SinkSection]) -> list[Ping]:
    """One answer for each sink, in order; raises nothing for a sink that is wrong or down."""
    return list(await asyncio.gather(*(_ping(name, section) for name, section in sinks.items())))


async def _ping(name: str, section: SinkSection) -> Ping:
    started = time.monotonic()

    advice: tuple[str, ...] = ()

    def answer(problem: str | None = None, hint: str = "") -> Ping:
        return Ping(name, section.type, time.monotonic() - started, problem and redact(problem), hint, advice)

    try:
        sink = registry.create(name, section)
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                await sink.open()
                await sink.ping()
                if isinstance(sink, Advising):
                    advice = tuple(await sink.advice())
        finally:
            await sink.close()
    except StopError as error:
        return answer(str(error), error.hint)
    except RelayError as error:
        return answer(str(error))
    except TimeoutError:
        return answer(f"no answer within {_TIMEOUT_SECONDS:g} s")
    except Exception as error:  # noqa: BLE001  # a sink from another package may raise anything
        return answer(f"{type(error).__name__}: {error}")
    return answer()
