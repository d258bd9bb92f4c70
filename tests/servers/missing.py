"""What happens when a server cannot be had on this machine: a loud skip, or a failure where all are required."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["REQUIRE_SERVERS", "ServerMissing", "reasons", "skip_if_missing"]

REQUIRE_SERVERS = "RELAY_TEST_REQUIRE_SERVERS"
"""Environment variable; `1` turns a missing server from a skip into a failure (CI sets it)."""

reasons: dict[str, None] = {}
"""Why tests were skipped, each once and in order; printed at the end of the run."""


class ServerMissing(Exception):
    """The server's program is not on this machine. The text says how to get it."""


@contextmanager
def skip_if_missing() -> Iterator[None]:
    """Skip the test that asks for a server which is not installed."""
    try:
        yield
    except ServerMissing as missing:
        if os.environ.get(REQUIRE_SERVERS) == "1":
            pytest.fail(str(missing), pytrace=False)
        reasons[str(missing)] = None
        pytest.skip(str(missing))
