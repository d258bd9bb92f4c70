"""A test that hangs fails with its name, whatever it hangs in."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.timeouts import time_limit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """What every thread does is printed; here not to the terminal."""
    path = tmp_path / "stderr"
    with path.open("w") as printed:
        monkeypatch.setattr(sys, "__stderr__", printed)
        yield path


def test_a_sleep_is_interrupted(request: pytest.FixtureRequest) -> None:
    """The failure names the test."""
    with (
        pytest.raises(pytest.fail.Exception, match="test_a_sleep_is_interrupted still ran"),
        time_limit(request.node, 0.1),
    ):
        time.sleep(10)


def test_an_await_is_interrupted(request: pytest.FixtureRequest, printed: Path) -> None:
    """The failure comes out of the loop that waits; what its tasks wait for is printed."""
    with (
        pytest.raises(pytest.fail.Exception, match="still ran"),
        time_limit(request.node, 0.1),
        asyncio.Runner() as runner,
    ):
        runner.run(forget_to_answer())
    assert "in forget_to_answer" in printed.read_text(encoding="utf-8")


async def forget_to_answer() -> None:
    await asyncio.Event().wait()


def test_what_ends_in_time_is_left_alone(request: pytest.FixtureRequest) -> None:
    with time_limit(request.node, 0.1):
        pass
    time.sleep(0.2)


def test_the_limit_around_it_goes_on(request: pytest.FixtureRequest) -> None:
    """A limit inside another one does not switch it off."""

    def hang_after_an_inner_limit() -> None:
        with time_limit(request.node, 0.3):
            with time_limit(request.node, 10):
                pass
            time.sleep(5)

    with pytest.raises(pytest.fail.Exception, match="after 0 s"):
        hang_after_an_inner_limit()
