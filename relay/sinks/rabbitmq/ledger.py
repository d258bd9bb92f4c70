"""What became of each message of a batch, by delivery tag: the order of keys and PROTOCOLS.md 20, without I/O.

- A key has at most one unconfirmed message. The next one is released by the confirm; anything else
  defers the rest of the key. (Two in flight, the first nacked, the second acked: 2 overtook 1.)
- An event id is never twice in flight. A return carries no delivery tag, only the message: two of one
  id to two routing keys, and the return could be charged to the wrong one and confirm a lost message.
- A return is remembered by tag, because the broker acknowledges a returned message right after it.
- Messages without a key have no order and no limit but `window`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, cast

from relay.sink import CONFIRMED, DEFERRED, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.types import Message

__all__ = ["UNBOUNDED", "Ledger", "UnexpectedReply"]

UNBOUNDED: Final = 2**31
_NOBODY: Final = -1


class UnexpectedReply(Exception):
    """The broker confirmed or returned something that is not in flight: nothing on this channel can be trusted."""


class Ledger:
    """The state of one batch. Messages are named by their index in it.

    `open`       messages without an outcome
    `in_flight`  messages that were sent on the present channel and have no answer yet
    `window`     how many may be in flight; lowered to find the one message that the broker closes channels for

    While `open` is not 0, something is in flight or `take` returns something.
    """

    def __init__(self, batch: Sequence[Message]) -> None:
        self.batch = batch
        self.open = len(batch)
        self.in_flight = 0
        self.window = UNBOUNDED
        self._outcomes: list[Outcome | None] = [None] * len(batch)
        self._follower = [_NOBODY] * len(batch)
        self._ready: deque[int] = deque()
        self._sent: list[int] = []
        self._first_tag = 1
        self._oldest = 0
        self._tag_of_id: dict[str, int] = {}
        self._waiting_for_id: dict[str, list[int]] = {}
        self._returned: dict[int, Outcome] = {}
        self._thread_keys()

    def _thread_keys(self) -> None:
        last: dict[str, int] = {}
        for index, message in enumerate(self.batch):
            key = message.key
            if key is None or (before := last.get(key)) is None:
                self._ready.append(index)
            else:
                self._follower[before] = index
            if key is not None:
                last[key] = index

    @property
    def outcomes(self) -> list[Outcome]:
        """One outcome per message, in batch order; only when none is open."""
        if self.open:
            raise AssertionError(f"{self.open} messages have no outcome")
        return cast("list[Outcome]", self._outcomes)

    # --- sending ---

    def attach(self, first_tag: int) -> None:
        """Go on on a channel whose next publish gets this delivery tag."""
        if self.in_flight:
            raise AssertionError("messages of another channel are in flight; rewind first")
        self._sent = []
        self._first_tag = first_tag
        self._oldest = 0

    def take(self) -> int | None:
        """The next message that may be sent now; pass it on to `sent` or `settle`."""
        if self.in_flight >= self.window:
            return None
        while self._ready:
            index = self._ready.popleft()
            event_id = self.batch[index].id
            if event_id not in self._tag_of_id:
                return index
            self._waiting_for_id.setdefault(event_id, []).append(index)
        return None

    def sent(self, index: int) -> None:
        """A message got the next delivery tag of the channel."""
        self._tag_of_id[self.batch[index].id] = self._first_tag + len(self._sent)
        self._sent.append(index)
        self.in_flight += 1

    # --- the broker's answers ---

    def returned(self, event_id: str | None, outcome: Outcome) -> None:
        """A message came back. Its acknowledgement, which follows, will settle it with this outcome."""
        tag = self._tag_of_id.get(event_id) if event_id is not None else None
        if tag is None:
            raise UnexpectedReply("the broker returned a message that is not in flight")
        self._returned[tag] = outcome

    def answer(self, tag: int, outcome: Outcome, *, multiple: bool) -> None:
        """The broker acknowledged (CONFIRMED) or refused one tag, or all up to it; tag 0 with `multiple` is all."""
        position = tag - self._first_tag if tag or not multiple else len(self._sent) - 1
        if position >= len(self._sent):
            raise UnexpectedReply("the broker answered a delivery tag that was not used yet")
        for at in range(self._oldest if multiple else position, position + 1):
            if at >= 0 and (index := self._sent[at]) != _NOBODY:
                self._sent[at] = _NOBODY
                self._answered(index, at + self._first_tag, outcome)
        self._forget_answered()

    def _answered(self, index: int, tag: int, outcome: Outcome) -> None:
        self.in_flight -= 1
        event_id = self.batch[index].id
        del self._tag_of_id[event_id]
        if self._waiting_for_id:
            self._ready.extend(self._waiting_for_id.pop(event_id, ()))
        if self._returned:
            outcome = self._returned.pop(tag, outcome)
        self.settle(index, outcome)

    def _forget_answered(self) -> None:
        while self._oldest < len(self._sent) and self._sent[self._oldest] == _NOBODY:
            self._oldest += 1

    def settle(self, index: int, outcome: Outcome) -> None:
        """The final outcome of a message that is not in flight; releases or defers the rest of its key."""
        self._outcomes[index] = outcome
        self.open -= 1
        follower = self._follower[index]
        if follower == _NOBODY:
            return
        if outcome is CONFIRMED:
            self._ready.append(follower)
            return
        while follower != _NOBODY:
            self._outcomes[follower] = DEFERRED
            self.open -= 1
            follower = self._follower[follower]

    # --- when the channel is lost ---

    def rewind(self) -> None:
        """The channel is gone: what was in flight is to be sent again, first and in the same order.

        What had come back is settled: the broker has said that it did not take it.
        """
        lost = self.unanswered()
        returned = {self._sent[tag - self._first_tag]: outcome for tag, outcome in self._returned.items()}
        waiting = sorted(index for indexes in self._waiting_for_id.values() for index in indexes)
        self._forget_channel()
        self._ready.extendleft(index for index in reversed(lost) if index not in returned)
        self._ready.extend(waiting)
        for index, outcome in returned.items():
            self.settle(index, outcome)

    def unanswered(self) -> list[int]:
        """Messages in flight, in the order in which they were sent."""
        return [index for index in self._sent[self._oldest :] if index != _NOBODY]

    def fail_in_flight(self, outcome: Outcome) -> None:
        """Nothing more comes for what is in flight; the followers are deferred, the rest stays open."""
        lost = self.unanswered()
        self.rewind()
        for index in lost:
            if self._outcomes[index] is None:
                self._ready.remove(index)
                self.settle(index, outcome)

    def fail(self, outcome: Outcome) -> None:
        """Every message without an outcome gets this one."""
        self.rewind()
        self._ready.clear()
        self._outcomes = [outcome if known is None else known for known in self._outcomes]
        self.open = 0

    def _forget_channel(self) -> None:
        self._sent = []
        self._oldest = 0
        self.in_flight = 0
        self._tag_of_id = {}
        self._waiting_for_id = {}
        self._returned = {}
