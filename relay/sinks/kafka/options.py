"""The options of a Kafka sink, each with its unit and its reason, and the TLS context that they describe."""

from __future__ import annotations

import ssl
from pathlib import Path  # noqa: TC003  # pydantic needs it at run time
from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from relay.config.models import Seconds, Section
from relay.errors import InvalidConfig
from relay.sinks.kafka.wire import Security, addresses

__all__ = ["KafkaOptions", "security"]

_PORT_MAX: Final = 65_535


def _servers(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


class KafkaOptions(Section):
    """Options of a Kafka sink."""

    bootstrap_servers: Annotated[tuple[str, ...], BeforeValidator(_servers), Field(min_length=1)] = Field(
        description="`host:port` of one or more brokers, as a list or separated by commas; one that answers is enough"
    )
    client_id: str = Field("outbox-relay", min_length=1, max_length=200, description="our name in the brokers' logs")
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = Field(
        "none", description="of record batches; snappy, lz4 and zstd need the package `cramjam`"
    )
    linger_seconds: float = Field(
        0.0, ge=0, le=1, description="wait before a request, so that more batches share it; latency against broker CPU"
    )
    max_request_size: int = Field(
        16 * 1024 * 1024,
        ge=1024,
        le=96 * 1024 * 1024,
        description="bytes of the largest record batch, as sent (compressed); a larger event is rejected unasked. "
        "Up to it the topic's own limit (`max.message.bytes`) decides. "
        "Brokers cut a connection at 100 MiB (`socket.request.max.bytes`), which looks like an outage",
    )
    publish_timeout_seconds: Seconds = Field(
        30.0, description="of one batch, retries included; what has no answer by then is tried again later"
    )
    request_timeout_seconds: Seconds = Field(
        10.0, description="of one request or connection attempt; at most half of `publish_timeout_seconds` is used"
    )
    metadata_max_age_seconds: Seconds = Field(
        60.0, description="after which leaders and new partitions are looked up again even without an error"
    )
    concurrency: int = Field(
        2, ge=1, le=64, description="batches in flight; one is built while another is on the wire (see docs)"
    )
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="the listener's protocol"
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        "PLAIN", description="how to authenticate; only with SASL_PLAINTEXT and SASL_SSL"
    )
    sasl_username: str | None = Field(None, description="required with SASL_PLAINTEXT and SASL_SSL")
    sasl_password: SecretStr | None = Field(None, description="required with SASL_PLAINTEXT and SASL_SSL")
    ssl_ca_file: Path | None = Field(None, description="PEM file of trusted authorities; default: the system's")
    ssl_cert_file: Path | None = Field(None, description="PEM file of our certificate, for brokers that ask for one")
    ssl_key_file: Path | None = Field(None, description="PEM file of its key; default: inside `ssl_cert_file`")
    ssl_key_password: SecretStr | None = Field(None, description="of the key file")
    ssl_check_hostname: bool = Field(default=True, description="whether the broker's name must match its certificate")

    @model_validator(mode="after")
    def _servers_are_addresses(self) -> Self:
        try:
            bad = any(not host or not 0 < port <= _PORT_MAX for host, port in addresses(self.bootstrap_servers))
        except ValueError:
            bad = True
        if bad:
            raise ValueError("bootstrap_servers must be host:port, for example kafka-1:9092,kafka-2:9092")
        return self

    @model_validator(mode="after")
    def _credentials_match_the_protocol(self) -> Self:
        given = self.sasl_username is not None and self.sasl_password is not None
        some = self.sasl_username is not None or self.sasl_password is not None
        sasl = self.security_protocol.startswith("SASL")
        if sasl and not given:
            raise ValueError(f"{self.security_protocol} needs sasl_username and sasl_password")
        if some and not sasl:
            raise ValueError("sasl_username and sasl_password need security_protocol SASL_SSL or SASL_PLAINTEXT")
        return self

    @model_validator(mode="after")
    def _files_match_the_protocol(self) -> Self:
        files = (self.ssl_ca_file, self.ssl_cert_file, self.ssl_key_file)
        if any(files) and not self.security_protocol.endswith("SSL"):
            raise ValueError("ssl_ca_file, ssl_cert_file and ssl_key_file need security_protocol SSL or SASL_SSL")
        if self.ssl_key_file and not self.ssl_cert_file:
            raise ValueError("ssl_key_file needs ssl_cert_file")
        return self


def security(name: str, options: KafkaOptions) -> Security:
    """What a connection needs. Raises InvalidConfig for a certificate or key that cannot be read."""
    password = options.sasl_password
    return Security(
        protocol=options.security_protocol,
        ssl_context=_ssl_context(name, options) if options.security_protocol.endswith("SSL") else None,
        mechanism=options.sasl_mechanism,
        username=options.sasl_username,
        password=password.get_secret_value() if password else None,
    )


def _ssl_context(name: str, options: KafkaOptions) -> ssl.SSLContext:
    key_password = options.ssl_key_password
    try:
        context = ssl.create_default_context(cafile=options.ssl_ca_file)
        context.check_hostname = options.ssl_check_hostname
        if options.ssl_cert_file:
            # Without a callable OpenSSL would ask for a missing password on the terminal, and hang a service.
            secret = key_password.get_secret_value() if key_password else ""
            context.load_cert_chain(options.ssl_cert_file, options.ssl_key_file, password=lambda: secret)
    except (OSError, ssl.SSLError) as error:
        raise InvalidConfig(
            f"sinks.{name}: the TLS files cannot be used: {error}",
            hint="Check ssl_ca_file, ssl_cert_file, ssl_key_file and ssl_key_password: PEM, readable, matching.",
        ) from error
    return context
