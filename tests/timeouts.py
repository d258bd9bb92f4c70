"""A hang becomes a failure with a name and a traceback, not a run that never ends."""

from __future__ import annotations

import asyncio
import contextlib
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
    """Fail whatever runs inside when the time is over; prints where every thread and task is."""

    def ring(_signal: int, _frame: FrameType | None) -> None:
        printed = sys.__stderr__ or sys.stderr
        faulthandler.dump_traceback(file=printed)
        with contextlib.suppress(RuntimeError):  # no loop is running
            for task in asyncio.all_tasks():
                task.print_stack(file=printed)
        printed.flush()
        pytest.fail(f"{item.nodeid} still ran after {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, ring)
    outer = signal.setitimer(signal.ITIMER_REAL, seconds, INSIST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # or it could ring for the wrong one
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, *outer)
