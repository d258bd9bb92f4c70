"""Runs: consecutive parked rows of one key on their way to the sink again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.store import RunResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from relay.types import Message

__all__ = ["Run", "Runs"]


class Run:
    """Follows the rows of one run until all of them are confirmed or one of them is not."""

    __slots__ = ("_pending", "key", "lease", "open", "result")

    def __init__(self, messages: Sequence[Message]) -> None:
        head = messages[0]
        assert head.lease is not None
        self.lease, self.key = head.lease, head.key
        self.result = RunResult(head.lease, head.key)
        self.open = True
        self._pending = len(messages)

    def confirmed(self, message: Message) -> None:
        """The next row has been confirmed."""
        if self.open:
            self.result.confirmed.append(message)
            self._pending -= 1
            self.open = self._pending > 0

    def fail(self) -> RunResult:
        """A row was not confirmed, or the lane is lost: the rest is not tried. Fill in why."""
        self.open = False
        return self.result


class Runs:
    """The open runs of one sink by the very message of each of their rows.

    Not by number: a message that an earlier run has left in a worker's queue has the same number as its
    successor in a new run, and must not be taken for it.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._by_message: dict[Message, Run] = {}
        self._changed = changed

    def __bool__(self) -> bool:
        """True while a cycle is on its way."""
        return bool(self._by_message)

    def add(self, run: Run, messages: Iterable[Message]) -> None:
        """Follow a run."""
        for message in messages:
            self._by_message[message] = run

    def of(self, message: Message) -> Run | None:
        """The open run of a parked message; None when its run is over and it must not be sent."""
        run = self._by_message.get(message)
        return run if run is not None and run.open else None

    def closed(self) -> None:
        """Some run may have ended: tell whoever waits for it."""
        self._changed()

    def clear(self) -> None:
        """The cycle is over."""
        self._by_message.clear()
