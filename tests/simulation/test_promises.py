"""The promises as invariants over seeded schedules, and planted mistakes that the schedules must notice.

`RELAY_SIMULATION_SEEDS=200 pytest tests/simulation` looks further than the few seeds of an ordinary run.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.simulation.cluster import Rules
from tests.simulation.scenario import Faults, run

SEEDS = int(os.environ.get("RELAY_SIMULATION_SEEDS", "3"))

CASES = {
    "crashes": Faults(freeze=False, outage=False),
    "freezes longer than a lease": Faults(crash=False, outage=False),
    "outages of the sink": Faults(crash=False, freeze=False),
    "outages of the database": Faults(database_outage=True),
    "events that fail for a while": Faults(crash=False, freeze=False, outage=False, flaky=0.05),
    "everything, with ambiguous answers": Faults(flaky=0.05, ambiguous=0.1, pods=3),
    "sessions that end": Faults(
        crash=False, freeze=False, outage=False, flaky=0.1, pods=3, keys=12, lost_sessions=True
    ),
    "freezes while many events fail": Faults(
        pods=3, crash=False, outage=False, freeze_rate=0.8, flaky=0.3, keys=12, seconds=40
    ),
    "poison": Faults(flaky=0.03, poison=0.03, pods=3),
    "dead letters that hold their key": Faults(flaky=0.03, poison=0.02, pods=3, hold=True),
    "two sinks, one of them down": Faults(sinks=("a", "b"), flaky=0.03, poison=0.01, pods=3, ambiguous=0.05),
    "two sinks, holds, no database": Faults(
        sinks=("a", "b"), flaky=0.03, poison=0.01, pods=3, hold=True, database_outage=True
    ),
}

# A mistake, and a schedule that notices it within the given number of seeds.
MISTAKES = {
    "a read does not ask whose the lane is": (Rules(fence_reads=False), CASES["sessions that end"], 8),
    "the floor does not wait for open transactions": (Rules(wait_for_holders=False), CASES["crashes"], 2),
    "a new owner does not load its held keys": (Rules(load_held=False), CASES["dead letters that hold their key"], 4),
}


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("case", CASES)
def test_every_promise_is_kept(case: str, seed: int) -> None:
    """Nothing lost, nothing invented, order for each key, no dead letter without cause, holds respected."""
    report = run(seed, CASES[case])
    assert report.events > 100, "the schedule hardly did anything"
    assert report.violations == []


@pytest.mark.parametrize("seed", range(SEEDS))
def test_without_faults_nothing_is_repeated(seed: int) -> None:
    """Four pods share the lanes and hand some over: exactly one message for each event."""
    report = run(seed, Faults(crash=False, freeze=False, outage=False, pods=4))
    assert report.violations == []
    assert report.repeats == 0


def test_an_outage_consumes_no_attempts() -> None:
    """With one attempt allowed, an outage alone still kills nothing."""
    report = run(1, replace(CASES["outages of the sink"], attempts_max=1))
    assert report.violations == []
    assert report.dead == 0


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_noticed(mistake: str) -> None:
    """Without the rule some promise is broken: the schedules can fail."""
    rules, faults, seeds = MISTAKES[mistake]
    assert any(run(seed, faults, rules).violations for seed in range(seeds))
