"""The one table that says what a fault of RabbitMQ means."""

from __future__ import annotations

import ssl

import pytest
from aiormq import exceptions as amqp

from relay.errors import InvalidConfig, PermissionMissing, SinkUnavailable
from relay.sink import Status
from relay.sinks.rabbitmq.faults import Blame, Fault, connect_fault, lost_fault, verdict

NO_EXCHANGE = Fault(404, "NOT_FOUND - no exchange 'events' in vhost '/'", "channel")
REFUSED = Fault(403, "ACCESS_REFUSED - access to exchange 'events' in vhost '/' refused for user 'relay'", "channel")
TOPIC_REFUSED = Fault(
    403, "ACCESS_REFUSED - access to topic 'a' in exchange 'events' in vhost '/' refused for user 'r'", "channel"
)
TOO_LARGE = Fault(406, "PRECONDITION_FAILED - message size 2 is larger than configured max size 1", "channel")


@pytest.mark.parametrize(
    ("fault", "blame", "status", "sink_down", "misconfigured"),
    [
        (NO_EXCHANGE, Blame.SINK, Status.UNAVAILABLE, True, True),
        (REFUSED, Blame.SINK, Status.UNAVAILABLE, True, True),
        (TOPIC_REFUSED, Blame.MESSAGE, Status.UNAVAILABLE, False, True),
        (TOO_LARGE, Blame.MESSAGE, Status.REJECTED, False, False),
        (Fault(311, "CONTENT_TOO_LARGE", "channel"), Blame.MESSAGE, Status.REJECTED, False, False),
        (Fault(599, "something new", "channel"), Blame.MESSAGE, Status.UNAVAILABLE, False, False),
        (Fault(501, "FRAME_ERROR", "connection"), Blame.MESSAGE, Status.UNAVAILABLE, False, False),
        (Fault(320, "CONNECTION_FORCED - shutdown", "connection"), Blame.SINK, Status.UNAVAILABLE, True, False),
        (Fault(541, "INTERNAL_ERROR", "connection"), Blame.SINK, Status.UNAVAILABLE, True, False),
        (Fault(530, "NOT_ALLOWED - vhost deleted", "connection"), Blame.SINK, Status.UNAVAILABLE, True, True),
        (Fault(None, "reset by peer", "connection"), Blame.SINK, Status.UNAVAILABLE, True, False),
        (Fault(403, "ACCESS_REFUSED", "connect"), Blame.SINK, Status.UNAVAILABLE, True, True),
        (Fault(530, "NOT_ALLOWED - vhost x not found", "connect"), Blame.SINK, Status.UNAVAILABLE, True, True),
        (Fault(504, "not AMQP", "connect"), Blame.SINK, Status.UNAVAILABLE, True, True),
        (Fault(None, "refused", "connect"), Blame.SINK, Status.UNAVAILABLE, True, False),
    ],
)
def test_a_fault_has_one_meaning(
    fault: Fault, blame: Blame, status: Status, sink_down: bool, misconfigured: bool
) -> None:
    found = verdict(fault)
    assert (found.blame, found.outcome.status) == (blame, status)
    assert (found.outcome.sink_down, found.outcome.misconfigured) == (sink_down, misconfigured)
    assert fault.text in found.outcome.reason
    assert bool(found.hint) == misconfigured


def test_a_fault_of_a_shared_connection_never_rejects() -> None:
    """The one message in flight of this batch may be innocent: another batch's message broke the connection."""
    for code in range(300, 600):
        assert verdict(Fault(code, "x", "connection")).outcome.status is Status.UNAVAILABLE


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (NO_EXCHANGE, InvalidConfig),
        (REFUSED, PermissionMissing),
        (Fault(403, "login", "connect"), PermissionMissing),
        (Fault(None, "refused", "connect"), SinkUnavailable),
        (TOO_LARGE, SinkUnavailable),
    ],
)
def test_ping_raises_what_an_operator_can_tell_apart(fault: Fault, kind: type[Exception]) -> None:
    assert type(verdict(fault).error()) is kind


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (amqp.ProbableAuthenticationError("ACCESS_REFUSED - Login was refused"), 403, "Login was refused"),
        (amqp.AuthenticationError(["EXTERNAL"], ["plain"]), 403, "authentication mechanisms"),
        (amqp.ConnectionClosed(530, "NOT_ALLOWED - vhost x not found"), 530, "vhost x not found"),
        (amqp.IncompatibleProtocolError("eof"), 504, "does not speak AMQP"),
        (amqp.InvalidFrameError("HTTP/1.1"), 504, "does not speak AMQP"),
        (amqp.AMQPConnectionError(111, "Connect call failed"), None, "Connect call failed"),
        (TimeoutError(), None, "TimeoutError"),
        (OSError("amqp://user:secret@host is odd"), None, "user:***@host"),
    ],
)
def test_a_failed_attempt_to_connect_is_told_apart(error: Exception, code: int | None, text: str) -> None:
    fault = connect_fault(error)
    assert (fault.level, fault.code) == ("connect", code)
    assert text in fault.text
    assert "secret" not in fault.text


def test_an_untrusted_certificate_is_an_operators_task() -> None:
    certificate = ssl.SSLCertVerificationError(1, "self-signed")
    certificate.verify_message = "self-signed certificate"
    error = amqp.AMQPConnectionError(1, "ssl")
    error.__cause__ = certificate
    found = verdict(connect_fault(error))
    assert found.outcome.misconfigured
    assert "self-signed certificate" in found.outcome.reason


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (amqp.ConnectionFrameError("FRAME_ERROR"), 501),
        (amqp.ConnectionSyntaxError("SYNTAX_ERROR"), 502),
        (amqp.ConnectionNotAllowed("NOT_ALLOWED"), 530),
        (amqp.ConnectionInternalError("INTERNAL_ERROR"), 541),
        (amqp.ConnectionClosed(320, "CONNECTION_FORCED"), 320),
        (amqp.AMQPConnectionError("reset"), None),
        (None, None),
    ],
)
def test_a_lost_connection_keeps_the_brokers_code(error: Exception | None, code: int | None) -> None:
    fault = lost_fault(error)
    assert (fault.level, fault.code) == ("connection", code)
    assert fault.text
