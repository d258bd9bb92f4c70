"""Parked rows of one key on their way: confirmed in order, and over at the first that is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relay.pipeline.runs import Run, Runs
from relay.testing.messages import make_message
from relay.types import Lease, Message


@pytest.fixture
def rows() -> list[Message]:
    """Three rows of one key."""
    lease, made = Lease(3, 1), [make_message("t", key="k") for _ in range(3)]
    for number, message in enumerate(made, 1):
        message.lease, message.parked = lease, number
    return made


def test_a_run_is_over_with_its_last_row(rows: list[Message]) -> None:
    run = Run(rows)
    for message in rows:
        assert run.open
        run.confirmed(message)
    assert not run.open
    assert run.result.confirmed == rows
    assert run.result.failed is None
    assert (run.lease.lane, run.key) == (3, "k")


def test_a_failure_ends_the_run(rows: list[Message]) -> None:
    """What was confirmed before it counts; a late confirmation of what is behind it does not."""
    run = Run(rows)
    run.confirmed(rows[0])
    result = run.fail()
    run.confirmed(rows[2])
    assert not run.open
    assert result.confirmed == rows[:1]


def test_rows_of_a_run_that_is_over_are_not_sent(rows: list[Message]) -> None:
    told: list[bool] = []
    runs = Runs(lambda: told.append(True))
    assert not runs
    run = Run(rows)
    runs.add(run, rows)
    assert runs
    assert runs.of(rows[2]) is run
    run.fail()
    runs.closed()
    assert runs.of(rows[2]) is None
    assert told == [True]
    runs.clear()
    assert not runs


def test_an_event_that_was_never_parked_has_no_run(rows: list[Message]) -> None:
    runs = Runs(lambda: None)
    runs.add(Run(rows), rows)
    assert runs.of(make_message("t")) is None


def test_what_an_earlier_run_left_behind_is_not_taken_for_its_successor(rows: list[Message]) -> None:
    """A frozen pod had the old copy still queued when the row was read again, and sent later rows of the key before it."""
    runs = Runs(lambda: None)
    runs.add(Run(rows), rows)
    runs.clear()
    again = [replace(row) for row in rows]
    run = Run(again)
    runs.add(run, again)
    assert runs.of(again[0]) is run
    assert runs.of(rows[0]) is None
