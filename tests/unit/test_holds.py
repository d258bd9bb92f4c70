"""Which keys are held, against a plain model, and what waits for them."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from relay.pipeline.holds import Holds, HoldState
from relay.testing.messages import make_message
from relay.types import Lease, Message

LEASES = [Lease(0, 1), Lease(1, 1)]
LANE = st.sampled_from(LEASES)
KEY = st.sampled_from(["a", "b", "c"])


def event(lease: Lease, key: str | None) -> Message:
    message = make_message("t", key=key)
    message.lease = lease
    return message


class Model(RuleBasedStateMachine):
    """Each key's state kept apart: held, closing with those that wait, or free; and lanes held as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = Holds()
        self.whole = dict.fromkeys(LEASES, False)
        self.keys: dict[tuple[Lease, str], HoldState] = {}
        self.waiting: dict[tuple[Lease, str], list[Message]] = {}

    def state(self, lease: Lease, key: str) -> HoldState:
        return self.keys.get((lease, key), HoldState.HELD if self.whole[lease] else HoldState.FREE)

    @rule(lease=LANE, key=KEY)
    def hold(self, lease: Lease, key: str) -> None:
        if self.state(lease, key) is not HoldState.CLOSING:
            self.holds.hold(lease, key)
            self.keys[lease, key] = HoldState.HELD

    @rule(lease=LANE)
    def hold_all(self, lease: Lease) -> None:
        self.holds.hold(lease, None)
        self.whole[lease] = True
        self.keys = {k: s for k, s in self.keys.items() if k[0] is not lease or s is not HoldState.FREE}

    @rule(lease=LANE, key=KEY)
    def close(self, lease: Lease, key: str) -> None:
        if self.state(lease, key) is HoldState.HELD:
            self.holds.close(lease, key)
            self.keys[lease, key] = HoldState.CLOSING

    @rule(lease=LANE, key=KEY)
    def arrive(self, lease: Lease, key: str) -> None:
        if self.state(lease, key) is HoldState.CLOSING:
            message = event(lease, key)
            self.holds.wait(message)
            self.waiting.setdefault((lease, key), []).append(message)

    @rule(lease=LANE, key=KEY, held=st.booleans())
    def reopen(self, lease: Lease, key: str, held: bool) -> None:
        if self.state(lease, key) is HoldState.CLOSING:
            assert self.holds.reopen(lease, key, held=held) == self.waiting.pop((lease, key), [])
            self.keys[lease, key] = HoldState.HELD if held else HoldState.FREE

    @rule(lease=LANE, keys=st.sets(KEY))
    def list_keys(self, lease: Lease, keys: set[str]) -> None:
        if self.whole[lease]:
            self.holds.list_keys(lease, keys)
            self.whole[lease] = False
            closing = {k: s for k, s in self.keys.items() if s is HoldState.CLOSING or k[0] is not lease}
            self.keys = {(lease, key): HoldState.HELD for key in keys} | closing

    @rule(lease=LANE)
    def forget(self, lease: Lease) -> None:
        dropped = self.holds.forget(lease)
        expected = [message for (own, _), messages in self.waiting.items() if own is lease for message in messages]
        assert {id(message) for message in dropped} == {id(message) for message in expected}
        assert len(dropped) == len(expected)
        self.whole[lease] = False
        self.keys = {k: s for k, s in self.keys.items() if k[0] is not lease}
        self.waiting = {k: m for k, m in self.waiting.items() if k[0] is not lease}

    @invariant()
    def states_agree(self) -> None:
        for lease in LEASES:
            for key in ("a", "b", "c"):
                assert self.holds.state(event(lease, key)) is self.state(lease, key)
            whole = HoldState.HELD if self.whole[lease] else HoldState.FREE
            assert self.holds.state(event(lease, None)) is whole
        assert set(self.holds.whole()) == {lease for lease in LEASES if self.whole[lease]}

    @invariant()
    def nothing_held_is_the_fast_path(self) -> None:
        """An empty set of holds may stand for "all free" only then; and it becomes empty again."""
        if any(self.whole.values()) or any(state is not HoldState.FREE for state in self.keys.values()):
            assert self.holds

    def teardown(self) -> None:
        for lease in LEASES:
            self.holds.forget(lease)
        assert not self.holds


Model.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestHolds = Model.TestCase


def test_a_key_that_is_through_leaves_nothing_behind() -> None:
    """Memory is not kept for keys that flow again."""
    holds = Holds()
    for number in range(1000):
        holds.hold(LEASES[0], f"{number}")
        holds.close(LEASES[0], f"{number}")
        holds.reopen(LEASES[0], f"{number}", held=False)
    assert not holds
    assert holds._lanes == {}


def test_a_message_without_a_lease_is_free() -> None:
    holds = Holds()
    holds.hold(LEASES[0], "a")
    assert holds.state(make_message("t", key="a")) is HoldState.FREE
    assert holds.reopen(LEASES[1], "a", held=True) == []
