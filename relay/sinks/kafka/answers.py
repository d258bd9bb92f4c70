"""What a broker's answer means: one pure table from Kafka's error codes to what is done next.

Codes and names are those of the protocol guide (kafka.apache.org/protocol, "Error Codes"). What is not
in the table is retried for a while and then reported as this partition's own failure.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from enum import Enum
from typing import Final

from relay.sink import Outcome, rejected, unavailable
from relay.sinks.kafka.wire import AUTHENTICATION_ERRORS, kafka_error_code

__all__ = [
    "Step",
    "Verdict",
    "after_connection_failure",
    "after_metadata",
    "after_produce",
    "name_of",
    "no_producer_id",
]


class Step(Enum):
    """What is done next with a record batch."""

    CONFIRM = "confirm"
    """The broker has it."""
    RETRY = "retry"
    """Send the same bytes again, with the same sequence numbers: the broker drops what it already has."""
    NEW_EPOCH = "new_epoch"
    """Nothing was written; begin again at sequence 0 of the next epoch."""
    NEW_PRODUCER = "new_producer"
    """Nothing was written; begin again under another producer id."""
    SPLIT = "split"
    """Nothing was written because of some record in it: find that one."""
    RETIME = "retime"
    """Nothing was written because of timestamps: use the time of publishing."""
    FAIL = "fail"
    """Nothing was written, and trying again at once is useless."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do, and what to report if that does not help.

    `waits`: an operator or the cluster itself has to act, so the events wait without losing attempts.
    """

    name: str
    step: Step
    waits: bool = False
    rejects: bool = False

    def outcome(self, what: str) -> Outcome:
        """What becomes of the messages when this is the last word; `what` says where it happened."""
        if self.rejects:
            return rejected(f"{what}: {self.name}")
        return unavailable(f"{what}: {self.name}", misconfigured=self.waits)


_TABLE: Final[dict[int, Verdict]] = {
    0: Verdict("NONE", Step.CONFIRM),
    # --- the records ---
    2: Verdict("CORRUPT_MESSAGE", Step.SPLIT, rejects=True),
    10: Verdict("MESSAGE_TOO_LARGE", Step.SPLIT, rejects=True),
    18: Verdict("RECORD_LIST_TOO_LARGE", Step.SPLIT, rejects=True),
    32: Verdict("INVALID_TIMESTAMP", Step.RETIME, rejects=True),
    87: Verdict("INVALID_RECORD", Step.SPLIT, rejects=True),
    # --- the topic ---
    3: Verdict("UNKNOWN_TOPIC_OR_PARTITION", Step.RETRY),
    17: Verdict("INVALID_TOPIC_EXCEPTION", Step.FAIL, rejects=True),
    29: Verdict("TOPIC_AUTHORIZATION_FAILED", Step.FAIL, waits=True),
    43: Verdict("UNSUPPORTED_FOR_MESSAGE_FORMAT", Step.FAIL, waits=True),
    44: Verdict("POLICY_VIOLATION", Step.FAIL, waits=True),
    76: Verdict("UNSUPPORTED_COMPRESSION_TYPE", Step.FAIL, waits=True),
    # --- the sequence ---
    45: Verdict("OUT_OF_ORDER_SEQUENCE_NUMBER", Step.NEW_EPOCH),
    46: Verdict("DUPLICATE_SEQUENCE_NUMBER", Step.NEW_PRODUCER),
    47: Verdict("INVALID_PRODUCER_EPOCH", Step.NEW_PRODUCER),
    49: Verdict("INVALID_PRODUCER_ID_MAPPING", Step.NEW_PRODUCER),
    59: Verdict("UNKNOWN_PRODUCER_ID", Step.NEW_EPOCH),
    90: Verdict("PRODUCER_FENCED", Step.NEW_PRODUCER),
    # --- the cluster; a partition without a leader or without enough replicas comes back by itself or by an operator ---
    5: Verdict("LEADER_NOT_AVAILABLE", Step.RETRY, waits=True),
    6: Verdict("NOT_LEADER_OR_FOLLOWER", Step.RETRY, waits=True),
    7: Verdict("REQUEST_TIMED_OUT", Step.RETRY, waits=True),
    8: Verdict("BROKER_NOT_AVAILABLE", Step.RETRY, waits=True),
    9: Verdict("REPLICA_NOT_AVAILABLE", Step.RETRY, waits=True),
    13: Verdict("NETWORK_EXCEPTION", Step.RETRY, waits=True),
    14: Verdict("COORDINATOR_LOAD_IN_PROGRESS", Step.RETRY, waits=True),
    15: Verdict("COORDINATOR_NOT_AVAILABLE", Step.RETRY, waits=True),
    19: Verdict("NOT_ENOUGH_REPLICAS", Step.RETRY, waits=True),
    20: Verdict("NOT_ENOUGH_REPLICAS_AFTER_APPEND", Step.RETRY, waits=True),
    56: Verdict("KAFKA_STORAGE_ERROR", Step.RETRY, waits=True),
    74: Verdict("FENCED_LEADER_EPOCH", Step.RETRY, waits=True),
    75: Verdict("UNKNOWN_LEADER_EPOCH", Step.RETRY, waits=True),
    89: Verdict("THROTTLING_QUOTA_EXCEEDED", Step.RETRY, waits=True),
    # --- the client as a whole ---
    31: Verdict("CLUSTER_AUTHORIZATION_FAILED", Step.FAIL, waits=True),
    35: Verdict("UNSUPPORTED_VERSION", Step.FAIL, waits=True),
    42: Verdict("INVALID_REQUEST", Step.FAIL),
    -1: Verdict("UNKNOWN_SERVER_ERROR", Step.RETRY),
}

_CONFIRMED_BEFORE: Final = Verdict("DUPLICATE_SEQUENCE_NUMBER", Step.CONFIRM)
_CORRUPTED_ON_THE_WAY: Final = Verdict("CORRUPT_MESSAGE", Step.RETRY, rejects=True)


def name_of(code: int) -> str:
    """Kafka's name of an error code."""
    return _verdict(code).name


