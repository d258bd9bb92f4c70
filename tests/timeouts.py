"""A hang becomes a failure with a name and a traceback, not a run that never ends."""

from __future__ import annotations

import faulthandler
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["time_limit"]

INSIST_SECONDS = 5.0
"""The alarm rings again: a callback that was interrupted may have swallowed the failure."""


@contextmanager
def time_limit(item: pytest.Item, seconds: float) -> Iterator[None]:
    """Fail whatever runs inside when the time is over; prints where every thread is."""

    def ring(_signal: int, _frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
        pytest.fail(f"{item.nodeid} still ran after {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, INSIST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
