"""From messages to the bytes of a record batch, read back by aiokafka's own decoder."""

from __future__ import annotations

from typing import Any

import pytest
from aiokafka.record.memory_records import MemoryRecords

from relay.sinks.kafka.records import Piece, headers, timestamp
from relay.testing.messages import make_message
from relay.types import TIMESTAMP_INFINITY, TIMESTAMP_MINUS_INFINITY

NOW_MS = 1_767_960_000_000
HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("created_at", "expected"),
    [
        (NOW_MS * 1000 + 999, NOW_MS),
        (0, 0),
        (1_999, 1),
        ((NOW_MS + HOUR_MS) * 1000, NOW_MS + HOUR_MS),
        ((NOW_MS + HOUR_MS + 1) * 1000, NOW_MS),
        (-1, NOW_MS),
        (-63_517_824_000_000_000, NOW_MS),
        (TIMESTAMP_INFINITY, NOW_MS),
        (TIMESTAMP_MINUS_INFINITY, NOW_MS),
    ],
)
def test_a_timestamp_is_created_at_where_kafka_can_have_it(created_at: int, expected: int) -> None:
    """Milliseconds, rounded down; the time of publishing for what brokers would refuse."""
    assert timestamp(created_at, NOW_MS) == expected


def test_headers_begin_with_our_own() -> None:
    """`id` and `created_at`, then the event's own in its order; null stays null."""
    message = make_message("t", headers='{"a": "1", "n": 12.50, "x": null}')
    assert headers(message) == [
        ("id", message.id.encode()),
        ("created_at", b"2026-01-09T12:00:00.123456Z"),
        ("a", b"1"),
        ("n", b"12.50"),
        ("x", None),
    ]


def test_an_events_own_id_and_created_at_do_not_override_ours() -> None:
    """Consumers deduplicate by `id`; an application that sends the name by accident must not break that."""
    message = make_message("t", headers='{"id": "forged", "created_at": "never", "kept": "yes"}')
    assert headers(message) == [
        ("id", message.id.encode()),
        ("created_at", b"2026-01-09T12:00:00.123456Z"),
        ("kept", b"yes"),
    ]


@pytest.mark.parametrize("codec", [0, 1, 2, 3, 4])
def test_a_piece_carries_what_it_was_given(codec: int) -> None:
    """Keys, values, nulls, headers, timestamps and the producer's state, with every codec."""
    piece = Piece(codec, 10_000)
    messages = [
        make_message("t", key="k", payload=b"v"),
        make_message("t", key=None, payload=None),
        make_message("t", key="", payload=b""),
    ]
    for index, message in enumerate(messages):
        key = None if message.key is None else message.key.encode()
        assert piece.add(index, 5 + index, key, message, [("h", b"1"), ("n", None)])
    batch = MemoryRecords(bytes(piece.build(77, 3, 21))).next_batch()
    assert batch is not None
    assert batch.validate_crc()
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (77, 3, 21)
    assert [(r.key, r.value, r.timestamp, r.headers) for r in _records(batch)] == [
        (b"k", b"v", 5, [("h", b"1"), ("n", None)]),
        (None, None, 6, [("h", b"1"), ("n", None)]),
        (b"", b"", 7, [("h", b"1"), ("n", None)]),
    ]


def test_a_full_piece_takes_no_more() -> None:
    """The record that does not fit is left for the next piece."""
    piece = Piece(0, 1_000)
    message = make_message("t", payload=b"x" * 300)
    taken = [piece.add(index, 0, None, message, []) for index in range(4)]
    assert taken == [True, True, True, False]
    assert piece.indexes == [0, 1, 2]
    assert piece.size <= 1_000


def test_an_oversized_record_is_alone_in_its_piece() -> None:
    """So that what the broker says to it is said to no neighbour."""
    piece = Piece(0, 1_000)
    assert piece.add(0, 0, None, make_message("t", payload=b"x" * 5_000), [])
    assert not piece.add(1, 0, None, make_message("t"), [])
    assert len(piece) == 1


def _records(batch: Any) -> list[Any]:
    return list(batch)
