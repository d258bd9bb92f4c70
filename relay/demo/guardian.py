"""Ends the servers of a program that can no longer do it itself (SIGKILL, a crash, a closed terminal).

Runs as a child process and reads one line for each thing to watch from its standard input, which
only the program holds open. When that ends, whatever is still on the list is stopped and removed.
Standard library only: it is started with `python -I -S`, so that it costs 20 ms and sees no environment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

PATIENCE_SECONDS = 5.0
"""How long a server may take over a clean stop before its process group is killed."""


def read_until_end() -> tuple[dict[int, int], list[str]]:
    """What is left to end when the program is gone: stop signals by pid, and folders."""
    signals: dict[int, int] = {}
    folders: list[str] = []
    for line in sys.stdin:
        what, value = line.rstrip("\n").split(" ", 1)
        if what == "started":
            pid, stop_signal = value.split()
            signals[int(pid)] = int(stop_signal)
        elif what == "ended":
            signals.pop(int(value), None)
        elif what == "folder":
            folders.append(value)
        elif what == "removed" and value in folders:
            folders.remove(value)
    return signals, folders


def alive(pid: int) -> bool:
    """Whether the process exists; those that we watch are reaped by init once the program is gone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def end(signals: dict[int, int]) -> None:
    """Stop every process kindly, then its whole group for certain."""
    for pid, stop_signal in signals.items():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, stop_signal)
            os.killpg(pid, signal.SIGCONT)
    patience_ends = time.monotonic() + PATIENCE_SECONDS
    while any(map(alive, signals)) and time.monotonic() < patience_ends:
        time.sleep(0.05)
    for pid in signals:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def release_shared_memory(folder: str) -> None:
    """What PostgreSQL leaves in the kernel when it had no chance to clean up: the second number of its pid file's 7th line."""
    with contextlib.suppress(OSError, IndexError, ValueError):  # no such file: no PostgreSQL, or a clean stop
        with open(os.path.join(folder, "data", "postmaster.pid"), encoding="utf-8") as lines:  # noqa: PTH118, PTH123  # quick to start
            segment = int(lines.read().splitlines()[6].split()[1])
        subprocess.run(["ipcrm", "-m", str(segment)], check=False, stderr=subprocess.DEVNULL)  # noqa: S607  # wherever it is


def main() -> None:
    """Wait for the end of standard input, then clean up."""
    signals, folders = read_until_end()
    end(signals)
    for folder in folders:
        release_shared_memory(folder)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
