"""Options of a RabbitMQ sink: what is refused, and that the URL stays secret."""

from __future__ import annotations

from typing import Any

import pytest

from relay.config import SinkSection
from relay.errors import InvalidConfig
from relay.sinks.rabbitmq import RabbitMQSink
from relay.sinks.registry import create

URL = "amqp://relay:s3cr%40t@broker:5672/shop"


def section(**options: Any) -> SinkSection:
    return SinkSection.model_validate({"type": "rabbitmq", **options})


def test_the_smallest_section_is_a_url() -> None:
    sink = create("main", section(url=URL))
    assert isinstance(sink, RabbitMQSink)
    assert sink.concurrency >= 1


@pytest.mark.parametrize("url", ["amqps://broker", "amqp://user:p%2Fw@[::1]:5672/%2F", "amqp://localhost//odd"])
def test_urls_that_amqp_clients_take_are_taken(url: str) -> None:
    create("main", section(url=url))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "sinks.main.url: required"),
        ({"url": "redis://relay:s3cr@t@broker"}, "sinks.main.url: must be a URL like amqp://"),
        ({"url": "amqp://"}, "sinks.main.url: must be a URL like amqp://"),
        ({"url": "amqp://relay:s3cr@t@broker:port/"}, "sinks.main.url: must be a URL like amqp://"),
        ({"url": URL, "exchnage": "e"}, "sinks.main.exchnage: unknown option, did you mean 'exchange'"),
        ({"url": URL, "exchange": "e" * 256}, "sinks.main.exchange: is longer than the 255 bytes"),
        ({"url": URL, "channels": 0}, "sinks.main.channels"),
        ({"url": URL, "heartbeat_seconds": 0}, "sinks.main.heartbeat_seconds"),
        ({"url": URL, "publish_timeout_seconds": 0}, "sinks.main.publish_timeout_seconds"),
        ({"url": URL, "mandatory": False}, "sinks.main.mandatory: unknown option"),
    ],
)
def test_a_wrong_option_is_named_and_no_secret_shown(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        create("main", section(**options))
    shown = f"{caught.value} {caught.value.hint} {caught.value.__cause__}"
    assert message in shown
    assert "s3cr" not in shown


def test_the_url_is_hidden_in_the_options() -> None:
    assert "s3cr" not in repr(RabbitMQSink.Options.model_validate({"url": URL}))
