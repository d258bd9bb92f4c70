"""What an error of Redis means for messages: the one table from reply to outcome. Pure.

Sources: https://redis.io/docs/latest/develop/reference/protocol-spec/#simple-errors and `shared` errors
in the server's `server.c`; FIELD.md E3 to E5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from relay.sink import Outcome, rejected, unavailable

__all__ = ["Verdict", "judge"]

_REASON_LENGTH_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an error reply means.

    `outcome`    for each message that it concerns
    `reconnect`  the connection is well, but leads to a server that will not take this for a while: after a
                 failover, the name in the URL leads to another one
    """

    outcome: Outcome
    reconnect: bool = False


# First word of the reply -> (whole sink, an operator has to act, connect again).
_BY_CODE: Final[dict[str, tuple[bool, bool, bool]]] = {
    "LOADING": (True, False, True),
    "READONLY": (True, False, True),
    "MASTERDOWN": (True, False, True),
    "CLUSTERDOWN": (True, False, True),
    "MISCONF": (True, False, False),
    "OOM": (True, False, False),
    "BUSY": (True, False, False),
    "UNKILLABLE": (True, False, False),
    "TRYAGAIN": (True, False, False),
    "NOREPLICAS": (True, False, False),
    "NOAUTH": (True, True, True),
    "WRONGPASS": (True, True, True),
    "DENIED": (True, True, True),
    "WRONGTYPE": (False, False, False),
    "MOVED": (False, True, False),
    "ASK": (False, True, False),
}

# A part of the text (they all begin with ERR, or their first word is not enough) -> the same three.
_BY_TEXT: Final[tuple[tuple[str, tuple[bool, bool, bool]], ...]] = (
    ("max number of clients", (True, False, True)),
    ("without any password configured", (True, True, True)),
    ("no password is set", (True, True, True)),
    ("invalid password", (True, True, True)),
    ("DB index is out of range", (True, True, True)),
)

_TOO_LARGE: Final = (
    "invalid bulk length",
    "too large to be stored",
    "exceeds maximum allowed size",
)


def judge(text: str) -> Verdict:
    """The meaning of an error reply (`WRONGTYPE Operation against ...`, without the leading dash).

    What nobody has classified is tried again as the message's own failure: it stops neither the sink
    for good nor the message for ever, because its attempts are counted.
    """
    text = text.removeprefix("EXECABORT Transaction discarded because of: ")
    if any(part in text for part in _TOO_LARGE):
        return Verdict(rejected(_reason(text)))
    if "unknown command" in text:  # the rest of this text would repeat arguments, and so a payload
        return Verdict(unavailable("the server does not know XADD, MULTI or EXEC", sink_down=True, misconfigured=True))
    code = text.partition(" ")[0]
    if code == "NOPERM":
        return _judge_permission(text)
    down, misconfigured, reconnect = _BY_CODE.get(code) or _by_text(text)
    return Verdict(unavailable(_reason(text), sink_down=down, misconfigured=misconfigured), reconnect)


def _judge_permission(text: str) -> Verdict:
    """A denied key is that stream's own trouble, a denied command everyone's.

    "No permissions to access a key" (7.0) or "... access one of the keys ..." (6.x) against "User x has no
    permissions to run the 'xadd' command" (7.0) or "this user has no permissions to run ..." (6.x).
    """
    return Verdict(unavailable(_reason(text), sink_down="access" not in text, misconfigured=True))


def _by_text(text: str) -> tuple[bool, bool, bool]:
    return next((meaning for part, meaning in _BY_TEXT if part in text), (False, False, False))


def _reason(text: str) -> str:
    return text[:_REASON_LENGTH_MAX]
