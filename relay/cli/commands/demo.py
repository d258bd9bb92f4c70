"""`relay demo`."""

from __future__ import annotations

import click


@click.command()
@click.option(
    "--keep", is_flag=True, help="Print the addresses and leave everything running; Ctrl-C closes the shop and counts."
)
@click.option(
    "--seconds", type=click.FloatRange(min=5), default=20.0, show_default=True, help="How long the story takes, about."
)
def demo(*, keep: bool, seconds: float) -> int:
    """Show the relay at work, with servers of its own.

    Starts PostgreSQL and Valkey in a temporary folder, a small shop that sells, and the relay; stops the broker for
    a moment on purpose; counts on the consumer's side. Nothing stays behind.
    """
    from relay.demo import main  # noqa: PLC0415  # loads nothing until it is called

    return main(keep=keep, seconds=seconds)
