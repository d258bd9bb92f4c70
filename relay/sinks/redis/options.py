"""What an operator can set for a Redis sink, and the address that the URL means."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 - pydantic resolves the field's type at run time
from typing import Final, Self
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import Field, SecretStr, field_validator

from relay.config.models import Seconds, Section

__all__ = ["Address", "RedisOptions"]

_DEFAULT_PORT: Final = 6379
_SCHEMES: Final = ("redis", "rediss", "unix")


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is and who we are there. Its text shows neither user nor password."""

    host: str
    port: int
    path: str | None
    database: int
    tls: bool
    username: str | None = field(repr=False, default=None)
    password: str | None = field(repr=False, default=None)

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}/{self.database}"

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read `redis://[user:password@]host[:port][/database]`, `rediss://` or `unix://[user:password@]/path[?db=0]`.

        Raises ValueError, whose text never contains a part of the URL: it may be a password.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ValueError("not a URL; percent-encode special characters of the password") from None
        if parts.scheme not in _SCHEMES:
            raise ValueError("must begin with redis://, rediss:// or unix://")
        unix = parts.scheme == "unix"
        if not unix and not parts.hostname:
            raise ValueError("names no host")
        return cls(
            host=parts.hostname or "",
            port=_DEFAULT_PORT if port is None else port,
            path=unquote(parts.path) if unix else None,
            database=_database(parts, "" if unix else parts.path.strip("/")),
            tls=parts.scheme == "rediss",
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
        )


def _database(parts: SplitResult, path: str) -> int:
    query = parts.query.removeprefix("db=")
    if parts.query and query == parts.query:
        raise ValueError("the only parameter it takes is db")
    number = query or path or "0"
    if not number.isdecimal():
        raise ValueError("the database must be a number, as in redis://host:6379/0")
    return int(number)


class RedisOptions(Section):
    """Options of a Redis sink."""

    url: SecretStr = Field(
        description="`redis://[user:password@]host[:port][/database]`, `rediss://` for TLS, or `unix:///path`"
    )
    username: str | None = Field(None, description="ACL user, instead of one in the URL")
    password: SecretStr | None = Field(None, description="password, instead of one in the URL")
    tls_ca_file: Path | None = Field(
        None, description="certificates to trust for `rediss://`; default: those of the system"
    )
    concurrency: int = Field(
        2, ge=1, le=64, description="batches in flight, one connection each: one is built while one is on its way"
    )
    publish_timeout_seconds: Seconds = Field(
        10.0,
        description="that the server may be silent, connecting included; then the outcome is unknown and tried again",
    )
    connect_timeout_seconds: Seconds = Field(5.0, description="of one connection attempt with its handshake")
    payload_bytes_max: int = Field(
        512 * 1024 * 1024,
        ge=1,
        description="a payload above it is a dead letter; the server's own `proto-max-bulk-len` is obeyed as well",
    )
    maxlen: int | None = Field(
        None,
        ge=1,
        description="trim each stream to about this many entries (`MAXLEN ~`), read by consumers or not; off by default",
    )
    client_name: str = Field("outbox-relay", pattern=r"^[!-~]{1,64}$", description="shown by CLIENT LIST; no spaces")

    @field_validator("url")
    @classmethod
    def _url_is_an_address(cls, url: SecretStr) -> SecretStr:
        Address.parse(url.get_secret_value())
        return url

    @property
    def address(self) -> Address:
        """The URL, with `username` and `password` over those in it."""
        address = Address.parse(self.url.get_secret_value())
        return Address(
            host=address.host,
            port=address.port,
            path=address.path,
            database=address.database,
            tls=address.tls,
            username=self.username or address.username,
            password=address.password if self.password is None else self.password.get_secret_value(),
        )
