"""What the promises say about a finished run: nothing lost, nothing invented, each key in order."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.acceptance.consumers import Consumer
    from tests.acceptance.writers import Ledger
    from tests.outbox import Outbox

__all__ = ["Judgement", "assert_at_rest", "judge", "left_behind"]


@dataclass(frozen=True)
class Judgement:
    """Findings of a run; `repeats` are allowed under faults."""

    missing: set[str]
    invented: set[str]
    rolled_back: set[str]
    out_of_order: dict[str, list[str]]
    repeats: int

    def assert_kept(self) -> None:
        """Exactly the committed events, each key's first deliveries in its order."""
        assert not self.missing, f"{len(self.missing)} committed events never came: {sorted(self.missing)[:5]}"
        assert not self.rolled_back, f"rolled back, and delivered: {sorted(self.rolled_back)[:5]}"
        assert not self.invented, f"nobody committed these: {sorted(self.invented)[:5]}"
        assert not self.out_of_order, f"{len(self.out_of_order)} keys out of order: {self._first_disorder()}"

    def _first_disorder(self) -> str:
        key, events = next(iter(self.out_of_order.items()))
        return f"{key}: {events}"


def judge(ledger: Ledger, consumer: Consumer) -> Judgement:
    """Compare what was committed with what came."""
    delivered = consumer.ids
    first = list(dict.fromkeys(delivered))
    key_of = {delivery.id: delivery.key for delivery in consumer.deliveries}
    by_key: dict[str | None, list[str]] = defaultdict(list)
    for event in first:
        by_key[key_of[event]].append(event)
    return Judgement(
        missing=ledger.ids - set(first),
        invented=set(first) - ledger.ids - ledger.rolled_back,
        rolled_back=set(first) & ledger.rolled_back,
        out_of_order=_disorder(ledger.committed, by_key),
        repeats=len(delivered) - len(first),
    )


def _disorder(committed: Mapping[str, Sequence[str]], came: Mapping[str | None, Sequence[str]]) -> dict[str, list[str]]:
    found = {}
    for key, wanted in committed.items():
        there = set(came.get(key, ()))
        expected = [event for event in wanted if event in there]
        actual = [event for event in came.get(key, ()) if event in set(wanted)]
        if actual != expected:
            at = next(i for i, (a, b) in enumerate(zip(actual, expected, strict=True)) if a != b)
            found[key] = [f"at {at}: came {actual[at : at + 3]}, expected {expected[at : at + 3]}"]
    return found


def left_behind(outbox: Outbox) -> dict[str, int]:
    """Rows that are not settled, parked deliveries, dead letters."""
    ((unsettled, parked, dead),) = outbox.execute(
        "SELECT (SELECT count(*) FROM {outbox} WHERE published_at IS NULL), (SELECT count(*) FROM {parked}),"
        " (SELECT count(*) FROM {dead_letter})"
    )
    return {"unsettled": unsettled, "parked": parked, "dead letters": dead}


def assert_at_rest(outbox: Outbox) -> None:
    """After a clean stop nothing is left in any table."""
    assert left_behind(outbox) == {"unsettled": 0, "parked": 0, "dead letters": 0}
