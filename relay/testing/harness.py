"""What a sink's tests supply to the contract suite: how to make it, read behind its back, and break its broker.

Everything that not every broker can do has a default that says so, and the tests that need it are skipped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relay.headers import decode
from relay.timestamps import rfc3339

if TYPE_CHECKING:
    from relay.sink import Sink
    from relay.types import Message

__all__ = ["Harness", "Received"]


@dataclass(frozen=True, slots=True)
class Received:
    """One message as a consumer that knows nothing of the relay sees it.

    `payload`     bytes as they were on the wire; None for a tombstone, which must differ from b""
    `headers`     the event's own headers by the rule of docs/headers.md; none at all is {}
    `created_at`  RFC 3339 text, or "infinity"
    """

    id: str
    key: str | None
    payload: bytes | None
    headers: dict[str, str | None]
    created_at: str


class Harness(ABC):
    """One sink's side of the contract suite. A fixture `harness` yields one, fresh for each test."""

    deadline_seconds: float = 2.0
    """Deadline of one `publish` of the sinks that `make` makes: short, because tests wait for it."""

    secrets: tuple[str, ...] = ()
    """Texts that must never appear in a reason or an error: the passwords that the harness uses."""

    keeps_messages: bool = False
    """True for a sink that holds messages on purpose, like the in-memory one."""

    payload_bytes_max: int = 900_000
    """Largest payload that the tests send where size is not the point."""

    @abstractmethod
    def make(self) -> Sink:
        """A new sink, not opened, whose connections pass the place where `cut` and the like act."""

    @abstractmethod
    async def destination(self) -> str:
        """A new, empty destination that takes messages."""

    @abstractmethod
    async def read(self, destination: str, count: int) -> list[Received]:
        """All messages of a destination in order, read from its beginning by an independent consumer.

        Waits (a few seconds at most) until there are `count`, then returns all there are; never through
        the sink, never through the broken path.
        """

    def expected(self, message: Message) -> Received:
        """What a consumer must see of a message. Override only what the broker cannot carry, and document it."""
        return Received(message.id, message.key, message.payload, decode(message.headers), rfc3339(message.created_at))

    # --- What not every broker can do: leave the default, and the tests that need it are skipped. ---

    def rejected_message(self, destination: str, key: str | None) -> Message | None:
        """A message that this sink can never deliver (too large, say)."""
        del destination, key
        return None

    async def faulty_destination(self) -> str | None:
        """A destination that fails by its own fault (missing, wrong type, denied) while the broker is well."""
        return None

    def make_with_wrong_password(self) -> Sink | None:
        """A sink whose credentials the broker refuses; put the wrong password into `secrets`."""
        return None

    can_break: bool = False
    """True when the methods below work."""

    async def cut(self) -> None:
        """End every connection to the broker and refuse new ones until `heal`."""
        raise NotImplementedError

    async def swallow_replies(self) -> None:
        """What the sink sends arrives; no answer comes back, on old and new connections, until `heal`."""
        raise NotImplementedError

    async def stall(self) -> None:
        """The broker's side stops reading: sent bytes stay where they are, until `heal` lets them go on."""
        raise NotImplementedError

    async def heal(self) -> None:
        """End every fault: connections work again. What `stall` held is passed on, now or a little later."""
        raise NotImplementedError

    async def held_bytes_passed(self) -> None:  # noqa: B027 - for most brokers there is nothing to wait for
        """Wait until what `stall` held has reached the broker, or its connection is gone."""
