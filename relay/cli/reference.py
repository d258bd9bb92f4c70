"""docs/configuration.md and the JSON Schema, both made from the models: `python -m relay.cli.reference [--check]`.

The text of a setting stands beside its default in the code and nowhere else.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from relay.config import Config, Route
from relay.config.spelling import fields, section_of, variable
from relay.sinks import registry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic.fields import FieldInfo

__all__ = ["json_schema", "markdown"]

DOCUMENT: Final = Path("docs/configuration.md")

_HEAD: Final = """\
# Configuration

<!-- Generated from relay/config/models.py and the sinks' options by `python -m relay.cli.reference`. Do not edit. -->

One file, `relay.toml` in the current folder, or the one that `--config` or `RELAY_CONFIG` names. The smallest:

```toml
[database]
dsn = "postgresql://relay:secret@localhost:5432/shop"

[sinks.main]
type = "redis"
url = "redis://localhost:6379/0"
```

- **Precedence**: `--set KEY=VALUE` flags, then environment, then the file. `relay config show` tells what is in force and
  where it came from, without secrets.
- **Environment**: every setting but routes is also `RELAY_` + its path with `__`: `RELAY_DATABASE__DSN`,
  `RELAY_SINKS__MAIN__URL`. A list or table for a sink is given as JSON. An empty variable counts as not set. An unknown
  `RELAY_` variable is an error, except `RELAY_CONFIG`, `RELAY_TEST_...` (our test suite's) and the service links that
  Kubernetes makes for a Service called `relay` (`enableServiceLinks: false` in the pod turns them off).
- **Secrets** can stay in files: `RELAY_DATABASE__DSN_FILE=/run/secrets/dsn` reads the value from there, without its last
  line break. It works for every setting; of a sink's options, for those that end in `url`, `uri`, `dsn`, `username`,
  `password`, `passphrase`, `secret` or `token`.
- **A name of a sink** is made of letters, digits and single `-` or `_`. It is stored with parked events and dead letters,
  so renaming a sink orphans them; `relay check` says so.
- **Mistakes** stop the start with one line each; what works and is surely not meant (a route that is never reached, a sink
  that no route uses) is a warning in the log and in `relay check`.

`relay config schema` prints a JSON Schema for editors.
"""

_SINKS_HEAD: Final = """\
## `[sinks.<name>]`

One section for each broker. `type` chooses the kind, all other options belong to it. Variables: `RELAY_SINKS__<NAME>__<OPTION>`.
"""

_ROUTES_HEAD: Final = """\
## `[[routes]]`

In order; the first whose `topic` matches wins. With one sink and no routes, everything goes to it. In the file only.
"""


def markdown() -> str:
    """The whole document."""
    parts = [_HEAD, "## Top level\n", _table(_plain(Config), ())]
    for name, field in fields(Config).items():
        section = section_of(field)
        if section is not None:
            parts += _section(section, (name,))
    parts += [_ROUTES_HEAD, _table(fields(Route), None), _SINKS_HEAD]
    for kind, model in _own_sinks().items():
        parts += [f'### `type = "{kind}"`\n', _table(fields(model), None)]
    return "\n".join(parts)


def json_schema() -> dict[str, Any]:
    """JSON Schema of relay.toml; a sink is one of the installed types with its own options."""
    schema = Config.model_json_schema(by_alias=True)
    models = registry.options_models()
    schema["$defs"]["SinkSection"] = {"oneOf": [{"$ref": f"#/$defs/sink_{kind}"} for kind in models]}
    for kind, model in models.items():
        options = model.model_json_schema(by_alias=True)
        schema["$defs"] |= options.pop("$defs", {})
        options["properties"] = {"type": {"const": kind}, **options.get("properties", {})}
        options["required"] = ["type", *options.get("required", [])]
        schema["$defs"][f"sink_{kind}"] = options
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    # The DSN may come from the environment, so an editor must not insist on it.
    schema.pop("required", None)
    schema["$defs"]["Database"].pop("required", None)
    return schema


def _own_sinks() -> dict[str, type[BaseModel]]:
    """The types that this package brings, whatever else is installed."""
    return {kind: model for kind, model in registry.options_models().items() if model.__module__.startswith("relay.")}


def _section(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[str]:
    yield f"## `[{'.'.join(path)}]`\n"
    if model.__doc__:
        yield model.__doc__.strip() + "\n"
    if plain := _plain(model):
        yield _table(plain, path)
    for name, field in fields(model).items():
        if (section := section_of(field)) is not None:
            yield from _section(section, (*path, name))


def _plain(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {
        name: field
        for name, field in fields(model).items()
        if section_of(field) is None and name not in {"sinks", "routes"}
    }


def _table(rows: Mapping[str, FieldInfo], path: tuple[str, ...] | None) -> str:
    if not rows:
        return "No options.\n"
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for name, field in rows.items():
        described = (field.description or "").replace("|", "\\|")
        if path is not None:
            described += f"<br>`{variable((*path, name))}`"
        lines.append(f"| `{name}` | {_type(field)} | {_default(field)} | {described} |")
    return "\n".join(lines) + "\n"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=False)
    if value is PydanticUndefined:
        return "**required**"
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | list):
        return f"`{list(value)}`"
    return (
        f'`"{value}"`'
        if isinstance(value, str)
        else f"`{value:_}`".replace("_", ",")
        if isinstance(value, int)
        else f"`{value}`"
    )


def _type(field: FieldInfo) -> str:
    return _type_name(field.annotation)


def _type_name(annotation: Any) -> str:
    arguments = [item for item in get_args(annotation) if item is not NoneType]
    if get_origin(annotation) is Literal:
        return ", ".join(f'`"{item}"`' for item in arguments)
    if isinstance(annotation, UnionType) or get_origin(annotation) is Union:
        return " or ".join(map(_type_name, arguments))
    if get_origin(annotation) in {tuple, list}:
        return "list"
    names = {
        bool: "true or false",
        int: "integer",
        float: "number",
        SecretStr: "secret text",
        Path: "path",
        str: "text",
    }
    return names.get(annotation) or (_type_name(arguments[0]) if arguments else "text")


def main(arguments: list[str]) -> int:
    """Write the document, or with `--check` say whether it is up to date."""
    text = markdown()
    if "--check" not in arguments:
        DOCUMENT.write_text(text, "utf-8")
        return 0
    if DOCUMENT.exists() and DOCUMENT.read_text("utf-8") == text:
        return 0
    sys.stderr.write(f"{DOCUMENT} is out of date: run `python -m relay.cli.reference`\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
