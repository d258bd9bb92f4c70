"""One round as bytes: which messages it carries, in which transactions, and which ones are refused before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from relay.sink import rejected
from relay.sinks.redis.encoding import EXEC, MULTI, xadd, xadd_start
from relay.sinks.redis.replies import reply_count
from relay.sinks.redis.rounds import next_round

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.sinks.redis.attempt import Attempt
    from relay.types import Message

__all__ = ["ROUND_BYTES_MAX", "Request", "build"]

ROUND_BYTES_MAX: Final = 1024 * 1024
"""The smallest that an operator can make `proto-max-bulk-len` and `client-query-buffer-limit`.

A server answers more than those allow by ending the connection, often without a word. What fits into this
many bytes passes everywhere; a larger message travels alone, so that it is known which one was not welcome.
"""


@dataclass(frozen=True, slots=True)
class Request:
    """What is written at once: `groups` are the indexes of each transaction's messages, `data` their commands."""

    groups: list[list[int]]
    data: bytes

    @property
    def replies(self) -> int:
        """How many replies it has."""
        return sum(reply_count(len(group)) for group in self.groups)

    @property
    def large_message(self) -> int | None:
        """The index of its only message, if that is larger than what passes everywhere."""
        return self.groups[0][0] if len(self.data) > ROUND_BYTES_MAX and self._is_single else None

    @property
    def _is_single(self) -> bool:
        return len(self.groups) == 1 and len(self.groups[0]) == 1


def build(
    attempt: Attempt, pending: Sequence[int], *, maxlen: int | None, value_bytes_max: int, round_bytes: int
) -> Request:
    """The next round of an attempt; records what is rejected on the way, so it may be empty.

    It has `round_bytes` at most, or one larger message.

    Any prefix of a stream's messages may go, because no key of theirs goes to another stream in this round.
    """
    groups: list[list[int]] = []
    parts: list[bytes] = []
    room = round_bytes
    for stream, indexes in next_round(attempt.batch, pending).items():
        builder = _Transaction(attempt, stream, maxlen, value_bytes_max)
        room = builder.fill(indexes, room, is_first=not groups)
        if builder.indexes:
            groups.append(builder.indexes)
            parts += builder.commands if len(builder.indexes) == 1 else (MULTI, *builder.commands, EXEC)
        if room <= 0:
            break
    return Request(groups, b"".join(parts))


class _Transaction:
    """The commands for one stream."""

    def __init__(self, attempt: Attempt, stream: str, maxlen: int | None, value_bytes_max: int) -> None:
        self.indexes: list[int] = []
        self.commands: list[bytes] = []
        self._attempt = attempt
        self._value_bytes_max = value_bytes_max
        self._start: tuple[int, bytes] | None
        try:
            self._start = xadd_start(stream, maxlen)
        except UnicodeEncodeError:
            self._start = None

    def fill(self, indexes: Sequence[int], room: int, *, is_first: bool) -> int:
        """Add messages until the round is full; the room that is left, 0 or less when it is full."""
        attempt, batch, held = self._attempt, self._attempt.batch, self._attempt.held
        for index in indexes:
            message = batch[index]
            if held and message.key in held:
                continue
            encoded = self._encode(message)
            size = 0 if encoded is None else len(encoded)
            if encoded is None:
                attempt.record(index, rejected("its stream or key is not Unicode text"))
            elif size > self._value_bytes_max and (reason := _too_large(message, self._value_bytes_max)):
                attempt.record(index, rejected(reason))
            elif size > room and (self.indexes or not is_first):
                return 0  # something is in the round already: this one begins the next
            else:
                self.indexes.append(index)
                self.commands.append(encoded)
                room -= size
        return room

    def _encode(self, message: Message) -> bytes | None:
        try:
            return None if self._start is None else xadd(self._start, message)
        except UnicodeEncodeError:
            return None


def _too_large(message: Message, limit: int) -> str | None:
    for name, value in (("payload", message.payload), ("headers", message.headers), ("key", message.key)):
        size = 0 if value is None else len(value if isinstance(value, bytes) else value.encode())
        if size > limit:
            return f"{name} of {size} bytes is over the limit of {limit}"
    return None
