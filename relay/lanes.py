"""Fair share of the lanes among the pods that live: a pure function that all pods agree on.

A pod's target is `LANES // pods`, and one more for the first `LANES % pods` of them by name. Every
pod computes everyone's target from the same member list, so nobody negotiates: a pod above its
target hands lanes over, a pod below it claims free ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.types import LANES

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["surplus", "target"]


def target(pod: str, members: Iterable[str]) -> int:
    """Lanes that `pod` should own, given the names of all living members (itself included or not)."""
    names = sorted({pod, *members})
    share, rest = divmod(LANES, len(names))
    return share + (names.index(pod) < rest)


def surplus(owned: Iterable[int], wanted: int) -> list[int]:
    """Which of the owned lanes to hand over, to be left with `wanted`: the highest, always the same ones."""
    return sorted(owned)[max(wanted, 0) :]
