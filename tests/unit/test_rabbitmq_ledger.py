"""The ledger of a batch: PROTOCOLS.md 20 as properties over every answer a broker can give."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.sink import CONFIRMED, DEFERRED, Outcome, Status, rejected, unavailable
from relay.sinks.rabbitmq.ledger import Ledger, UnexpectedReply
from relay.testing.messages import make_message

if TYPE_CHECKING:
    from relay.types import Message

RETURNED = unavailable("returned")
REFUSED = unavailable("refused")
DOWN = unavailable("down", sink_down=True)


def batch_of(*keys: str | None) -> list[Message]:
    return [make_message("q", key=key) for key in keys]


def send_all(ledger: Ledger) -> list[int]:
    sent = []
    while (index := ledger.take()) is not None:
        ledger.sent(index)
        sent.append(index)
    return sent


def attached(*keys: str | None, first_tag: int = 1) -> Ledger:
    ledger = Ledger(batch_of(*keys))
    ledger.attach(first_tag)
    return ledger


def test_an_empty_batch_is_done() -> None:
    ledger = Ledger([])
    assert ledger.open == 0
    assert ledger.outcomes == []


def test_a_wave_is_the_first_message_of_each_key_and_all_without_a_key() -> None:
    assert send_all(attached("a", "a", None, "b", None, "b")) == [0, 2, 3, 4]


def test_a_confirm_releases_the_next_of_its_key_at_once() -> None:
    """The others of the wave need not be confirmed: there is no barrier."""
    ledger = attached("a", "a", "b", "b", first_tag=11)
    send_all(ledger)
    ledger.answer(12, CONFIRMED, multiple=False)
    assert send_all(ledger) == [3]
    ledger.answer(11, CONFIRMED, multiple=False)
    assert send_all(ledger) == [1]


def test_a_multiple_acknowledgement_confirms_all_up_to_its_tag() -> None:
    ledger = attached(None, None, None, first_tag=5)
    send_all(ledger)
    ledger.answer(6, CONFIRMED, multiple=True)
    assert ledger.unanswered() == [2]
    assert ledger.open == 1


def test_a_multiple_acknowledgement_skips_what_was_answered_before() -> None:
    ledger = attached(None, None, None)
    send_all(ledger)
    ledger.answer(2, REFUSED, multiple=False)
    ledger.answer(3, CONFIRMED, multiple=True)
    assert ledger.outcomes == [CONFIRMED, REFUSED, CONFIRMED]


def test_tag_zero_with_multiple_means_all() -> None:
    """AMQP 0-9-1, basic.ack: "if the multiple field is 1, and the delivery tag is zero, ... all outstanding"."""
    ledger = attached(None, None, first_tag=7)
    send_all(ledger)
    ledger.answer(0, CONFIRMED, multiple=True)
    assert ledger.outcomes == [CONFIRMED] * 2


def test_a_refused_message_defers_the_rest_of_its_key_only() -> None:
    ledger = attached("a", "a", "a", "b", "b")
    send_all(ledger)
    ledger.answer(1, REFUSED, multiple=False)
    ledger.answer(2, CONFIRMED, multiple=False)
    assert send_all(ledger) == [4]
    ledger.answer(3, CONFIRMED, multiple=False)
    assert ledger.outcomes == [REFUSED, DEFERRED, DEFERRED, CONFIRMED, CONFIRMED]


def test_a_returned_message_is_not_confirmed_by_its_acknowledgement() -> None:
    """RabbitMQ returns an unroutable message and then acknowledges it."""
    ledger = attached("a", "b", "a")
    send_all(ledger)
    ledger.returned(ledger.batch[0].id, RETURNED)
    ledger.answer(2, CONFIRMED, multiple=True)
    assert ledger.outcomes == [RETURNED, CONFIRMED, DEFERRED]


def test_an_event_id_is_never_twice_in_flight() -> None:
    """One event to two routing keys: with both in flight a return could be charged to the wrong one."""
    ledger = attached(None, None, None)
    ledger.batch[1].id = ledger.batch[2].id = ledger.batch[0].id
    assert send_all(ledger) == [0]
    ledger.returned(ledger.batch[0].id, RETURNED)
    ledger.answer(1, CONFIRMED, multiple=False)
    assert send_all(ledger) == [1]
    ledger.answer(2, CONFIRMED, multiple=False)
    assert send_all(ledger) == [2]
    ledger.answer(3, CONFIRMED, multiple=False)
    assert ledger.outcomes == [RETURNED, CONFIRMED, CONFIRMED]


def test_a_message_that_was_never_sent_can_be_settled() -> None:
    """Too large for the wire, say: it takes no delivery tag."""
    ledger = attached("a", "a", "b")
    index = ledger.take()
    assert index == 0
    ledger.settle(index, rejected("too large"))
    assert send_all(ledger) == [2]
    ledger.answer(1, CONFIRMED, multiple=False)
    assert [outcome.status for outcome in ledger.outcomes] == [Status.REJECTED, Status.DEFERRED, Status.CONFIRMED]


def test_a_lost_channel_sends_what_was_in_flight_again_first() -> None:
    ledger = attached("a", "b", "a", None)
    send_all(ledger)
    ledger.answer(2, CONFIRMED, multiple=False)
    ledger.rewind()
    ledger.attach(1)
    assert send_all(ledger) == [0, 3]


def test_a_returned_message_of_a_lost_channel_is_settled() -> None:
    """The broker has said that it did not take it: to send it again would only be returned again."""
    ledger = attached("a", "a", "b")
    send_all(ledger)
    ledger.returned(ledger.batch[0].id, RETURNED)
    ledger.rewind()
    ledger.attach(1)
    assert send_all(ledger) == [2]
    ledger.answer(1, CONFIRMED, multiple=False)
    assert ledger.outcomes == [RETURNED, DEFERRED, CONFIRMED]


def test_the_window_bounds_what_is_in_flight() -> None:
    ledger = attached(None, None, None)
    ledger.window = 2
    assert send_all(ledger) == [0, 1]
    ledger.answer(1, CONFIRMED, multiple=False)
    assert send_all(ledger) == [2]


def test_messages_in_flight_can_fail_alone() -> None:
    """What was not sent yet stays open; the followers of what failed do not."""
    ledger = attached("a", "a", "b")
    ledger.window = 1
    send_all(ledger)
    ledger.fail_in_flight(REFUSED)
    assert ledger.open == 1
    ledger.fail(DOWN)
    assert ledger.outcomes == [REFUSED, DEFERRED, DOWN]


def test_failing_all_keeps_what_is_known() -> None:
    ledger = attached("a", "b", "b")
    send_all(ledger)
    ledger.answer(1, CONFIRMED, multiple=False)
    ledger.fail(DOWN)
    assert ledger.outcomes == [CONFIRMED, DOWN, DOWN]


@pytest.mark.parametrize("event_id", ["unknown", None])
def test_a_return_of_something_else_is_an_error(event_id: str | None) -> None:
    ledger = attached("a")
    send_all(ledger)
    with pytest.raises(UnexpectedReply):
        ledger.returned(event_id, RETURNED)


def test_an_answer_to_an_unused_tag_is_an_error() -> None:
    ledger = attached("a")
    send_all(ledger)
    with pytest.raises(UnexpectedReply):
        ledger.answer(2, CONFIRMED, multiple=True)


class Broker:
    """Answers a ledger at random, and checks on each message what PROTOCOLS.md 20 asks for."""

    def __init__(self, batch: list[Message], data: st.DataObject) -> None:
        self.ledger = Ledger(batch)
        self.data = data
        self.next_tag = 1
        self.in_flight: dict[int, int] = {}
        self.returned: set[int] = set()
        self.refused: set[int] = set()
        self.taken: set[int] = set()

    def run(self) -> list[Outcome]:
        self.ledger.attach(self.next_tag)
        while self.ledger.open:
            self.pump()
            if self.ledger.open:
                assert self.in_flight, "nothing in flight and nothing to send, but messages are open"
                self.answer()
        return self.ledger.outcomes

    def pump(self) -> None:
        for index in iter(self.ledger.take, None):
            message = self.ledger.batch[index]
            others = [self.ledger.batch[other] for other in self.in_flight.values()]
            assert message.id not in [other.id for other in others]
            assert message.key is None or message.key not in [other.key for other in others]
            self.ledger.sent(index)
            self.in_flight[self.next_tag] = index
            self.next_tag += 1

    def answer(self) -> None:
        tag = self.data.draw(st.sampled_from(sorted(self.in_flight)))
        multiple = self.data.draw(st.booleans())
        concerned = [other for other in self.in_flight if other == tag or (multiple and other < tag)]
        match self.data.draw(st.sampled_from(["ack", "ack", "ack", "nack", "return", "lost"])):
            case "ack":
                self.ledger.answer(tag, CONFIRMED, multiple=multiple)
                self.taken |= {self.in_flight.pop(other) for other in concerned} - self.returned
            case "nack":
                self.ledger.answer(tag, REFUSED, multiple=multiple)
                self.refused |= {self.in_flight.pop(other) for other in concerned}
            case "return" if self.in_flight[tag] not in self.returned:
                self.ledger.returned(self.ledger.batch[self.in_flight[tag]].id, RETURNED)
                self.returned.add(self.in_flight[tag])
            case "lost":
                self.ledger.rewind()
                self.in_flight.clear()
                self.next_tag = self.data.draw(st.integers(1, 5))
                self.ledger.window = self.data.draw(st.integers(1, 10))
                self.ledger.attach(self.next_tag)


@settings(max_examples=400, deadline=None)
@given(
    keys=st.lists(st.sampled_from([None, "a", "b", "c"]), max_size=14),
    repeated_ids=st.lists(st.tuples(st.integers(0, 13), st.integers(0, 13)), max_size=3),
    data=st.data(),
)
def test_whatever_the_broker_answers_the_rules_hold(
    keys: list[str | None], repeated_ids: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Confirmed means acknowledged and not returned; the confirmed messages of a key are its first ones."""
    batch = batch_of(*keys)
    for one, other in repeated_ids:
        if max(one, other) < len(batch):
            batch[one].id = batch[other].id
    broker = Broker(batch, data)
    outcomes = broker.run()
    confirmed = {index for index, outcome in enumerate(outcomes) if outcome is CONFIRMED}
    assert confirmed == broker.taken
    assert not confirmed & (broker.returned | broker.refused)
    by_key: dict[str, list[bool]] = defaultdict(list)
    for message, outcome in zip(batch, outcomes, strict=True):
        if message.key is not None:
            by_key[message.key].append(outcome is CONFIRMED)
    for confirmations in by_key.values():
        assert confirmations == sorted(confirmations, reverse=True)
