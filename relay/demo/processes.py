"""One server process with its port and its folder, from start until nothing of it is left.

`Server` is what every server of the demo and of the test suite is: a subclass says how it is
prepared, started and asked whether it is ready; starting, stopping, killing and freezing are here.
Each has its own process group, and a guardian process ends it if this program is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, TypedDict

import psutil

from relay.demo import guardian

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Account", "Server", "ServerFailed", "account_for_servers", "free_port", "reachable"]

LOCALHOST = "127.0.0.1"


class ServerFailed(RuntimeError):
    """A server did not start or ended by itself; the text ends with the last lines of its log."""


class _RunAs(TypedDict, total=False):
    """Arguments of `subprocess` that change the user."""

    user: int
    group: int
    extra_groups: list[int]


class Account:
    """The operating system's user that a server runs as; None means: as ourselves."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.run_as: _RunAs = {}
        if name:
            entry = pwd.getpwnam(name)
            self.run_as = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}

    def give(self, path: Path) -> None:
        """Make the account the owner of a file or folder (not of what is inside)."""
        if self.run_as:
            os.lchown(path, self.run_as["user"], self.run_as["group"])

    def can_enter(self, path: Path) -> bool:
        """Whether every folder on the way lets this account through."""
        probe = ["/bin/sh", "-c", 'cd "$1" && test -r .', "sh", str(path)]
        return subprocess.run(probe, check=False, stderr=subprocess.DEVNULL, cwd="/", **self.run_as).returncode == 0


def account_for_servers() -> Account:
    """An unprivileged account if we are root (PostgreSQL and PgBouncer refuse root), else ourselves."""
    return Account("nobody" if os.geteuid() == 0 else None)


def free_port() -> int:
    """A free TCP port on the loopback, outside the range that the kernel hands to clients.

    A client that keeps reconnecting to a stopped server's port inside that range can be given that
    very port as its own, connect to itself, and hold the port when the server wants it back.
    """
    try:
        first_of_clients = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except OSError:
        first_of_clients = 32768
    for port in random.SystemRandom().sample(range(10_000, max(first_of_clients, 12_000)), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOCALHOST, port))
            return port
    raise ServerFailed("no free port on the loopback")


def new_folder(name: str, account: Account, parents: Sequence[str]) -> Path:
    """A temporary folder inside the first parent that the account can enter."""
    for parent in parents:
        if account.can_enter(Path(parent)):
            folder = Path(tempfile.mkdtemp(prefix=f"relay-{name}-", dir=parent))
            account.give(folder)
            return folder
    raise ServerFailed(
        f"user {account.name} can enter none of {', '.join(parents)}; set TMPDIR to a folder that it can"
    )


def reachable(tree: Path, account: Account, copy_to: Path) -> Path:
    """`tree` itself if the account can read it, else a copy inside `copy_to` (a virtual environment below /root)."""
    if account.can_enter(tree):
        return tree
    copy = copy_to / tree.name
    if not copy.exists():
        shutil.copytree(tree, copy, symlinks=True, ignore=shutil.ignore_patterns("include"))
        for path in (copy, *copy.rglob("*")):
            account.give(path)
    return copy


