"""Options of the Kafka sink, and what wrong ones get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from relay.config import SinkSection
from relay.errors import InvalidConfig
from relay.sinks.kafka import KafkaSink
from relay.sinks.kafka import sink as sink_module
from relay.sinks.registry import create

if TYPE_CHECKING:
    from pathlib import Path


def make(**options: Any) -> KafkaSink:
    section = SinkSection.model_validate({"type": "kafka", "bootstrap_servers": "localhost:9092", **options})
    sink = create("events", section)
    assert isinstance(sink, KafkaSink)
    return sink


@pytest.mark.parametrize("servers", ["a:1,b:2", "a:1, b:2", ["a:1", "b:2"]])
def test_bootstrap_servers_are_a_text_or_a_list(servers: object) -> None:
    """As in Kafka's own files, or as TOML would have it."""
    assert make(bootstrap_servers=servers)._options.bootstrap_servers == ("a:1", "b:2")


@pytest.mark.parametrize("servers", ["", ":9092", "host:port", "host:70000", [], ["a:1", ""]])
def test_addresses_that_cannot_be_are_refused(servers: object) -> None:
    """At start, naming the option."""
    with pytest.raises(InvalidConfig, match="bootstrap_servers"):
        make(bootstrap_servers=servers)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"security_protocol": "SASL_SSL"}, "needs sasl_username and sasl_password"),
        ({"sasl_username": "u", "sasl_password": "p"}, "need security_protocol SASL_SSL"),
        ({"ssl_ca_file": "/ca.pem"}, "need security_protocol SSL"),
        ({"security_protocol": "SSL", "ssl_key_file": "/key.pem"}, "ssl_key_file needs ssl_cert_file"),
        ({"compression": "brotli"}, "compression"),
        ({"compresion": "gzip"}, "did you mean 'compression'"),
        ({"max_request_size": 200_000_000}, "max_request_size"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, object], words: str) -> None:
    """At start, in words that say what is missing."""
    with pytest.raises(InvalidConfig, match=words):
        make(**options)


def test_a_password_is_not_shown() -> None:
    """Neither by the options nor by the error of a wrong one beside it."""
    options: dict[str, Any] = {"security_protocol": "SASL_SSL", "sasl_username": "u", "sasl_password": "hunter2"}
    assert "hunter2" not in repr(make(**options)._options)
    with pytest.raises(InvalidConfig) as caught:
        make(**options, sasl_mechanism="GSSAPI")
    assert "hunter2" not in str(caught.value)


async def test_a_codec_without_its_library_is_refused_at_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator reads it at start, not in the reason of each event (FIELD.md C6)."""
    monkeypatch.setattr(sink_module, "codec_is_available", lambda name: name == "none")
    with pytest.raises(InvalidConfig, match=r"sinks\.events\.compression: 'lz4'"):
        await make(compression="lz4").open()


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_an_installed_codec_is_accepted(codec: str) -> None:
    """All of them, here."""
    sink = make(compression=codec)
    await sink.open()
    await sink.close()


async def test_a_certificate_that_cannot_be_read_is_refused_at_open(tmp_path: Path) -> None:
    """Missing, or not PEM."""
    with pytest.raises(InvalidConfig, match=r"sinks\.events: the TLS files"):
        await make(security_protocol="SSL", ssl_ca_file=str(tmp_path / "missing.pem")).open()
    (tmp_path / "bad.pem").write_text("not a certificate")
    with pytest.raises(InvalidConfig, match=r"sinks\.events: the TLS files"):
        await make(security_protocol="SSL", ssl_ca_file=str(tmp_path / "bad.pem")).open()
