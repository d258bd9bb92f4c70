"""One relay process, as an operator would start it: `relay run` with a file of three settings, else defaults."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, ClassVar

from relay.demo.processes import Server

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Pod"]

_CONFIG = """\
# Written by `relay demo`. Everything that is not here is a default.
[database]
dsn = "{dsn}"

[sinks.broker]
type = "redis"
url = "{broker}"

[leases]
pod = "{label}"

[http]
bind = "{host}:{port}"
"""


class Pod(Server):
    """A relay named `label`; ready when its `/readyz` says so."""

    name: ClassVar[str] = "pod"
    stop_seconds: ClassVar[float] = 25.0  # the relay's grace period is 20 s

    def __init__(self, label: str, dsn: str, broker: str) -> None:
        super().__init__()
        self.label, self._dsn, self._broker = label, dsn, broker

    @property
    def config(self) -> Path:
        """Its configuration file; other commands of the relay can use it as well."""
        return self.folder / "relay.toml"

    def environment(self) -> Mapping[str, str]:
        """Ours, so that the same Python finds the same packages; without settings of some other relay."""
        return {name: value for name, value in os.environ.items() if not name.startswith("RELAY_")}

    def prepare(self) -> None:
        """Write the configuration."""
        text = _CONFIG.format(dsn=self._dsn, broker=self._broker, label=self.label, host=self.host, port=self.port)
        self.config.write_text(text, encoding="utf-8")

    def command(self) -> Sequence[str | Path]:
        """`relay run`."""
        return [sys.executable, "-m", "relay", "run", "--config", self.config]

    def is_ready(self) -> bool:
        """Connected to the database and the broker."""
        try:
            with urllib.request.urlopen(f"http://{self.host}:{self.port}/readyz", timeout=1):
                return True
        except (urllib.error.URLError, OSError):
            return False
