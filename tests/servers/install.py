"""`make services`: fetches the servers that are missing, with apt (as root) and Maven; nothing else is changed.

Debian would start what it installs as system services; the tests start their own, so it is kept
from doing so while it installs. Without root the one command to run is printed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.servers.downloads import POSTGRES, postgres_installation
from tests.servers.kafka import Kafka
from tests.servers.missing import ServerMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGES = {
    "redis-server": "redis-server",
    "rabbitmq-server": "rabbitmq-server",
    "pgbouncer": "pgbouncer",
    "java": "default-jre-headless",
    "mvn": "maven",
}
"""Debian's and Ubuntu's package by the program that it brings."""

POLICY = Path("/usr/sbin/policy-rc.d")
"""What Debian asks whether it may start a service; 101 means no."""


def main() -> int:
    """Install and fetch; the exit code says whether everything is there now."""
    missing = [package for program, package in PACKAGES.items() if not _installed(program)]
    if missing:
        _install(missing)
    complete = not any(not _installed(program) for program in PACKAGES)
    fetches: list[Callable[[], object]] = [partial(postgres_installation, major) for major in POSTGRES]
    for fetch in (*fetches, Kafka.prepare_class_archive):
        try:
            fetch()
        except ServerMissing as reason:
            print(reason, file=sys.stderr)
            complete = False
    return 0 if complete else 1


def _installed(program: str) -> bool:
    # Servers are in /usr/sbin, which is not on every user's path.
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is not None


def _install(packages: list[str]) -> None:
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if os.geteuid() != 0 or not _installed("apt-get"):
        print("Missing servers; as root:", *command, file=sys.stderr)
        return
    patient = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
    with _services_stay_off():
        for step in (["update"], command[1:]):
            subprocess.run(
                [*patient, *step],
                check=True,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )


@contextmanager
def _services_stay_off() -> Iterator[None]:
    """Forbid starting services, and put back what was there."""
    before = POLICY.read_bytes() if POLICY.exists() else None
    POLICY.write_text("#!/bin/sh\nexit 101\n", encoding="ascii")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        if before is None:
            POLICY.unlink()
        else:
            POLICY.write_bytes(before)


if __name__ == "__main__":
    sys.exit(main())
