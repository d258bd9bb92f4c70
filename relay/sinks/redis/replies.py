"""What the replies of one transaction say about each of its messages. Pure; every reply is looked at.

A group of n messages is `MULTI`, n times `XADD`, `EXEC`, and has n + 2 replies; a single message is one
XADD with one reply. `redis-py` raises the first error of a pipeline and forgets the rest (FIELD.md E3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hiredis import ReplyError

from relay.sink import CONFIRMED, unavailable
from relay.sinks.redis.errors import Verdict, judge

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["all_confirmed", "read_group", "reply_count"]

_CONFIRMED = Verdict(CONFIRMED)


def reply_count(messages: int) -> int:
    """How many replies a group of so many messages has when all goes well or ill."""
    return 1 if messages == 1 else messages + 2


def all_confirmed(messages: int, replies: Sequence[Any]) -> bool:
    """Whether every message of the group is in its stream: the usual case, answered quickly."""
    ids = replies if messages == 1 else replies[-1]
    # An entry's id is the only proof; whoever returns fewer ids than there were messages has not proved all.
    return isinstance(ids, list) and len(ids) == messages and set(map(type, ids)) == {bytes}


def read_group(messages: int, replies: Sequence[Any]) -> list[Verdict]:
    """One verdict for each message of a group, from exactly `reply_count(messages)` replies."""
    if messages == 1:
        return [_read(replies[0])]
    begun, queued, result = replies[0], replies[1:-1], replies[-1]
    if isinstance(begun, ReplyError):
        # MULTI was refused, so each XADD ran by itself, and its own reply is the truth.
        return [_read(reply) for reply in queued]
    if isinstance(result, list) and len(result) == messages:
        return [_read(reply) for reply in result]
    # The transaction was discarded: nothing of it is in the stream. The first refusal is the cause.
    cause = next((reply for reply in queued if isinstance(reply, ReplyError)), result)
    return [_read(cause)] * messages


def _read(reply: Any) -> Verdict:
    if isinstance(reply, bytes):  # the entry's id, and the only proof
        return _CONFIRMED
    if isinstance(reply, ReplyError):
        return judge(str(reply))
    return Verdict(unavailable(f"unexpected reply of type {type(reply).__name__}"), reconnect=True)