def after_produce(code: int, *, resent: bool) -> Verdict:
    """What to do after the answer to a record batch; `resent`: the same bytes were sent before.

    A sequence that the broker already knows is a confirmation only of bytes that were sent before: at a
    first attempt it is somebody else's, under a producer id that was given out twice (a cluster made anew).
    A checksum that is wrong twice is not an accident of the network.
    """
    verdict = _verdict(code)
    if resent and verdict.name == "DUPLICATE_SEQUENCE_NUMBER":
        return _CONFIRMED_BEFORE
    if not resent and verdict.name == "CORRUPT_MESSAGE":
        return _CORRUPTED_ON_THE_WAY
    return verdict


def after_metadata(code: int, topic: str) -> Outcome:
    """What becomes of the messages for a topic that the cluster answers with an error."""
    verdict = _verdict(code)
    if code == 3:  # noqa: PLR2004  # the one case that gets words of its own
        return unavailable(f"topic {topic!r} does not exist (UNKNOWN_TOPIC_OR_PARTITION)")
    return verdict.outcome(f"topic {topic!r}")


def no_producer_id(code: int) -> Outcome:
    """Nothing can be sent without a producer id, so the whole sink is down."""
    verdict = _verdict(code)
    refused = verdict.step is Step.FAIL
    return unavailable(f"the cluster gives no producer id: {verdict.name}", sink_down=True, misconfigured=refused)


def after_connection_failure(error: BaseException) -> Outcome:
    """The whole sink is down; an operator has to act if the broker refused who we are or we refused it."""
    misconfigured = isinstance(error, (*AUTHENTICATION_ERRORS, ssl.SSLCertVerificationError))
    return unavailable(_words(error), sink_down=True, misconfigured=misconfigured)


def _words(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    code = kafka_error_code(error)
    name = type(error).__name__ if code is None else name_of(code)
    words = str(error).removeprefix(f"{type(error).__name__}: ")
    return f"{name}: {words}" if words and words != type(error).__name__ else name


def _verdict(code: int) -> Verdict:
    return _TABLE.get(code) or Verdict(f"error {code}", Step.RETRY)