class _Guardian:
    """Our end of the pipe to the guardian process, which is started with the first server."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def tell(self, line: str) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
            atexit.register(self._process.communicate)
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), f"{line}\n".encode())


_guardian = _Guardian()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Server(ABC):
    """A server on a free loopback port. Use as a context manager, or `start()` and `close()`."""

    name: ClassVar[str]
    """Names the folder and the log; shown in errors."""
    start_seconds: ClassVar[float] = 60.0
    """Patience for a start. Generous: machines that build and test are busy."""
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    stop_seconds: ClassVar[float] = 20.0
    folders: ClassVar[Sequence[str]] = (tempfile.gettempdir(), "/tmp", "/var/tmp")  # noqa: S108  # a private one is made inside
    """Where its folder may be, best first: TMPDIR may be closed to other users."""
    close_signal: ClassVar[signal.Signals] = signal.SIGKILL
    """How it is ended for good: its files are removed anyway, so a clean stop would be wasted time."""

    def __init__(self, *, account: Account | None = None) -> None:
        self.host = LOCALHOST
        self.port = free_port()
        self.account = account or Account(None)
        self.folder = new_folder(self.name, self.account, self.folders)
        _guardian.tell(f"folder {self.folder}")
        self._process: subprocess.Popen[bytes] | None = None
        self._prepared = False

    @abstractmethod
    def prepare(self) -> None:
        """Make the files that the server needs; called once, before the first start."""

    @abstractmethod
    def command(self) -> Sequence[str | Path]:
        """The program and its arguments; it stays in the foreground."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it serves; asked every 20 ms while it starts."""

    def environment(self) -> Mapping[str, str]:
        """The environment of the process: ours without what would steer the server."""
        return {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.folder), "LC_ALL": "C", "TZ": "UTC"}

    @property
    def log(self) -> Path:
        """What the server printed, over all its starts."""
        return self.folder / f"{self.name}.log"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._process is None:
            raise ServerFailed(f"{self.name} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process was started and has neither been stopped nor ended by itself."""
        return self._process is not None and self._process.poll() is None

    def run(self, *command: str | Path) -> str:
        """Run a tool to its end as the server's account; its output, or `ServerFailed` with it."""
        with subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=self.folder,
            env=self.environment(),
            **self.account.run_as,
        ) as tool:
            _guardian.tell(f"started {tool.pid} {int(signal.SIGKILL)}")
            try:
                output, _ = tool.communicate()
            except BaseException:
                os.killpg(tool.pid, signal.SIGKILL)
                raise
            finally:
                _guardian.tell(f"ended {tool.pid}")
        if tool.returncode:
            raise ServerFailed(f"{command[0]} failed with {tool.returncode}: {output[-2000:]}")
        return output

    def start(self) -> None:
        """Start and wait until it serves. A start after `stop` or `kill9` has the same port and files."""
        if self.running:
            return
        if not self._prepared:
            self.prepare()
            self._prepared = True
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(part) for part in self.command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.folder,
                env=dict(self.environment()),
                **self.account.run_as,
            )
        _guardian.tell(f"started {self.pid} {int(self.close_signal)}")
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        patience_ends = time.monotonic() + self.start_seconds
        while not self.is_ready():
            assert self._process is not None
            if self._process.poll() is not None:
                raise self._failure(f"{self.name} ended with {self._process.returncode} while it started")
            if time.monotonic() > patience_ends:
                failure = self._failure(f"{self.name} was not ready after {self.start_seconds:.0f} s")
                self.kill9()
                raise failure
            time.sleep(0.02)

    def _failure(self, what: str) -> ServerFailed:
        tail = self.log.read_text(encoding="utf-8", errors="replace")[-3000:]
        return ServerFailed(f"{what}; its log ends with:\n{tail}")

    def stop(self) -> None:
        """Stop cleanly and wait for the end of every process; kill what does not go."""
        self._end(self.stop_signal)

    def kill9(self) -> None:
        """End all processes at once, as a crash of the machine would (files stay)."""
        self._end(signal.SIGKILL)

    def _end(self, with_signal: signal.Signals) -> None:
        if self._process is None:
            return
        family = self._family()
        if with_signal is signal.SIGKILL:
            self._signal_all(family, signal.SIGKILL)
        else:
            self._process.send_signal(with_signal)
            self._signal_all(family, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self.stop_seconds)
        self._signal_all(family, signal.SIGKILL)
        self._process.wait()
        self._wait_for_end_of(family)
        _guardian.tell(f"ended {self._process.pid}")
        self._process = None

    def _wait_for_end_of(self, processes: list[psutil.Process]) -> None:
        """Wait for descendants; a zombie counts as gone, since init may take a second to reap it."""
        patience_ends = time.monotonic() + self.stop_seconds
        while any(map(_lives, processes)):
            if time.monotonic() > patience_ends:
                raise ServerFailed(f"{self.name} left processes behind: {[p.pid for p in processes if _lives(p)]}")
            time.sleep(0.01)

    def freeze(self) -> None:
        """SIGSTOP for all its processes: connections stay open and nothing answers."""
        self._signal_all(self._family(), signal.SIGSTOP)

    def thaw(self) -> None:
        """Undo `freeze`."""
        self._signal_all(self._family(), signal.SIGCONT)

    def _family(self) -> list[psutil.Process]:
        """The process and its descendants: some servers put their children into groups of their own."""
        try:
            leader = psutil.Process(self.pid)
            return [leader, *leader.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    @staticmethod
    def _signal_all(processes: list[psutil.Process], which: signal.Signals) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(which)

    def close(self) -> None:
        """End it and remove the folder. Idempotent."""
        self._end(self.close_signal)
        shutil.rmtree(self.folder, ignore_errors=True)
        _guardian.tell(f"removed {self.folder}")

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
