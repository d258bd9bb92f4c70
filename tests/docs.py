"""`python -m tests.docs`: every link between our documents leads somewhere. Part of `make check`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+\s+(.*?)\s*#*$", re.MULTILINE)


def main() -> int:
    """Print each dead link; the exit code says whether there were any."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    dead = [problem for name in listed.stdout.splitlines() for problem in dead_links(ROOT / name)]
    print("\n".join(dead) or "documents: every link leads somewhere")
    return 1 if dead else 0


def dead_links(document: Path) -> Iterator[str]:
    """What the document points at and is not there: files, and headings in Markdown files."""
    for target in _LINK.findall(_FENCE.sub("", document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):  # http, mailto
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists():
            yield f"{document.relative_to(ROOT)}: {target}: no such file"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"{document.relative_to(ROOT)}: {target}: no such heading"


def anchors(document: Path) -> set[str]:
    """The headings as links name them: lower case, without punctuation, dashes for blanks."""
    text = _FENCE.sub("", document.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(text)}


if __name__ == "__main__":
    sys.exit(main())
