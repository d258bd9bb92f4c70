"""Who used how much CPU: one process, and the sessions of one database, read from /proc.

On a machine that others use too, wall time says little; CPU time per event hardly changes with their load. A server
on another machine is not seen: its share is then 0.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import asyncpg

__all__ = ["Sessions", "cpu_seconds_of", "ended_children_seconds", "postmaster_of", "rss_mb_of"]

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_SESSIONS: Final = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on (proc(5)); the second may hold blanks. Empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return []


def cpu_seconds_of(pid: int) -> float:
    """CPU time of a process, all its threads; 0 when it is gone.

    In nanoseconds where the kernel has them: a small backlog is settled within a tick of 10 ms.
    """
    try:
        threads = [path.read_text(encoding="utf-8") for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    except OSError:
        threads = []
    if threads:
        return sum(int(text.split()[0]) for text in threads) / 1e9
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def ended_children_seconds(pid: int) -> float:
    """CPU time of those children that have ended: for a postmaster, of closed sessions."""
    fields = _stat(pid)
    return (int(fields[13]) + int(fields[14])) / _TICKS if fields else 0.0


def rss_mb_of(pid: int, *, peak: bool = False) -> float:
    """Resident memory in MB: now, or the most that it ever was."""
    wanted = "VmHWM:" if peak else "VmRSS:"
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(wanted):
            return int(line.split()[1]) / 1024
    return 0.0


async def postmaster_of(connection: asyncpg.Connection[Any]) -> int:
    """Process id of the server, 0 if it runs elsewhere."""
    fields = _stat(await connection.fetchval("SELECT pg_backend_pid()"))
    return int(fields[1]) if fields else 0


class Sessions:
    """CPU time of the other sessions of a database, between two looks."""

    def __init__(self, connection: asyncpg.Connection[Any]) -> None:
        self._connection = connection
        self._before: dict[int, float] = {}

    async def begin(self) -> None:
        """Note what each has used so far."""
        self._before = await self._used()

    async def seconds(self) -> float:
        """What they have used since `begin`; sessions that are new count from their start."""
        return sum(used - self._before.get(pid, 0.0) for pid, used in (await self._used()).items())

    async def _used(self) -> dict[int, float]:
        return {row[0]: cpu_seconds_of(row[0]) for row in await self._connection.fetch(_SESSIONS)}
