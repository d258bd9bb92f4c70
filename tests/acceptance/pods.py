"""Real `relay run` processes: started, frozen, killed, stopped, and asked over HTTP as an orchestrator would.

Waiting is for events (a probe's answer, a line of the log, the end of a process), with a deadline that
only a failure reaches.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, ClassVar

import psutil
from prometheus_client.parser import text_string_to_metric_families

from relay.demo.processes import Server

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from tests.outbox import Outbox

__all__ = ["Pod", "Pods", "eventually", "relay_command", "settings_of"]

PATIENCE_SECONDS = 45.0
"""For anything that should take a second: machines that run all tests are busy."""
_LOOK_SECONDS = 0.03

Settings = dict[str, Any]


def toml(settings: Mapping[str, Any], path: str = "") -> str:
    """Settings as TOML: tables, arrays of tables, and values, which JSON writes the same way."""
    plain = {k: v for k, v in settings.items() if not isinstance(v, dict) and not _is_tables(v)}
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in plain.items()]
    for key, value in settings.items():
        name = f"{path}{json.dumps(key)}"
        if isinstance(value, dict):
            lines.append(f"[{name}]\n{toml(value, f'{name}.')}")
        elif _is_tables(value):
            lines += [f"[[{name}]]\n{toml(table, f'{name}.')}" for table in value]
    return "".join(lines)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Settings:
    """`over` laid on `base`, table by table."""
    result = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if nested else value
    return result


def settings_of(outbox: Outbox, sinks: Mapping[str, Any], **sections: Any) -> Settings:
    """Settings of a pod in a hurry: short leases and retries, because tests wait for them."""
    base: Settings = {
        "database": {"dsn": outbox.relay_dsn, **outbox.options},
        "sinks": dict(sinks),
        "logging": {"format": "json"},
        "leases": {"ttl_seconds": 3.0, "margin_seconds": 0.5},
        "retry": {"base_seconds": 0.1, "cap_seconds": 1.0, "outage_cap_seconds": 0.5},
        "pipeline": {"grace_seconds": 8.0},
    }
    return merged(base, sections)


def clean_environment(folder: Path) -> dict[str, str]:
    """No variable that would steer the relay; a folder without another relay.toml."""
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder), "LC_ALL": "C.UTF-8", "TZ": "UTC"}


def relay_command(
    folder: Path, *arguments: str, settings: Mapping[str, Any] | None = None, seconds: float = PATIENCE_SECONDS
) -> subprocess.CompletedProcess[str]:
    """One command line in a process of its own, to its end."""
    if settings is not None:
        (folder / "relay.toml").write_text(toml(settings), encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "relay", *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        env=clean_environment(folder),
        timeout=seconds,
    )


async def eventually(
    what: str, condition: Callable[[], Awaitable[Any]], seconds: float = PATIENCE_SECONDS, pause: float = _LOOK_SECONDS
) -> Any:
    """The first true result of `condition`."""
    try:
        async with asyncio.timeout(seconds):
            while not (result := await condition()):  # noqa: ASYNC110  # what happens in another process sets no event here
                await asyncio.sleep(pause)
            return result
    except TimeoutError:
        raise AssertionError(f"not within {seconds:.0f} s: {what}") from None


class Pod(Server):
    """One `relay run`. Output goes to the log of this start; `frozen` while it is stopped by SIGSTOP."""

    name: ClassVar[str] = "pod"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.settings = merged({"http": {"bind": f"{self.host}:{self.port}"}}, settings)
        self.frozen = False
        self.leaving = False
        """It was sent SIGTERM; a second one would end it at once."""

    def prepare(self) -> None:
        """Write relay.toml."""
        (self.folder / "relay.toml").write_text(toml(self.settings), encoding="utf-8")

    def command(self) -> Sequence[str | Path]:
        """The command as an operator types it."""
        return [sys.executable, "-m", "relay", "run"]

    def environment(self) -> Mapping[str, str]:
        """Nothing of ours."""
        return clean_environment(self.folder)

    def is_ready(self) -> bool:
        """Started, no more: the tests wait for what they need (`live`, `ready`, `exit_code`)."""
        return True

    # -- signals ---------------------------------------------------------------------------------

    def terminate(self) -> None:
        """SIGTERM, and do not wait."""
        self.leaving = True
        os.kill(self.pid, signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = True
        super().freeze()

    def thaw(self) -> None:
        """SIGCONT."""
        super().thaw()
        self.frozen = False

    async def exit_code(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Wait for its end."""
        process = self._process
        assert process is not None

        async def ended() -> bool:
            return process.poll() is not None

        await eventually(f"{self.name} {process.pid} ends", ended, seconds)
        return int(process.returncode)

    async def stopped(self, seconds: float = PATIENCE_SECONDS) -> int:
        """SIGTERM and its exit code."""
        self.terminate()
        return await self.exit_code(seconds)

    # -- what it says ----------------------------------------------------------------------------

    async def get(self, path: str) -> tuple[int, str]:
        """Status and body of an HTTP answer; 0 when nobody answers."""
        with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError):
            async with asyncio.timeout(5):
                reader, writer = await asyncio.open_connection(self.host, self.port)
                try:
                    writer.write(f"GET {path} HTTP/1.0\r\nHost: {self.host}\r\n\r\n".encode())
                    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
                finally:
                    writer.close()
            return int(head.split()[1]), body.decode()
        return 0, ""

    async def is_live(self) -> bool:
        """/livez says yes."""
        return (await self.get("/livez"))[0] == 200

    async def is_fully_ready(self) -> bool:
        """/readyz says yes."""
        return (await self.get("/readyz"))[0] == 200

    async def live(self) -> Pod:
        """Wait for /livez."""
        await self._until("live", self.is_live)
        return self

    async def ready(self) -> Pod:
        """Wait for /readyz."""
        await self._until("ready", self.is_fully_ready)
        return self

    async def unready(self) -> str:
        """Wait until /readyz says no; its reasons."""

        async def refused() -> str:
            status, body = await self.get("/readyz")
            return body if status == 503 else ""

        return str(await self._until("not ready", refused))

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of a sample over the labels that are not given."""
        status, text = await self.get("/metrics")
        assert status == 200, f"/metrics answered {status}"
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    @property
    def rss_mb(self) -> float:
        """Resident memory."""
        return float(psutil.Process(self.pid).memory_info().rss / 1e6)

    @property
    def open_files(self) -> int:
        """Number of file descriptors."""
        return int(psutil.Process(self.pid).num_fds())

    @property
    def printed(self) -> str:
        """Everything it has written."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    async def says(self, text: str, count: int = 1) -> None:
        """Wait for a text in its log."""

        async def said() -> bool:
            return self.printed.count(text) >= count

        await self._until(f"says {text!r}", said)

    async def _until(self, what: str, condition: Callable[[], Awaitable[Any]]) -> Any:
        async def alive() -> Any:
            if not self.running:
                raise AssertionError(
                    f"pod ended with {self._process and self._process.poll()}:\n{self.printed[-3000:]}"
                )
            return await condition()

        try:
            return await eventually(f"pod {what}", alive)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.printed[-3000:]}") from None


