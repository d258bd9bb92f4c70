"""The `relay` command. Commands are imported when they are called, so `relay --help` is quick and `run` is small."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the `relay` script."""
    from relay.cli.app import run  # noqa: PLC0415  # importing the package alone stays free

    sys.exit(run(sys.argv[1:]))
