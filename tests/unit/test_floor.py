"""The horizon against a model of transactions that take numbers, wait, and end."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from relay.floor import Horizon, Sample


class Model(RuleBasedStateMachine):
    """A transaction holds its lock from before its first number until it is visible.

    The two halves of a look at the server are apart, so that anything may happen between them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.horizon = Horizon()
        self.last_value = 0
        self.names = 0
        self.numbers: dict[str, set[int]] = {}
        self.looked: int | None = None

    @rule()
    def begin(self) -> None:
        self.names += 1
        self.numbers[f"{self.names}"] = set()

    @rule(data=st.data())
    def take_a_number(self, data: st.DataObject) -> None:
        if self.numbers:
            self.last_value += 1
            self.numbers[data.draw(st.sampled_from(sorted(self.numbers)))].add(self.last_value)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.numbers:
            del self.numbers[data.draw(st.sampled_from(sorted(self.numbers)))]

    @rule()
    def look_at_the_sequence(self) -> None:
        self.looked = self.last_value

    @rule()
    def look_at_the_locks(self) -> None:
        if self.looked is not None:
            assert self.horizon.observe(Sample("server", self.looked, set(self.numbers))) in (True, False)
            self.looked = None

    @invariant()
    def nothing_appears_below(self) -> None:
        """Numbers of open transactions, and all that will be given out, lie above."""
        assert self.horizon.stable <= self.last_value
        assert all(number > self.horizon.stable for numbers in self.numbers.values() for number in numbers)

    def teardown(self) -> None:
        """It is not safe by never rising: when everybody has ended, two looks are enough."""
        for _ in range(2):
            self.horizon.observe(Sample("server", self.last_value, set()))
        assert self.horizon.stable == self.last_value


Model.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestHorizon = Model.TestCase


def test_a_change_of_the_server_starts_from_nothing() -> None:
    """Numbers of another incarnation mean something else: the caller is told to reset its floors."""
    horizon = Horizon()
    assert horizon.observe(Sample("one", 100, set()))
    assert horizon.stable == 100
    assert not horizon.observe(Sample("two", 50, {"1/2"}))
    assert horizon.stable == 0
    assert horizon.observe(Sample("two", 60, {"1/3"}))
    assert horizon.stable == 50


def test_later_transactions_do_not_hold_an_older_candidate() -> None:
    horizon = Horizon()
    horizon.observe(Sample("s", 10, {"a"}))
    horizon.observe(Sample("s", 20, {"a", "b"}))
    assert horizon.stable == 0
    horizon.observe(Sample("s", 30, {"b", "c"}))
    assert horizon.stable == 10
    horizon.observe(Sample("s", 40, {"c"}))
    assert horizon.stable == 10
    horizon.observe(Sample("s", 50, {"d"}))
    assert horizon.stable == 30
