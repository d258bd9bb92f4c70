"""Applications that commit one event after the other: pgbench if there is one, else sixteen asyncpg connections."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from relay.bench.contender import ContenderFailed
from relay.bench.databases import connected
from relay.bench.workload import HEADERS, insert_script, payload

__all__ = ["Commits", "commits", "parsed"]

_INSERT: Final = "INSERT INTO outbox (topic, key, payload, headers) VALUES ($1, $2, $3, $4)"


@dataclass(frozen=True, slots=True)
class Commits:
    """How many, and how many each second."""

    count: int
    per_second: float


async def commits(dsn: str, topic: str, clients: int, seconds: float) -> Commits:
    """Commit as fast as possible for so long."""
    if (program := shutil.which("pgbench")) is not None:
        return await _pgbench(program, dsn, topic, clients, seconds)
    return await _asyncpg(dsn, topic, clients, seconds)


async def _pgbench(program: str, dsn: str, topic: str, clients: int, seconds: float) -> Commits:
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        script = Path(folder, "insert.sql")
        await asyncio.to_thread(script.write_text, insert_script(topic), "utf-8")
        options = ("-n", "-M", "prepared", "-c", str(clients), "-j", "2", "-T", str(max(int(seconds), 1)))
        process = await asyncio.create_subprocess_exec(
            program, *options, "-f", script, dsn, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await process.communicate()
    return parsed(output.decode(errors="replace"))


def parsed(output: str) -> Commits:
    """What pgbench says at its end. Raises ContenderFailed with its output if that is missing."""
    count = re.search(r"transactions actually processed: (\d+)", output)
    per_second = re.search(r"tps = ([\d.]+) \(without initial connection time\)", output)
    if count is None or per_second is None:
        raise ContenderFailed(f"pgbench failed: {output[-1000:]}")
    return Commits(int(count[1]), float(per_second[1]))


async def _asyncpg(dsn: str, topic: str, clients: int, seconds: float) -> Commits:
    ends = time.monotonic() + seconds

    async def client() -> int:
        count = 0
        async with connected(dsn) as connection:
            statement = await connection.prepare(_INSERT)
            while time.monotonic() < ends:
                await statement.fetch(topic, f"customer-{count % 1000}", payload(count), HEADERS)
                count += 1
        return count

    count = sum(await asyncio.gather(*(client() for _ in range(clients))))
    return Commits(count, count / seconds)
