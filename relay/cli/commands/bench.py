"""`relay bench`: all arguments go to the bench's own parser."""

from __future__ import annotations

import click

from relay.cli.app import FINE


@click.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(*, arguments: tuple[str, ...]) -> int:
    """Measure the relay beside the raw loop of the same path."""
    import relay.bench as program  # noqa: PLC0415  # it imports everything

    main = program.main  # type: ignore[attr-defined, unused-ignore]  # written beside this command
    return main(list(arguments)) or FINE
