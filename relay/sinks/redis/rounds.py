"""Which messages of a batch may be sent together, so that no key overtakes itself. Pure.

One write may carry several streams, each in a transaction of its own, and one of them can fail while the
next succeeds. A key whose messages go to two streams would then arrive in the wrong order. So within one
round a key goes to one stream; it goes on to the next in a later round, when the first has confirmed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.sink import CONFIRMED, DEFERRED, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.types import Message

__all__ = ["defer", "next_round"]


def next_round(batch: Sequence[Message], pending: Sequence[int]) -> dict[str, list[int]]:
    """Indexes of the messages that may go now, by stream, each in batch order.

    `pending` are the indexes without an outcome whose key is not held, in order. Never empty for a
    non-empty `pending`; ends after as many rounds as the most restless key changes its stream.
    """
    streams = {message.destination for message in batch}
    if len(streams) == 1:
        return {streams.pop(): list(pending)} if pending else {}
    groups: dict[str, list[int]] = {}
    stream_of: dict[str, str | None] = {}
    for index in pending:
        message = batch[index]
        stream, key = message.destination, message.key
        if key is not None and stream_of.setdefault(key, stream) != stream:
            stream_of[key] = None  # also its later messages for the first stream have to wait
            continue
        if (group := groups.get(stream)) is None:
            groups[stream] = [index]
        else:
            group.append(index)
    return groups


def defer(batch: Sequence[Message], outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes, with DEFERRED after the first failure of each key.

    An attempt is then counted for the message that failed, not for those that wait behind it.
    """
    held: set[str] = set()
    result: list[Outcome] = []
    for message, outcome in zip(batch, outcomes, strict=True):
        key = message.key
        if key is not None and key in held:
            result.append(DEFERRED)
            continue
        if key is not None and outcome is not CONFIRMED:
            held.add(key)
        result.append(outcome)
    return result
