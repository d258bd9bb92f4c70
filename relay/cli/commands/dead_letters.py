"""`relay dead-letters list|show|retry|discard`."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from relay.cli.app import FAILED, FINE
from relay.cli.options import as_json, configured, settings
from relay.cli.output import print_json, safe

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from relay.config import Config
    from relay.stores.dead_letters import DeadLetter, Selection


def _selecting(function: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option("--sink", help="Of this sink; '' are events that no route took."),
        click.option("--topic", help="Of this topic, exactly."),
        click.option("--key", help="Of this key, exactly."),
        click.option("--id", "ids", multiple=True, type=click.UUID, help="With this event id. May be repeated."),
        click.option("--kind", type=click.Choice(["rejected", "attempts", "unrouted"]), help="Why it was given up."),
    )
    for option in reversed(options):
        function = option(function)
    return function


@click.group("dead-letters")
def dead_letters() -> None:
    """List, show, retry or discard events that were given up."""


@dead_letters.command("list")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True, help="The oldest so many.")
@_selecting
@as_json
@configured
def list_(*, config_path: str | None, flags: tuple[str, ...], limit: int, json_: bool, **chosen: Any) -> int:
    """The oldest dead letters, one line each."""
    letters = _find(settings(config_path, flags, sinks_required=False).config, chosen, limit, payload=False)
    if json_:
        print_json({"dead_letters": [_document(letter) for letter in letters]})
        return FINE
    for letter in letters:
        click.echo(_line(letter))
    click.echo(
        f"{len(letters)} dead letters" + (" (there may be more: --limit)" if len(letters) == limit else ""), err=True
    )
    return FINE


@dead_letters.command()
@click.option("--limit", type=click.IntRange(1, 1_000), default=10, show_default=True, help="The oldest so many.")
@_selecting
@as_json
@configured
def show(*, config_path: str | None, flags: tuple[str, ...], limit: int, json_: bool, **chosen: Any) -> int:
    """Everything about dead letters, payload included: as text when it is UTF-8, else in hexadecimal."""
    letters = _find(settings(config_path, flags, sinks_required=False).config, chosen, limit, payload=True)
    if json_:
        print_json({"dead_letters": [_document(letter, payload=True) for letter in letters]})
    for letter in () if json_ else letters:
        click.echo(_page(letter))
    if not letters:
        click.echo("no such dead letter", err=True)
    return FINE if letters else FAILED


def _acting(function: Callable[..., Any]) -> Callable[..., Any]:
    every = click.option("--all", "all_", is_flag=True, help="All that there are now; needed when nothing is selected.")
    limit = click.option("--limit", type=click.IntRange(1), help="The oldest so many only.")
    return every(limit(_selecting(as_json(configured(function)))))


@dead_letters.command()
@_acting
def retry(
    *, config_path: str | None, flags: tuple[str, ...], all_: bool, limit: int | None, json_: bool, **chosen: Any
) -> int:
    """Give dead letters to the relay again, in their order and with fresh attempts.

    They keep the place that they had: before everything of their key that waits behind them. Pods notice within
    seconds. Events that no route took go where the routes send them now; one that still has no route stays.
    """
    _require_choice(all_=all_, chosen=chosen)
    config = settings(config_path, flags).config
    return asyncio.run(_retry(config, _selection(chosen), limit, json_=json_))


@dead_letters.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@_acting
def discard(
    *,
    config_path: str | None,
    flags: tuple[str, ...],
    yes: bool,
    all_: bool,
    limit: int | None,
    json_: bool,
    **chosen: Any,
) -> int:
    """Delete dead letters for good. They are never delivered; a key that they held goes on."""
    _require_choice(all_=all_, chosen=chosen)
    config = settings(config_path, flags, sinks_required=False).config
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("discarding loses events: say --yes")
        click.confirm("Discarded events are never delivered. Go on?", abort=True, err=True)
    return asyncio.run(_discard(config, _selection(chosen), limit, json_=json_))


def _require_choice(*, all_: bool, chosen: dict[str, Any]) -> None:
    if not all_ and not any(value not in (None, ()) for value in chosen.values()):
        raise click.UsageError("select with --id, --sink, --topic, --key or --kind, or say --all")


def _selection(chosen: dict[str, Any]) -> Selection:
    from relay.stores.dead_letters import Selection  # noqa: PLC0415  # asyncpg is not needed for --help

    ids = tuple(UUID(str(one)) for one in chosen.pop("ids"))
    return Selection(**chosen, ids=ids or None)


def _find(config: Config, chosen: dict[str, Any], limit: int, *, payload: bool) -> list[DeadLetter]:
    from relay.cli.session import connect  # noqa: PLC0415
    from relay.database.names import Names  # noqa: PLC0415
    from relay.stores import dead_letters as store  # noqa: PLC0415

    async def find() -> list[DeadLetter]:
        names = Names.from_config(config.database)
        async with connect(config.database) as connection:
            return await store.find(connection, names, _selection(chosen), limit=limit, payload=payload)

    return asyncio.run(find())


async def _retry(config: Config, selection: Selection, limit: int | None, *, json_: bool) -> int:
    from relay.cli.session import connect  # noqa: PLC0415
    from relay.database.names import Names  # noqa: PLC0415
    from relay.pipeline.router import Router  # noqa: PLC0415
    from relay.stores import dead_letters as store  # noqa: PLC0415

    router, names = Router(config.routing), Names.from_config(config.database)

    def targets(topic: str) -> list[str]:
        return [target.sink for target in router.targets(topic)]

    async with connect(config.database) as connection:
        moved = store.retry(connection, names, selection, targets, limit=limit)
        done = await _report(moved, "retried", "its key goes on after it", json_=json_)
        left = await store.find(connection, names, selection, limit=1_000)
    stuck = sorted({letter.topic for letter in left if not letter.sink and not targets(letter.topic)})
    for topic in stuck:
        click.echo(f"left alone: no route takes topic {safe(topic)!r}; add one to [[routes]]", err=True)
    return FINE if done and not stuck else FAILED


async def _discard(config: Config, selection: Selection, limit: int | None, *, json_: bool) -> int:
    from relay.cli.session import connect  # noqa: PLC0415
    from relay.database.names import Names  # noqa: PLC0415
    from relay.stores import dead_letters as store  # noqa: PLC0415

    names = Names.from_config(config.database)
    async with connect(config.database) as connection:
        deleted = store.discard(connection, names, selection, limit=limit)
        done = await _report(deleted, "discarded", "its key goes on without it", json_=json_)
    return FINE if done else FAILED


async def _report(chunks: AsyncIterator[list[DeadLetter]], verb: str, released: str, *, json_: bool) -> int:
    """Print each letter when its transaction has committed; returns how many there were."""
    documents: list[dict[str, Any]] = []
    count = 0
    async for letters in chunks:
        count += len(letters)
        for letter in letters:
            if json_:
                documents.append(_document(letter))
            else:
                held = f" (it held key {letter.key!r}: {released})" if letter.holds else ""
                click.echo(f"{verb} {_line(letter)}{safe(held)}")
    if json_:
        print_json({verb: documents})
    else:
        click.echo(f"{count} {verb}" if count else "no such dead letter", err=True)
    return count


def _line(letter: DeadLetter) -> str:
    key = "-" if letter.key is None else letter.key
    holds = "  holds its key" if letter.holds else ""
    first = letter.reason.splitlines()[0] if letter.reason else ""
    return safe(
        f"{letter.died_at:%Y-%m-%d %H:%M:%S}  {letter.id}  {letter.sink or '(no route)'}  {letter.topic}  key={key}  "
        f"{letter.kind}  attempts={letter.attempts}{holds}  {first}"
    )


def _page(letter: DeadLetter) -> str:
    held = "yes: later events of its key wait until it is retried or discarded" if letter.holds else "no"
    size = "NULL, a tombstone" if letter.payload_bytes is None else f"{letter.payload_bytes} bytes"
    rows = {
        "id": str(letter.id),
        "sink": letter.sink or "(no route took it)",
        "topic": letter.topic,
        "key": "(none)" if letter.key is None else letter.key,
        "kind": letter.kind,
        "reason": letter.reason,
        "attempts": str(letter.attempts),
        "holds": held,
        "seq": str(letter.seq),
        "created_at": letter.created_at,
        "stored_at": letter.stored_at.isoformat(),
        "died_at": letter.died_at.isoformat(),
        "headers": letter.headers or "(none)",
        "payload": size,
    }
    lines = [f"{name:<11} {value}" for name, value in rows.items()]
    if letter.payload is not None:
        lines.append(_text(letter.payload) or letter.payload.hex(" ", 2))
    return safe("\n".join(lines)) + "\n"


def _text(payload: bytes) -> str | None:
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return None


def _document(letter: DeadLetter, *, payload: bool = False) -> dict[str, Any]:
    document = {name: getattr(letter, name) for name in letter.__slots__ if name != "payload"}
    if payload:
        text = _text(letter.payload) if letter.payload is not None else None
        document["payload"] = text
        document["payload_hex"] = letter.payload.hex() if letter.payload is not None and text is None else None
    return document
