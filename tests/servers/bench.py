"""`make bench`: `relay bench` with a broker started for it when `--sink kafka` or `--sink rabbitmq` has no address."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from relay.cli.app import run
from tests.servers.kafka import Kafka
from tests.servers.missing import ServerMissing
from tests.servers.rabbitmq import RabbitMQ

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Run one bench command; returns its exit code."""
    try:
        with ExitStack() as stack:
            return run(["bench", *arguments, *_address(arguments, stack)])
    except ServerMissing as reason:
        print(reason, file=sys.stderr)
        return 1


def _address(arguments: Sequence[str], stack: ExitStack) -> list[str]:
    if "kafka" in arguments and "--bootstrap-servers" not in arguments:
        return ["--bootstrap-servers", stack.enter_context(Kafka()).bootstrap_servers]
    if "rabbitmq" in arguments and "--url" not in arguments:
        return ["--url", stack.enter_context(RabbitMQ()).url()]
    return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
