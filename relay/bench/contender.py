"""A process that is measured: the relay as an operator runs it, or the raw loop. CPU and memory come from /proc."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
import urllib.request
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from relay.bench.accounts import cpu_seconds_of, rss_mb_of
from relay.errors import RelayError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from relay.bench.brokers import Target

__all__ = ["Contender", "ContenderFailed", "Running", "raw", "relay"]

_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 30.0


class ContenderFailed(RelayError):
    """It ended by itself, or never became ready; the text ends with what it printed."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A name for the table, a command, and files that it needs (name to text; `{folder}` in the command)."""

    name: str
    command: tuple[str, ...]
    files: Mapping[str, str]
    ready_url: str | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Running]:
        """Start it; killed at the end if it does not stop by itself."""
        with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
            started_at = time.monotonic()
            running = Running(self, await self._start(folder), Path(folder, "log"), started_at)
            try:
                yield running
            finally:
                await running.stop()

    async def _start(self, folder: str) -> asyncio.subprocess.Process:
        for name, text in self.files.items():
            _write(Path(folder, name), text)
        command = [part.replace("{folder}", folder) for part in self.command]
        output = os.open(Path(folder, "log"), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            return await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=_environment()
            )
        finally:
            os.close(output)


class Running:
    """A contender at work."""

    def __init__(self, contender: Contender, process: asyncio.subprocess.Process, log: Path, started_at: float) -> None:
        self.contender, self.pid, self.started_at = contender, process.pid, started_at
        self._process, self._log = process, log

    def check(self) -> None:
        """Raises ContenderFailed if it has ended."""
        if self._process.returncode is not None:
            raise self._failed(f"ended with {self._process.returncode}")

    def cpu_seconds(self) -> float:
        """User and system time so far."""
        return cpu_seconds_of(self.pid)

    def rss_mb(self, *, peak: bool = False) -> float:
        """Resident memory in MB: now, or the most that it ever was."""
        return rss_mb_of(self.pid, peak=peak)

    async def ready(self) -> float:
        """Wait until it says that it is; seconds since its start."""
        while True:
            self.check()
            if self.contender.ready_url is None or await asyncio.to_thread(_answers, self.contender.ready_url):
                return time.monotonic() - self.started_at
            if time.monotonic() - self.started_at > _START_SECONDS:
                raise self._failed(f"was not ready after {_START_SECONDS:.0f} s")
            await asyncio.sleep(0.02)

    async def ended(self) -> None:
        """Wait until it ends by itself."""
        await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL for what does not go."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def _failed(self, what: str) -> ContenderFailed:
        tail = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
        return ContenderFailed(f"{self.contender.name} {what}; its output ends with:\n{tail}")


def relay(dsn: str, target: Target, port: int, *, settle: str = "delete", prefix: Sequence[str] = ()) -> Contender:
    """`relay run` with the smallest configuration for this path; `prefix` are arguments of Python."""
    sections: dict[str, dict[str, Any]] = {
        "database": {"dsn": dsn},
        "source.polling": {"settle": settle},
        "sinks.bench": {"type": target.sink, **target.options},
        "http": {"bind": f"127.0.0.1:{port}"},
        "logging": {"level": "warning"},
    }
    return Contender(
        "relay",
        (sys.executable, *prefix, "-m", "relay", "run", "--config", "{folder}/relay.toml"),
        {"relay.toml": _toml(sections)},
        f"http://127.0.0.1:{port}/readyz",
    )


def raw(dsn: str, target: Target, *, settle: str = "delete") -> Contender:
    """The raw loop of this path (relay.bench.raw)."""
    job = {"dsn": dsn, "sink": target.sink, "options": target.options, "topic": target.topic, "settle": settle}
    return Contender("raw loop", (sys.executable, "-m", "relay.bench.raw", orjson.dumps(job).decode()), {})


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _environment() -> dict[str, str]:
    """Ours without what would configure the relay."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RELAY_")}


def _toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Strings, numbers and lists are written alike in JSON and TOML."""
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {orjson.dumps(value).decode()}\n" for key, value in values.items())
        for name, values in sections.items()
    )


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310  # our own http URL
            return bool(answer.status == 200)  # noqa: PLR2004
    except OSError:
        return False
