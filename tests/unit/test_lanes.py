"""Fair share: everybody computes the same one, and it is fair."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from relay.lanes import surplus, target
from relay.types import LANES

NAMES = st.sets(st.text(min_size=1, max_size=5), min_size=1, max_size=70)


@settings(max_examples=40, deadline=None)
@given(NAMES)
def test_targets_of_all_pods_are_all_lanes(members: set[str]) -> None:
    """No lane is wanted twice and none by nobody; nobody is more than one lane apart."""
    targets = [target(pod, members) for pod in members]
    assert sum(targets) == LANES
    assert max(targets) - min(targets) <= 1


@settings(max_examples=40, deadline=None)
@given(NAMES, st.randoms())
def test_the_order_of_the_list_does_not_matter(members: set[str], rng: object) -> None:
    """Two pods that read the members in another order agree about everybody."""
    backwards = sorted(members, reverse=True)
    assert [target(pod, members) for pod in backwards] == [target(pod, [*backwards, *members]) for pod in backwards]


@settings(max_examples=40, deadline=None)
@given(NAMES, st.text(min_size=1, max_size=5))
def test_a_pod_that_is_not_listed_yet_counts_itself(members: set[str], pod: str) -> None:
    assert target(pod, members) == target(pod, members | {pod})


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, LANES - 1)), st.integers(-1, LANES))
def test_what_is_handed_over_leaves_what_is_wanted(owned: set[int], wanted: int) -> None:
    """Always the same lanes, the highest: a pod that computes twice does not hand over twice as much."""
    gone = surplus(owned, wanted)
    assert len(owned) - len(gone) == min(len(owned), max(wanted, 0))
    assert not gone or min(gone) > max(owned - set(gone), default=-1)
