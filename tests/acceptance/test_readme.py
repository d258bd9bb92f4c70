"""The README's own snippets, run as they stand: only addresses are replaced by those of the test's servers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.servers.missing import ServerMissing, skip_if_missing

if TYPE_CHECKING:
    from tests.servers.postgres import Database, Postgres
    from tests.servers.redis import Valkey

README = Path(__file__).parents[2] / "README.md"
PATIENCE_SECONDS = 45.0


def snippets(language: str) -> list[str]:
    """Fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def snippet(language: str, containing: str) -> str:
    """The one block of a language that contains this text."""
    (found,) = [block for block in snippets(language) if containing in block]
    return found


class Reader:
    """Somebody who follows the README in a folder of their own."""

    def __init__(self, folder: Path, database: Database, postgres: Postgres, broker: Valkey) -> None:
        self.folder = folder
        self._addresses = {
            "postgres:secret@localhost:5432/shop": f"postgres:secret@{postgres.host}:{postgres.port}/{database.name}",
            "redis://localhost:6379": f"redis://{broker.host}:{broker.port}",
        }
        path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), str(postgres.bin)]
        self.environment = {"PATH": os.pathsep.join(path), "HOME": str(folder), "RELAY_HTTP__BIND": "off"}

    def adapt(self, text: str) -> str:
        for written, real in self._addresses.items():
            text = text.replace(written, real)
        return text

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=self.folder, env=self.environment, timeout=60
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, command: str) -> subprocess.Popen[bytes]:
        with (self.folder / "relay.log").open("wb") as log:
            return subprocess.Popen(command.split(), cwd=self.folder, env=self.environment, stderr=log)


@pytest.fixture
def reader(tmp_path: Path, database: Database, postgres: Postgres, own_redis: Valkey) -> Reader:
    with skip_if_missing():
        if shutil.which("redis-cli") is None:
            raise ServerMissing("redis-cli: not installed; apt-get install redis-tools")
    return Reader(tmp_path, database, postgres, own_redis)


def test_a_reader_who_follows_the_readme_sees_the_events_arrive(reader: Reader) -> None:
    """Each command as written: migrate, run, INSERT, read; then the program in Python."""
    (reader.folder / "relay.toml").write_text(reader.adapt(snippet("toml", "[database]")), encoding="utf-8")
    migrate, run = snippet("sh", "relay run").splitlines()
    reader.run("sh", "-ec", migrate)
    pod = reader.start(run)
    try:
        insert, _, read = reader.adapt(snippet("sh", "psql")).rpartition("redis-cli")
        reader.run("sh", "-ec", insert)
        shown = until(reader, f"redis-cli{read}", '{"type": "paid"}')
        assert shown.splitlines()[1::2] == [
            "id",
            "key",
            "payload",
            "created_at",
        ]  # the first line is the entry's own id

        reader.run(sys.executable, "-c", reader.adapt(snippet("python", "enqueue")))
        until(reader, f"redis-cli{read}", '{"type":"paid","order":43}')
    finally:
        pod.send_signal(signal.SIGTERM)
        assert pod.wait(30) == 0, (reader.folder / "relay.log").read_text()


def until(reader: Reader, command: str, expected: str) -> str:
    """Output of a command as soon as it contains a text; the relay is another process."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while expected not in (shown := reader.run("sh", "-ec", command)):
        assert time.monotonic() < deadline, f"{command}\n{shown}\n{(reader.folder / 'relay.log').read_text()}"
        time.sleep(0.05)
    return shown


def test_the_first_event_is_within_sixty_lines() -> None:
    """A newcomer does not scroll: from the first line to the command that reads the event."""
    text = README.read_text(encoding="utf-8")
    assert text[: text.index("XRANGE")].count("\n") < 60
