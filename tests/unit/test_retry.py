"""Every row of the table of decisions, and the pace of repetitions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.errors import (
    InvalidConfig,
    LeaseLost,
    MessageRejected,
    PermissionMissing,
    SchemaMismatch,
    SinkUnavailable,
    SlotLost,
    SourceUnavailable,
)
from relay.retry import Backoff, Decision, ErrorPolicy, decide, policy
from relay.sink import CONFIRMED, DEFERRED, Outcome, rejected, unavailable


@pytest.mark.parametrize(
    ("outcome", "attempts", "decision"),
    [
        (CONFIRMED, 99, Decision.SETTLE),
        (rejected("too large"), 0, Decision.DEAD_LETTER),
        (DEFERRED, 99, Decision.REQUEUE),
        (unavailable("no"), 0, Decision.PARK),
        (unavailable("no"), 10, Decision.PARK),
        (unavailable("no"), 11, Decision.DEAD_LETTER),
        (unavailable("no"), 12, Decision.DEAD_LETTER),
        (unavailable("down", sink_down=True), 99, Decision.WAIT),
        (unavailable("password", sink_down=True, misconfigured=True), 99, Decision.WAIT),
        (unavailable("exchange", misconfigured=True), 99, Decision.PARK),
    ],
)
def test_decisions(outcome: Outcome, attempts: int, decision: Decision) -> None:
    """With 12 attempts: the twelfth failure is the last one; outages and an operator's mistakes never are."""
    assert decide(outcome, attempts, 12) is decision


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (SourceUnavailable(), ErrorPolicy.RETRY),
        (SinkUnavailable(), ErrorPolicy.RETRY),
        (MessageRejected(), ErrorPolicy.DEAD_LETTER),
        (InvalidConfig("x", hint="y"), ErrorPolicy.STOP),
        (SchemaMismatch("x", hint="y"), ErrorPolicy.STOP),
        (PermissionMissing("x", hint="y"), ErrorPolicy.STOP),
        (SlotLost("x", hint="y"), ErrorPolicy.STOP),
        (LeaseLost([1]), ErrorPolicy.STOP),
        (ValueError(), ErrorPolicy.STOP),
    ],
)
def test_errors(error: Exception, expected: ErrorPolicy) -> None:
    """What nobody knows stops the relay: going on could lose something."""
    assert policy(error) is expected


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 10_000), st.integers())
def test_pauses_grow_to_the_cap_and_are_never_short(failures: int, seed: int) -> None:
    """Between half and all of base * 2^(failures-1), at most the cap; huge counts do not overflow."""
    delay = Backoff(0.5, 60.0, random.Random(seed)).delay(failures)
    ceiling = min(60.0, 0.5 * 2 ** min(failures - 1, 20))
    assert ceiling / 2 <= delay <= ceiling


def test_two_pods_do_not_retry_in_step() -> None:
    delays = {Backoff(1.0, 60.0, random.Random(seed)).delay(3) for seed in range(20)}
    assert len(delays) == 20
