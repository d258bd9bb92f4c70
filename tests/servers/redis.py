"""Debian's Redis, beside the wheel's Valkey: both speak the protocol, but they are different servers by now."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from relay.demo.servers import Valkey
from tests.servers.missing import ServerMissing

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Redis", "Valkey"]


class Redis(Valkey):
    """A redis-server with the options and methods of `Valkey`."""

    name: ClassVar[str] = "redis"

    def __init__(self, *, persistent: bool = True, settings: Mapping[str, object] | None = None) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise ServerMissing("Redis: not installed; apt-get install redis-server")
        super().__init__(persistent=persistent, settings=settings, program=Path(program))
