"""Fixtures of the acceptance tests."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from tests.acceptance.pods import Pods

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pods() -> Iterator[Pods]:
    """Starts pods; afterwards all of them are ended, and none may have logged an error or a traceback."""
    made = Pods()
    try:
        yield made
    finally:
        complaints = made.close()
    assert not complaints, "\n".join(complaints)


@pytest.fixture
def seed() -> int:
    """Of everything random in a test; RELAY_TEST_SEED repeats a run (as far as processes can be repeated)."""
    chosen = int(os.environ.get("RELAY_TEST_SEED") or random.SystemRandom().randrange(1_000_000))
    print(f"RELAY_TEST_SEED={chosen}")
    return chosen
