"""What a fault of RabbitMQ means: whom it concerns, what becomes of the messages, what an operator does. Pure.

Codes are AMQP 0-9-1's reply codes. RabbitMQ closes the *channel* or the *connection* for a fault and
never says which message it was; `Blame` says how to find out (`relay.sinks.rabbitmq.sink`).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from enum import Enum
from typing import Final

from aiormq import exceptions as amqp

from relay.errors import InvalidConfig, PermissionMissing, RelayError, SinkUnavailable
from relay.redaction import redact
from relay.sink import Outcome, rejected, unavailable

__all__ = ["Blame", "Fault", "Verdict", "connect_fault", "lost_fault", "verdict"]


class Blame(Enum):
    """Whose fault it is that a channel or connection was closed."""

    MESSAGE = "message"
    """One of those in flight: sent again in smaller groups until it is alone."""
    SINK = "sink"
    """None of them: all would meet the same."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a channel or connection ended. `code` is the broker's reply code, None when it said nothing."""

    code: int | None
    text: str
    level: str = "connection"
    """`connect`, `connection` or `channel`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows from a fault. `hint` is what an operator can do, empty when there is nothing to do."""

    blame: Blame
    outcome: Outcome
    hint: str = ""
    missing_right: bool = False

    def error(self) -> RelayError:
        """The same as an exception, for `ping`."""
        if not self.outcome.misconfigured:
            return SinkUnavailable(self.outcome.reason)
        kind = PermissionMissing if self.missing_right else InvalidConfig
        return kind(self.outcome.reason, hint=self.hint)


@dataclass(frozen=True, slots=True)
class _Rule:
    blame: Blame = Blame.SINK
    rejects: bool = False
    misconfigured: bool = False
    missing_right: bool = False
    hint: str = ""


_ACCESS_REFUSED: Final = 403
_SINK_LATER: Final = _Rule()
_BAD_MESSAGE: Final = _Rule(Blame.MESSAGE, rejects=True)
_VHOST_HINT: Final = (
    "Check the vhost at the end of the url (`rabbitmqctl list_vhosts`, `%2F` is the vhost `/`) and the user's rights "
    "(`rabbitmqctl list_permissions -p VHOST`)."
)
_TOPIC_REFUSED: Final = _Rule(
    Blame.MESSAGE,
    misconfigured=True,
    missing_right=True,
    hint="Let the user write this routing key: `rabbitmqctl set_topic_permissions`.",
)

_RULES: Final = {
    # The broker refuses the user, the vhost, or is no AMQP broker.
    ("connect", 403): _Rule(
        misconfigured=True,
        missing_right=True,
        hint="Check user and password in the url; `rabbitmqctl authenticate_user USER PASSWORD` tries them.",
    ),
    ("connect", 530): _Rule(misconfigured=True, missing_right=True, hint=_VHOST_HINT),
    ("connect", 504): _Rule(misconfigured=True, hint="The url must point at an AMQP 0-9-1 listener (5672, TLS 5671)."),
    # The vhost was deleted, or an administrator closed us for good.
    ("connection", 530): _Rule(misconfigured=True, missing_right=True, hint=_VHOST_HINT),
    # The frames of one message could not be parsed. Never a rejection: the connection is shared, so the
    # message that is alone on its channel may be innocent. Attempts decide.
    ("connection", 501): _Rule(Blame.MESSAGE),
    ("connection", 502): _Rule(Blame.MESSAGE),
    # Every message goes to the sink's one exchange, so its absence concerns them all.
    ("channel", 404): _Rule(
        misconfigured=True, hint="Create the exchange, or correct `exchange`; the relay does not declare it."
    ),
    ("channel", 403): _Rule(
        misconfigured=True,
        missing_right=True,
        hint="Let the user write to the exchange: `rabbitmqctl set_permissions -p VHOST USER CONFIGURE WRITE READ`.",
    ),
    # Larger than the broker's max_message_size, a header that it cannot take.
    ("channel", 406): _BAD_MESSAGE,
    ("channel", 311): _BAD_MESSAGE,
    # Anything else that ends a channel is put down to a message, so that one cannot stop the others.
    ("channel", None): _Rule(Blame.MESSAGE),
}


def verdict(fault: Fault) -> Verdict:
    """What a fault means. An unknown code: try again; and on a channel, one message is to blame."""
    rule = _RULES.get((fault.level, fault.code))
    if rule is None:
        rule = _RULES.get((fault.level, None), _SINK_LATER)
    if (fault.level, fault.code) == ("channel", _ACCESS_REFUSED) and "topic" in fault.text.split("'", 1)[0]:
        rule = _TOPIC_REFUSED  # "access to topic 'x' in exchange ..." concerns a routing key, not the exchange
    return Verdict(rule.blame, _outcome(rule, fault), rule.hint, rule.missing_right)


def _outcome(rule: _Rule, fault: Fault) -> Outcome:
    reason = fault.text if fault.code is None or str(fault.code) in fault.text else f"{fault.text} ({fault.code})"
    if rule.rejects:
        return rejected(reason)
    return unavailable(reason, sink_down=rule.blame is Blame.SINK, misconfigured=rule.misconfigured)


def connect_fault(error: BaseException) -> Fault:
    """A failed attempt to connect, from the client library's exception."""
    text = redact(str(error)) or type(error).__name__
    match error:
        case amqp.ProbableAuthenticationError():
            return Fault(403, text, "connect")
        case amqp.AuthenticationError():
            return Fault(403, "the broker offers none of the client's authentication mechanisms", "connect")
        case amqp.ConnectionClosed(args=(int(code), reply)):
            return Fault(code, redact(str(reply)), "connect")
        case amqp.IncompatibleProtocolError() | amqp.ProtocolSyntaxError():
            return Fault(504, "the address does not speak AMQP 0-9-1", "connect")
    if isinstance(error.__cause__, ssl.SSLCertVerificationError):
        return Fault(504, f"the broker's certificate is not trusted: {error.__cause__.verify_message}", "connect")
    return Fault(None, f"cannot connect to RabbitMQ: {text}", "connect")


_LOST_CODES: Final = (
    (amqp.ConnectionFrameError, 501),
    (amqp.ConnectionSyntaxError, 502),
    (amqp.ConnectionNotAllowed, 530),
    (amqp.ConnectionInternalError, 541),
)


def lost_fault(error: BaseException | None) -> Fault:
    """An established connection ended; None when the peer just closed it."""
    if error is None:
        return Fault(None, "the connection to RabbitMQ was closed; whether its last messages arrived is unknown")
    code = next((code for kind, code in _LOST_CODES if isinstance(error, kind)), None)
    if code is None and isinstance(error, amqp.ConnectionClosed) and error.args and isinstance(error.args[0], int):
        code = error.args[0]
    if isinstance(error, amqp.ConnectionClosed) and error.args:
        return Fault(code, redact(str(error.args[-1])))
    return Fault(None, f"the connection to RabbitMQ was lost: {redact(str(error)) or type(error).__name__}")
