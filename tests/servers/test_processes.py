"""Servers end with the program that started them, however that ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from relay.demo.processes import Account, Server, ServerFailed, free_port, reachable
from relay.demo.servers import Valkey
from tests.servers import missing

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = """
import time
from relay.demo.servers import Postgres, Valkey
with Postgres() as postgres, Valkey() as valkey:
    print(postgres.pid, valkey.pid, postgres.folder, valkey.folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def program() -> Iterator[subprocess.Popen[str]]:
    """A program that has started PostgreSQL and Valkey and said where."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_program_that_was_ended(program: subprocess.Popen[str], how: signal.Signals) -> None:
    """No process and no folder, also when the program had no chance to clean up."""
    assert program.stdout is not None
    postgres, valkey, *folders = program.stdout.readline().split()
    servers = [psutil.Process(int(postgres)), psutil.Process(int(valkey))]
    backends = servers[0].children()
    assert backends
    program.send_signal(how)
    program.wait()
    gone_by = time.monotonic() + 20
    while any(map(lives, servers + backends)) or any(Path(folder).exists() for folder in folders):
        assert time.monotonic() < gone_by
        time.sleep(0.05)


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_server_that_cannot_start_says_why() -> None:
    """The error ends with the server's own words."""
    with (
        pytest.raises(ServerFailed, match=r"valkey ended with 1 while it started[\s\S]*no-such-option"),
        Valkey(settings={"no-such-option": 1}),
    ):
        pass


def test_a_port_is_outside_the_range_of_clients() -> None:
    """A client that reconnects to a stopped server could otherwise be given that port, and connect to itself."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    ports = {free_port() for _ in range(20)}
    assert max(ports) < lowest
    assert len(ports) > 1
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", ports.pop()))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts servers as somebody else")
def test_programs_below_a_private_folder_are_copied_for_the_account(tmp_path: Path) -> None:
    """A virtual environment below root's home, which `nobody` cannot enter."""
    private = tmp_path / "private"
    tree = private / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin" / "tool").write_text("#!/bin/sh\necho done\n", encoding="ascii")
    (tree / "bin" / "tool").chmod(0o700)
    private.chmod(0o700)
    with Nothing(account=Account("nobody")) as server:
        copy = reachable(tree, server.account, server.folder)
        assert copy != tree
        assert server.run(copy / "bin" / "tool") == "done\n"


class Nothing(Valkey):
    """A server whose files belong to the account that it was given."""

    def __init__(self, account: Account) -> None:
        Server.__init__(self, account=account)

    def start(self) -> None:
        """Only the folder counts."""


def test_a_missing_server_is_a_skip_that_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(missing.REQUIRE_SERVERS, raising=False)
    monkeypatch.setattr(missing, "reasons", {})
    with pytest.raises(pytest.skip.Exception, match="apt-get install x"), missing.skip_if_missing():
        raise missing.ServerMissing("X: not installed; apt-get install x")
    assert list(missing.reasons) == ["X: not installed; apt-get install x"]


def test_a_missing_server_is_a_failure_where_all_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(missing.REQUIRE_SERVERS, "1")
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(pytest.fail.Exception, match="apt-get install x"))
        stack.enter_context(missing.skip_if_missing())
        raise missing.ServerMissing("X: not installed; apt-get install x")
