"""Options of `[sinks.<name>] type = "rabbitmq"`, checked without a broker; the URL is a secret."""

from __future__ import annotations

from pydantic import Field, SecretStr, field_validator
from yarl import URL

from relay.config.models import Seconds, Section
from relay.sinks.rabbitmq.encoding import SHORT_STRING_BYTES_MAX

__all__ = ["RabbitMQOptions"]


class RabbitMQOptions(Section):
    """Where to publish. Messages are always mandatory and persistent; that is not an option."""

    url: SecretStr = Field(description="`amqp://user:password@host:5672/vhost`, or `amqps://`; `%2F` is the vhost `/`")
    exchange: str = Field(
        "",
        description="that messages are published to; it must exist. Empty: the default exchange, destination = queue",
    )
    channels: int = Field(
        2,
        ge=1,
        le=64,
        description="batches in flight, each on a channel of its own; two hide each other's last confirm",
    )
    publish_timeout_seconds: Seconds = Field(
        10.0,
        description="for which the broker may be silent, connecting included; "
        "what has no confirm by then is tried again. A batch that makes progress may take four times as long",
    )
    heartbeat_seconds: int = Field(
        15, ge=1, le=600, description="AMQP heartbeat; the broker drops a relay that is silent for twice as long"
    )

    @field_validator("url")
    @classmethod
    def _is_an_amqp_url(cls, value: SecretStr) -> SecretStr:
        try:
            url = URL(value.get_secret_value())
            complete = url.scheme in ("amqp", "amqps") and bool(url.host)
        except ValueError:
            complete = False
        if not complete:  # raised outside of `except`: the parser's own message would quote the password
            raise ValueError("must be a URL like amqp://user:password@host:5672/vhost")
        return value

    @field_validator("exchange")
    @classmethod
    def _is_a_short_string(cls, value: str) -> str:
        if len(value.encode()) > SHORT_STRING_BYTES_MAX:
            raise ValueError(f"is longer than the {SHORT_STRING_BYTES_MAX} bytes that AMQP allows for a name")
        return value
