"""PgBouncer in transaction mode in front of a database, for every role of its cluster."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import psycopg

from relay.demo.processes import Server, account_for_servers
from tests.servers.missing import ServerMissing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.servers.postgres import Database

__all__ = ["PgBouncer"]

_PLACES = ("/usr/sbin/pgbouncer", "/usr/bin/pgbouncer", "/usr/local/bin/pgbouncer")


class PgBouncer(Server):
    """Its pools are small, so that a test soon meets the same server connection again."""

    name: ClassVar[str] = "pgbouncer"

    def __init__(self, database: Database, *, settings: Mapping[str, object] | None = None) -> None:
        self.program = shutil.which("pgbouncer") or next(filter(Path.exists, map(Path, _PLACES)), None)
        if self.program is None:
            raise ServerMissing("PgBouncer: not installed; apt-get install pgbouncer")
        super().__init__(account=account_for_servers())
        self.database = database
        self._own_settings = settings or {}

    @property
    def dsn(self) -> str:
        """URL of the database through the pooler, as the superuser."""
        return self.dsn_of("postgres")

    def dsn_of(self, user: str, password: str | None = None) -> str:
        """URL of the database through the pooler, as another role."""
        login = user if password is None else f"{user}:{password}"
        return f"postgresql://{login}@{self.host}:{self.port}/{self.database.name}"

    def prepare(self) -> None:
        """Write the configuration: every database and role of the cluster, nobody needs a password."""
        settings = {
            "listen_addr": self.host,
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "trust",
            "auth_file": self.folder / "users",
            # Roles that are not in the file are looked up; trust needs them to exist, not their password.
            "auth_user": "postgres",
            "auth_query": "SELECT usename, coalesce(passwd, '') FROM pg_shadow WHERE usename = $1",
            "pool_mode": "transaction",
            "max_client_conn": 200,
            "default_pool_size": 4,
            "ignore_startup_parameters": "extra_float_digits",
            **self._own_settings,
        }
        lines = [f"{name} = {value}\n" for name, value in settings.items()]
        server = self.database.server
        database = f"* = host={server.host} port={server.port}\n"
        (self.folder / "users").write_text('"postgres" ""\n', encoding="utf-8")
        (self.folder / "pgbouncer.ini").write_text(
            f"[databases]\n{database}\n[pgbouncer]\n{''.join(lines)}", encoding="utf-8"
        )

    def command(self) -> Sequence[str | Path]:
        """In the foreground; quiet, or each connection is a line."""
        assert self.program is not None
        return [self.program, "-q", self.folder / "pgbouncer.ini"]

    def is_ready(self) -> bool:
        """A query goes through."""
        try:
            with psycopg.connect(self.dsn, autocommit=True, prepare_threshold=None) as connection:
                connection.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True
