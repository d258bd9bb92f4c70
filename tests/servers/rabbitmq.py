"""RabbitMQ with everything of its own: node name, ports, epmd, folders, cookie."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import quote

from relay.demo.processes import Server, ServerFailed, free_port
from tests.servers.missing import ServerMissing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["RabbitMQ"]

_PLACES = ("/usr/lib/rabbitmq/bin", "/usr/lib/rabbitmq/sbin", "/opt/rabbitmq/sbin")
"""Scripts without Debian's wrapper, which insists on root or the user rabbitmq."""


def _scripts() -> Path:
    found = next((Path(place) for place in _PLACES if Path(place, "rabbitmq-server").exists()), None)
    if found is None:
        raise ServerMissing("RabbitMQ: not installed; apt-get install rabbitmq-server")
    return found


class _Epmd(Server):
    """Erlang's port mapper. Started by us: one that a node starts is a daemon, and would stay behind."""

    name: ClassVar[str] = "epmd"

    def prepare(self) -> None:
        """Nothing to make."""

    def command(self) -> Sequence[str | Path]:
        """In the foreground on the loopback."""
        program = shutil.which("epmd")
        if program is None:
            raise ServerMissing("RabbitMQ: epmd is not installed; apt-get install erlang-base")
        return [program, "-port", str(self.port), "-address", self.host]

    def is_ready(self) -> bool:
        """Lists its names."""
        with contextlib.suppress(ServerFailed):
            self.run("epmd", "-port", str(self.port), "-names")
            return True
        return False


class RabbitMQ(Server):
    """A single node with the management API. User `guest` has every right in every vhost made here."""

    name: ClassVar[str] = "rabbitmq"
    start_seconds: ClassVar[float] = 120.0
    stop_seconds: ClassVar[float] = 40.0

    def __init__(self, *, settings: Mapping[str, object] | None = None) -> None:
        self.scripts = _scripts()
        self._epmd = _Epmd()
        super().__init__()
        self.management_port = free_port()
        self._distribution_port = free_port()
        self._own_settings = settings or {}

    @property
    def node(self) -> str:
        """Name of the Erlang node."""
        return f"relay{self.port}@localhost"

    def url(self, vhost: str = "/", user: str = "guest", password: str = "guest") -> str:
        """AMQP URL of a vhost."""
        return f"amqp://{user}:{password}@{self.host}:{self.port}/{quote(vhost, safe='')}"

    def environment(self) -> Mapping[str, str]:
        """What the scripts and the node read; nothing of /etc/rabbitmq counts."""
        return {
            **super().environment(),
            "LC_ALL": "C.UTF-8",  # Elixir's tools warn about anything else
            "ERL_EPMD_PORT": str(self._epmd.port),
            "ERL_EPMD_ADDRESS": self.host,
            "RABBITMQ_BASE": str(self.folder),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "no-rabbitmq-env.conf"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(self.folder / "generated"),
            "RABBITMQ_LOG_BASE": str(self.folder),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_MNESIA_BASE": str(self.folder / "mnesia"),
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_PID_FILE": str(self.folder / "pid"),
            # Idle schedulers that spin would take the processor from the other servers of the run.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none"
            " -kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_CTL_ERL_ARGS": "+S 1:1 +sbwt none",
            # Makes the script exec the node, so that signals reach it and not a shell.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def prepare(self) -> None:
        """Write the configuration."""
        settings = {
            "listeners.tcp.1": f"{self.host}:{self.port}",
            "management.tcp.ip": self.host,
            "management.tcp.port": self.management_port,
            "loopback_users.guest": "false",
            "log.console.level": "warning",
            "disk_free_limit.absolute": "10MB",
            "collect_statistics_interval": 1000,
            **self._own_settings,
        }
        lines = [f"{name} = {value}\n" for name, value in settings.items()]
        (self.folder / "rabbitmq.conf").write_text("".join(lines), encoding="utf-8")
        (self.folder / "enabled_plugins").write_text("[rabbitmq_management].\n", encoding="utf-8")

    def start(self) -> None:
        """Start the port mapper, then the node."""
        self._epmd.start()
        super().start()

    def command(self) -> Sequence[str | Path]:
        """The node in the foreground."""
        return [self.scripts / "rabbitmq-server"]

    def is_ready(self) -> bool:
        """Its management API answers: the last thing that starts."""
        with contextlib.suppress(OSError, http.client.HTTPException, ServerFailed):
            self.api("GET", "/api/overview")
            return True
        return False

    def api(self, method: str, path: str, body: object = None) -> object:
        """One call of the management API as `guest`; its JSON, None if there is none, `ServerFailed` if refused."""
        connection = http.client.HTTPConnection(self.host, self.management_port, timeout=30)
        login = base64.b64encode(b"guest:guest").decode()
        headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
        if answer.status >= http.client.BAD_REQUEST:
            raise ServerFailed(f"{method} {path}: {answer.status} {text[:300]!r}")
        return json.loads(text) if text else None

    def add_vhost(self, name: str) -> None:
        """Make a vhost; its creator gets every right in it."""
        self.api("PUT", f"/api/vhosts/{quote(name, safe='')}")

    def delete_vhost(self, name: str) -> None:
        """Remove a vhost with its queues; its connections are closed."""
        self.api("DELETE", f"/api/vhosts/{quote(name, safe='')}")

    def ctl(self, *arguments: str) -> str:
        """Run rabbitmqctl (takes one to two seconds; prefer `api`)."""
        return self.run(self.scripts / "rabbitmqctl", *arguments)

    def close(self) -> None:
        """Stop the node, then its port mapper."""
        super().close()
        self._epmd.close()
