"""What is known so far about each message of one batch, while its rounds go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from relay.sink import CONFIRMED, Outcome
from relay.sinks.redis.replies import all_confirmed, read_group, reply_count
from relay.sinks.redis.rounds import defer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.types import Message

__all__ = ["Attempt"]


class Attempt:
    """The outcomes of one batch as they become known. Holds keys back behind their first failure."""

    def __init__(self, batch: Sequence[Message]) -> None:
        self.batch = batch
        self.held: set[str] = set()
        self.down: Outcome | None = None
        """The answer that stopped everything, once there is one."""
        self._outcomes: list[Outcome | None] = [None] * len(batch)
        self._failed = False

    def pending(self) -> list[int]:
        """Indexes that may still be sent, in order; none once the sink is down."""
        if self.down is not None or None not in self._outcomes:
            return []
        batch, held = self.batch, self.held
        undecided = [index for index, outcome in enumerate(self._outcomes) if outcome is None]
        return [index for index in undecided if batch[index].key not in held] if held else undecided

    def record(self, index: int, outcome: Outcome) -> None:
        """Note what became of one message."""
        self._outcomes[index] = outcome
        if outcome is CONFIRMED:
            return
        self._failed = True
        if outcome.sink_down:
            self.down = outcome
        key = self.batch[index].key
        if key is not None:
            self.held.add(key)

    def read(self, groups: Sequence[Sequence[int]], replies: Sequence[Any]) -> bool:
        """Note what the replies say, as far as they came; whether one asks for a new connection.

        Groups whose replies are complete count even if the connection failed later.
        """
        start, reconnect = 0, False
        for group in groups:
            end = start + reply_count(len(group))
            if end > len(replies):
                break
            reconnect |= self._read_group(group, replies[start:end])
            start = end
        return reconnect

    def outcomes(self, rest: Outcome) -> list[Outcome]:
        """One outcome for each message; `rest` is that of the messages about which nothing is known."""
        if not self._failed and None not in self._outcomes:
            return cast("list[Outcome]", self._outcomes)
        rest = self.down or rest
        return defer(self.batch, [rest if outcome is None else outcome for outcome in self._outcomes])

    def _read_group(self, group: Sequence[int], replies: Sequence[Any]) -> bool:
        if all_confirmed(len(group), replies):
            for index in group:
                self._outcomes[index] = CONFIRMED
            return False
        verdicts = read_group(len(group), replies)
        for index, verdict in zip(group, verdicts, strict=True):
            self.record(index, verdict.outcome)
        return any(verdict.reconnect for verdict in verdicts)
