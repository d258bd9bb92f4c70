"""The migration files are in the wheel, numbered, and safe to fill in."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from relay.database.names import Names
from relay.migrate import load
from relay.migrate.template import Options, render

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = Options("json", partitioned=False, server_version=150000, create_schema=False)


def test_the_wheel_has_them(tmp_path: Path) -> None:
    """Built as a release is; read back from the unpacked wheel, they are the ones of the source tree."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    read = "from relay.migrate import load; print(*(m.checksum for m in load()))"
    environment = {"PYTHONPATH": str(tmp_path / "site")}
    output = subprocess.run(
        [sys.executable, "-c", read], check=True, capture_output=True, text=True, cwd=tmp_path, env=environment
    ).stdout
    assert output.split() == [migration.checksum for migration in load()]
    assert (tmp_path / "site" / "relay" / "_migrations" / "0001_outbox.sql").is_file()


def test_no_comment_holds_a_placeholder() -> None:
    """A name with a line break would end the comment, and the rest of the name would be run."""
    for migration in load():
        for line in migration.template.splitlines():
            _, _, comment = line.partition("--")
            assert line.startswith("--@") or not re.search(r"\{[a-z]", comment), line


@pytest.mark.parametrize("names", [["0001_a.sql"], ["0000_a.sql", "0002_b.sql"], ["0000_a.sql", "0000_b.sql"], []])
def test_numbers_have_no_gaps(tmp_path: Path, names: list[str]) -> None:
    """A gap or a repeated number is a mistake of a merge."""
    for name in [*names, "README.md"]:
        (tmp_path / name).touch()
    with pytest.raises(RuntimeError, match="not numbered"):
        load(tmp_path)


def test_parts_depend_on_options() -> None:
    """`--@if`, `--@else` and `--@end`."""
    template = "a\n--@if partitioned\nb\n--@else\nc\n--@end\nd {payload_type}\n"
    assert render(template, Names(), OPTIONS) == "a\nc\nd json\n"
    partitioned = Options("bytea", partitioned=True, server_version=150000, create_schema=False)
    assert render(template, Names(), partitioned) == "a\nb\nd bytea\n"


def test_an_unknown_option_is_a_mistake() -> None:
    """Not silently false."""
    with pytest.raises(KeyError):
        render("--@if partitoned\n--@end\n", Names(), OPTIONS)
