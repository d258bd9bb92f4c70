"""`created_at` as text, also outside of what RFC 3339 and Python's datetime know."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.timestamps import rfc3339
from relay.types import TIMESTAMP_INFINITY, TIMESTAMP_MINUS_INFINITY

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@settings(max_examples=60, deadline=None)
@given(st.datetimes(timezones=st.just(UTC)))
def test_every_moment_of_datetime_is_printed_as_it_prints_it(moment: datetime) -> None:
    """Years 1 to 9999, before and after the epoch, to the microsecond."""
    microseconds = (moment - EPOCH) // timedelta(microseconds=1)
    assert rfc3339(microseconds) == moment.strftime("%Y").zfill(4) + moment.strftime("-%m-%dT%H:%M:%S.%fZ")


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (TIMESTAMP_INFINITY, "infinity"),
        (TIMESTAMP_MINUS_INFINITY, "-infinity"),
        (-63_517_824_000_000_000, "-0043-03-15T00:00:00.000000Z"),
        (-62_167_219_200_000_000, "0000-01-01T00:00:00.000000Z"),
        (-62_167_219_200_000_001, "-0001-12-31T23:59:59.999999Z"),
        (576_261_475_200_000_000, "+20231-01-01T00:00:00.000000Z"),
        (-1, "1969-12-31T23:59:59.999999Z"),
        (951_782_400_000_000, "2000-02-29T00:00:00.000000Z"),
    ],
)
def test_moments_outside_of_it(microseconds: int, text: str) -> None:
    """Infinity, years BC (year 0 is 1 BC) and after 9999 (FIELD.md A5)."""
    assert rfc3339(microseconds) == text
