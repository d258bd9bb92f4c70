"""Repeating a database call until it succeeds: the database is away sometimes, and nothing may be lost for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from relay.errors import RelayError
from relay.retry import ErrorPolicy, policy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from structlog.typing import FilteringBoundLogger

    from relay.retry import Backoff

__all__ = ["Recovery"]

T = TypeVar("T")


class Recovery:
    """Retries what `relay.retry.policy` retries, with backoff, for ever; everything else passes through."""

    def __init__(self, backoff: Backoff, log: FilteringBoundLogger) -> None:
        self._backoff, self._log = backoff, log

    async def until_done(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Result of `call`. Logs the first failure and the recovery, one line each."""
        failures = 0
        while True:
            try:
                result = await call()
            except RelayError as error:
                if policy(error) is not ErrorPolicy.RETRY:
                    raise
                failures += 1
                if failures == 1:
                    self._log.warning("database unavailable, retrying", doing=what, error=str(error))
                await asyncio.sleep(self._backoff.delay(failures))
            else:
                if failures:
                    self._log.info("database is back", doing=what, failures=failures)
                return result
