"""A key with several destinations in one batch is sent in rounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relay.sinks.kafka.delivery import _rounds
from relay.testing.messages import make_message


def test_one_destination_for_each_key_is_one_round() -> None:
    """However many destinations the batch has."""
    batch = [make_message(f"t{n % 3}", key=f"k{n % 3}") for n in range(12)]
    assert _rounds(batch) == [list(range(12))]


def test_a_key_that_moves_begins_a_round_and_holds_up_nobody() -> None:
    """Other keys, and those without one, stay in the first."""
    batch = [
        make_message(destination, key=key)
        for destination, key in [("a", "x"), ("b", "y"), ("b", "x"), ("b", "x"), ("a", None), ("a", "x"), ("b", "y")]
    ]
    assert _rounds(batch) == [[0, 1, 4, 6], [2, 3], [5]]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["x", "y", None]))))
def test_rounds_keep_every_message_and_the_order_of_keys(sent: list[tuple[str, str | None]]) -> None:
    """Each index once; in a round a key has one destination; over the rounds its messages are in order."""
    batch = [make_message(destination, key=key) for destination, key in sent]
    rounds = _rounds(batch)
    assert sorted(index for indexes in rounds for index in indexes) == list(range(len(batch)))
    for indexes in rounds:
        for key in "xy":
            assert len({batch[index].destination for index in indexes if batch[index].key == key}) <= 1
    for key in "xy":
        order = [index for indexes in rounds for index in indexes if batch[index].key == key]
        assert order == sorted(order)
