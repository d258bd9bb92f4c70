"""The numbered migration files, from the wheel or from a source tree."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.resources.abc import Traversable

__all__ = ["Migration", "load"]

_FILE_NAME: Final = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")


@dataclass(frozen=True)
class Migration:
    """One file: `template` is its text before names and options are filled in."""

    version: int
    name: str
    template: str

    @property
    def checksum(self) -> str:
        """SHA-256 of the template, so that it is the same for every name, option and server version."""
        return hashlib.sha256(self.template.encode()).hexdigest()


def load(folder: Traversable | None = None) -> Sequence[Migration]:
    """All migrations in order; numbered from 0 without a gap. `folder` is for tests."""
    migrations = sorted(_read(folder or _packaged()), key=lambda migration: migration.version)
    if [migration.version for migration in migrations] != list(range(len(migrations))) or not migrations:
        raise RuntimeError(f"migrations are not numbered 0, 1, 2, ...: {[m.version for m in migrations]}")
    return migrations


def _read(folder: Traversable) -> Iterator[Migration]:
    for entry in folder.iterdir():
        if match := _FILE_NAME.fullmatch(entry.name):
            # Text mode makes line ends uniform, so a checkout on another system has the same checksum.
            yield Migration(int(match[1]), match[2], entry.read_text(encoding="utf-8"))


def _packaged() -> Traversable:
    """`relay/_migrations` of an installed wheel, else `migrations/` beside the package (editable install)."""
    packaged = resources.files("relay") / "_migrations"
    if packaged.is_dir():
        return packaged
    return Path(__file__).resolve().parents[2] / "migrations"
