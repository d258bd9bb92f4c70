"""Which commands there are, and what an error means to the shell.

Exit codes: 0 fine, 1 failed, 2 usage or configuration, 3 a stop error with its hint. An error that was
foreseen is `error: ...` and `hint: ...` on standard error, never a traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import click

from relay import __version__
from relay.errors import InvalidConfig, RelayError, StopError
from relay.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FAILED", "FINE", "STOPPED", "USAGE", "run"]

FINE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
STOPPED: Final = 3
_INTERRUPTED: Final = 130

# The help line stands here because reading it from a command would import it.
_COMMANDS: Final = {
    "migrate": ("relay.cli.commands.migrate:migrate", "Create the tables or bring them up to date."),
    "run": ("relay.cli.commands.run:run", "Run the relay."),
    "check": ("relay.cli.commands.check:check", "Say what would keep the relay from running, and what to do."),
    "status": ("relay.cli.commands.status:status", "Show backlog, sinks, parked and dead deliveries, pods."),
    "dead-letters": ("relay.cli.commands.dead_letters:dead_letters", "List, show, retry or discard dead letters."),
    "config": ("relay.cli.commands.config:config", "Show the settings in force, or their schema."),
    "demo": ("relay.cli.commands.demo:demo", "Show the relay at work, with servers of its own."),
    "bench": ("relay.cli.commands.bench:bench", "Measure the relay beside the raw loop of the same path."),
}


class _Commands(click.Group):
    """Commands by name; each is imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            near = get_close_matches(cmd_name, _COMMANDS, n=1)
            ctx.fail(f"there is no command {cmd_name!r}" + (f", did you mean {near[0]!r}?" if near else ""))
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Settings come from relay.toml, RELAY_... variables and --set; `relay config show` tells which is in force.",
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Configuration file; also after the command.",
)
@click.version_option(__version__, message="outbox-relay %(version)s")
@click.pass_context
def _relay(ctx: click.Context, config_path: str | None) -> None:
    """Transactional outbox relay: PostgreSQL rows to Kafka, RabbitMQ and Redis Streams."""
    ctx.obj = config_path


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code."""
    try:
        result = _relay.main(args=list(arguments), prog_name="relay", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except BrokenPipeError:
        # `relay status | head`: nobody reads on. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except RelayError as error:
        return _explain(error)
    except Exception:  # noqa: BLE001  # a bug: its traceback is wanted, the secrets in it are not
        click.echo(redact(traceback.format_exc()), err=True, nl=False)
        return FAILED
    return result if isinstance(result, int) else FINE


def _explain(error: RelayError) -> int:
    click.echo(f"error: {redact(str(error))}", err=True)
    if hint := getattr(error, "hint", None):
        click.echo(f"hint: {redact(hint)}", err=True)
    return _code(error)


def _code(error: Any) -> int:
    match error:
        case InvalidConfig():
            return USAGE
        case StopError():
            return STOPPED
        case _:
            return FAILED
