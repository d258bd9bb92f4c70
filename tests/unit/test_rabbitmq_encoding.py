"""Frames that we marshal by hand, read back by pamqp; and what is refused before it could hurt a channel."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands as spec
from pamqp import frame as frames
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from relay.errors import MessageRejected
from relay.sinks.rabbitmq.encoding import Encoder
from relay.testing.messages import CREATED_AT, HEADERS, make_message
from relay.timestamps import rfc3339

if TYPE_CHECKING:
    from relay.types import Message

FRAME_MAX = 131_072
CHANNEL = 7


def read_back(data: bytes) -> list[Any]:
    """All frames in `data`, each for our channel."""
    found = []
    while data:
        used, channel, frame = frames.unmarshal(data)
        assert channel == CHANNEL
        found.append(frame)
        data = data[used:]
    return found


def encoded(message: Message, *, exchange: str = "events", frame_max: int = FRAME_MAX) -> tuple[Any, Any, bytes]:
    """The publish method, the properties and the body as pamqp reads them."""
    method, header, *bodies = read_back(Encoder(exchange, frame_max).encode(message, CHANNEL))
    assert isinstance(method, spec.Basic.Publish)
    assert isinstance(header, ContentHeader)
    assert all(isinstance(body, ContentBody) for body in bodies)
    body = b"".join(body.value for body in bodies)
    assert header.body_size == len(body)
    return method, header.properties, body


def test_a_message_is_mandatory_persistent_and_carries_its_identity() -> None:
    message = make_message("orders.created", key="k", payload=b'{"n":1}', headers='{"tenant": "acme"}')
    method, properties, body = encoded(message)
    assert (method.exchange, method.routing_key, method.mandatory, method.immediate) == (
        "events",
        "orders.created",
        True,
        False,
    )
    assert (properties.delivery_mode, properties.message_id, body) == (2, message.id, b'{"n":1}')
    assert properties.timestamp == datetime.fromtimestamp(message.created_at // 1_000_000, UTC)
    assert properties.headers == {"created_at": rfc3339(message.created_at), "key": "k", "tenant": "acme"}


@given(
    destination=st.text(max_size=60),
    key=st.none() | st.text(max_size=50),
    payload=st.binary(max_size=20_000),
    channel=st.just(CHANNEL),
)
def test_any_text_and_any_bytes_come_back(destination: str, key: str | None, payload: bytes, channel: int) -> None:
    """Split over many frames, too: the smallest `frame_max` that AMQP allows."""
    message = make_message(destination, key=key, payload=payload)
    method, properties, body = encoded(message, frame_max=4096)
    assert (method.routing_key, properties.headers.get("key"), body) == (destination, key, payload)


@pytest.mark.parametrize("size", [0, 1, 4087, 4088, 4089, 8176, 8177])
def test_no_frame_exceeds_frame_max(size: int) -> None:
    """`frame_max` counts the 8 bytes around the payload; a larger frame would cost the connection."""
    data = Encoder("", 4096).encode(make_message("q", payload=b"x" * size), CHANNEL)
    bodies = [frame for frame in read_back(data) if isinstance(frame, ContentBody)]
    assert [len(body.value) + 8 <= 4096 for body in bodies] == [True] * -(-size // 4088)


def test_frame_max_zero_is_no_limit() -> None:
    message = make_message("q", payload=b"x" * 300_000, headers='{"a": "' + "y" * 200_000 + '"}')
    _, properties, body = encoded(message, frame_max=0)
    assert (len(body), len(properties.headers["a"])) == (300_000, 200_000)


@pytest.mark.parametrize(("payload", "tombstone"), [(None, True), (b"", None), (b"null", None)])
def test_a_tombstone_is_marked(payload: bytes | None, tombstone: bool | None) -> None:
    """SQL NULL, '' and JSON null are three things (FIELD.md A3)."""
    _, properties, body = encoded(make_message("q", payload=payload))
    assert properties.headers.get("tombstone") is tombstone
    assert body == (payload or b"")


def test_a_message_without_a_key_has_no_key_header_and_an_empty_key_has_one() -> None:
    assert "key" not in encoded(make_message("q", key=None))[1].headers
    assert encoded(make_message("q", key=""))[1].headers["key"] == ""


@pytest.mark.parametrize("kind", CREATED_AT)
def test_a_timestamp_that_clients_misread_is_left_out(kind: str) -> None:
    """Before 1970 AMQP has none, and far in the future clients misread it or fail; the header is always exact."""
    message = make_message("q", created_at=CREATED_AT[kind])
    properties = encoded(message)[1]
    assert (properties.timestamp is not None) == (kind in {"ordinary", "epoch"})
    assert properties.headers["created_at"] == rfc3339(message.created_at)


def test_the_last_timestamp_is_one_that_pamqp_reads_as_seconds() -> None:
    properties = encoded(make_message("q", created_at=4_294_967_295_999_999))[1]
    assert properties.timestamp == datetime.fromtimestamp(2**32 - 1, UTC)
    assert encoded(make_message("q", created_at=4_294_967_296_000_000))[1].timestamp is None


@pytest.mark.parametrize("kind", HEADERS)
def test_headers_follow_the_documented_rule(kind: str) -> None:
    """Strings are long strings, null is void, anything else its JSON text (FIELD.md A9)."""
    headers = encoded(make_message("q", headers=HEADERS[kind]))[1].headers
    assert all(value is None or isinstance(value, str) for value in headers.values())
    if kind == "not strings":
        assert headers["x"] is None
        assert headers["big"] == "11171330917854890490"


def test_the_relays_own_headers_win() -> None:
    """An event cannot make itself a tombstone or change its key."""
    message = make_message("q", key="mine", headers='{"key": "x", "created_at": "x", "tombstone": "x", "a": "b"}')
    headers = encoded(message)[1].headers
    assert headers == {"key": "mine", "created_at": rfc3339(message.created_at), "a": "b"}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (make_message("d" * 256), "routing key has 256 bytes"),
        (make_message("ż" * 128), "routing key has 256 bytes"),
        (make_message("q", headers='{"' + "h" * 256 + '": "x"}'), "header name has 256 bytes"),
        (make_message("q", headers='{"a": "' + "x" * FRAME_MAX + '"}'), "headers and properties take"),
        (make_message("q", key="k" * FRAME_MAX), "headers and properties take"),
        (make_message("q", headers='{"CC": "other"}'), "'CC' is reserved"),
        (make_message("q", headers='{"BCC": ["other"]}'), "'BCC' is reserved"),
        (make_message("q", headers="[1]"), "not a JSON object"),
        (make_message("q", key="\ud800"), "not valid Unicode"),
        (make_message("\ud800"), "not valid Unicode"),
    ],
)
def test_what_the_broker_would_close_the_channel_for_is_refused(message: Message, reason: str) -> None:
    with pytest.raises(MessageRejected, match=reason):
        Encoder("events", FRAME_MAX).encode(message, CHANNEL)


def test_an_id_that_is_no_short_string_is_refused() -> None:
    message = make_message("q")
    message.id = "i" * 256
    with pytest.raises(MessageRejected, match="event id has 256 bytes"):
        Encoder("events", FRAME_MAX).encode(message, CHANNEL)


def test_the_longest_names_that_amqp_allows_pass() -> None:
    message = make_message("d" * 255, headers='{"' + "h" * 255 + '": "x"}')
    method, properties, _ = encoded(message, exchange="e" * 255)
    assert (len(method.routing_key), len(method.exchange)) == (255, 255)
    assert properties.headers["h" * 255] == "x"