class Pods:
    """The pods of one test. None may print a traceback or log an error, however it was treated."""

    def __init__(self) -> None:
        self.all: list[Pod] = []
        self.expected_errors: list[str] = []
        """Texts of log lines at level error that a test provokes on purpose."""

    async def launch(self, settings: Mapping[str, Any]) -> Pod:
        """Start a pod; it need not become ready."""
        pod = Pod(settings)
        self.all.append(pod)
        await asyncio.to_thread(pod.start)
        return pod

    async def start(self, settings: Mapping[str, Any]) -> Pod:
        """Start a pod and wait until it is ready."""
        return await (await self.launch(settings)).ready()

    async def start_many(self, count: int, settings: Mapping[str, Any]) -> list[Pod]:
        """Start pods together and wait until all are ready."""
        return list(await asyncio.gather(*(self.start(settings) for _ in range(count))))

    @property
    def running(self) -> list[Pod]:
        """Those that run, frozen ones included."""
        return [pod for pod in self.all if pod.running]

    async def stop_all(self) -> None:
        """SIGTERM to all, and every one must end with 0."""
        pods = self.running
        for pod in pods:
            if not pod.leaving:
                pod.terminate()
        assert [await pod.exit_code() for pod in pods] == [0] * len(pods)

    def close(self) -> list[str]:
        """End all, and say what they should not have printed."""
        complaints: list[str] = []
        for number, pod in enumerate(self.all):
            print(f"--- pod {number} (port {pod.port}), last lines:\n{pod.printed[-2500:]}")
            complaints += [f"pod {number}: {line}" for line in self._bad_lines(pod)]
            pod.close()
        return complaints

    def _bad_lines(self, pod: Pod) -> list[str]:
        lines = pod.printed.splitlines()
        bad = [line for line in lines if '"level":"error"' in line or '"level":"critical"' in line]
        bad += [line for line in lines if "Traceback" in line or line.startswith(("Exception", "Task exception"))]
        return [line for line in bad if not any(text in line for text in self.expected_errors)]


def seconds_since(moment: float) -> float:
    """By the monotonic clock."""
    return time.monotonic() - moment
