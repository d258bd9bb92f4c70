"""The table from a broker's answer to what is done next."""

from __future__ import annotations

import ssl

import pytest
from aiokafka.errors import KafkaConnectionError, SaslAuthenticationFailed, UnsupportedSaslMechanismError

from relay.sink import Status
from relay.sinks.kafka.answers import (
    Step,
    after_connection_failure,
    after_metadata,
    after_produce,
    name_of,
    no_producer_id,
)


@pytest.mark.parametrize(
    ("code", "step"),
    [
        (0, Step.CONFIRM),
        *((code, Step.SPLIT) for code in (10, 18, 87)),
        (32, Step.RETIME),
        *((code, Step.FAIL) for code in (17, 29, 31, 35, 42, 43, 44, 76)),
        *((code, Step.NEW_EPOCH) for code in (45, 59)),
        *((code, Step.NEW_PRODUCER) for code in (46, 47, 49, 90)),
        *((code, Step.RETRY) for code in (-1, 2, 3, 5, 6, 7, 8, 9, 13, 19, 20, 56, 74, 75, 89)),
        (12_345, Step.RETRY),
    ],
)
def test_a_first_answer_decides_the_next_step(code: int, step: Step) -> None:
    """Every code that a produce request may get, and one that Kafka has yet to invent."""
    assert after_produce(code, resent=False).step is step


def test_a_known_sequence_confirms_only_bytes_that_were_sent_before() -> None:
    """DUPLICATE_SEQUENCE_NUMBER at a first attempt is somebody else's sequence."""
    assert after_produce(46, resent=True).step is Step.CONFIRM
    assert after_produce(46, resent=False).step is Step.NEW_PRODUCER


def test_a_wrong_checksum_is_believed_the_second_time() -> None:
    """CORRUPT_MESSAGE once may be the network; twice it is a record."""
    assert after_produce(2, resent=False).step is Step.RETRY
    assert after_produce(2, resent=True).step is Step.SPLIT


def test_only_zero_and_a_resent_duplicate_confirm() -> None:
    """Nothing else is ever taken for a confirmation (DESIGN.md 2.3)."""
    confirming = {
        (code, resent)
        for code in range(-1, 200)
        for resent in (False, True)
        if after_produce(code, resent=resent).step is Step.CONFIRM
    }
    assert confirming == {(0, False), (0, True), (46, True)}


@pytest.mark.parametrize("code", [2, 10, 17, 18, 32, 87])
def test_only_faults_of_a_record_or_a_name_reject(code: int) -> None:
    """These can never succeed; they name Kafka's own word for it."""
    outcome = after_produce(code, resent=True).outcome("partition 1")
    assert outcome.status is Status.REJECTED
    assert name_of(code) in outcome.reason


@pytest.mark.parametrize("code", [-1, 3, 5, 6, 7, 19, 20, 29, 31, 42, 43, 44, 45, 47, 56, 76, 12_345])
def test_everything_else_is_tried_again_without_an_alarm_for_the_sink(code: int) -> None:
    """One partition's trouble is its own."""
    outcome = after_produce(code, resent=True).outcome("partition 1")
    assert outcome.status is Status.UNAVAILABLE
    assert not outcome.sink_down


@pytest.mark.parametrize("code", [5, 6, 7, 19, 20, 29, 56, 76])
def test_events_wait_without_losing_attempts_while_the_cluster_or_an_operator_has_to_act(code: int) -> None:
    """A leaderless partition, too few replicas, a missing right: nobody is dead-lettered for it."""
    assert after_produce(code, resent=False).outcome("partition 1").misconfigured


def test_a_missing_topic_is_its_events_own_failure() -> None:
    """It is tried again, counted, and never an outage."""
    outcome = after_metadata(3, "orders")
    assert (outcome.status, outcome.sink_down, outcome.misconfigured) == (Status.UNAVAILABLE, False, False)
    assert "'orders' does not exist" in outcome.reason


def test_a_denied_topic_waits_for_an_operator() -> None:
    """TOPIC_AUTHORIZATION_FAILED in the metadata."""
    outcome = after_metadata(29, "orders")
    assert (outcome.status, outcome.sink_down, outcome.misconfigured) == (Status.UNAVAILABLE, False, True)


def test_a_name_that_the_broker_calls_illegal_is_rejected() -> None:
    """INVALID_TOPIC_EXCEPTION in the metadata."""
    assert after_metadata(17, "orders").status is Status.REJECTED


@pytest.mark.parametrize(
    "error",
    [
        SaslAuthenticationFailed("Authentication failed: Invalid username or password"),
        UnsupportedSaslMechanismError("PLAIN"),
        ssl.SSLCertVerificationError("certificate has expired"),
    ],
)
def test_a_refused_identity_takes_the_sink_down_and_asks_for_an_operator(error: Exception) -> None:
    """Wrong password, wrong mechanism, a certificate that one side does not trust."""
    outcome = after_connection_failure(error)
    assert (outcome.status, outcome.sink_down, outcome.misconfigured) == (Status.UNAVAILABLE, True, True)
    assert str(error.args[-1]) in outcome.reason


@pytest.mark.parametrize(
    "error", [ConnectionRefusedError("no"), TimeoutError(), KafkaConnectionError("closed"), EOFError()]
)
def test_an_unreachable_broker_takes_the_sink_down(error: Exception) -> None:
    """It is an outage like any other, with a reason."""
    outcome = after_connection_failure(error)
    assert (outcome.status, outcome.sink_down, outcome.misconfigured) == (Status.UNAVAILABLE, True, False)
    assert outcome.reason


@pytest.mark.parametrize(("code", "misconfigured"), [(31, True), (14, False), (15, False), (-1, False)])
def test_without_a_producer_id_the_sink_is_down(code: int, *, misconfigured: bool) -> None:
    """A denied cluster right waits for an operator; a loading coordinator does not."""
    outcome = no_producer_id(code)
    assert (outcome.sink_down, outcome.misconfigured) == (True, misconfigured)
