"""The null sink: confirms everything at once and keeps nothing. For benches, and to drain an outbox on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, Field

from relay.config.models import Section
from relay.sink import CONFIRMED, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.types import Message

__all__ = ["NullOptions", "NullSink"]


class NullOptions(Section):
    """Options of a null sink."""

    concurrency: int = Field(1, ge=1, le=64, description="batches in flight at once; there is nothing to wait for")


class NullSink:
    """A sink that nobody reads. Keeps no message and does no I/O; never fails."""

    Options: ClassVar[type[BaseModel]] = NullOptions

    def __init__(self, name: str, options: NullOptions) -> None:
        self.name = name
        self._options = options

    @property
    def concurrency(self) -> int:
        """How many batches may be in flight."""
        return self._options.concurrency

    async def open(self) -> None:
        """Nothing to open."""

    async def ping(self) -> None:
        """Always there."""

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        """Confirm each message without a look at it."""
        return [CONFIRMED] * len(batch)

    async def close(self) -> None:
        """Nothing to close."""
