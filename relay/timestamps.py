"""`created_at` as text: RFC 3339 in UTC with microseconds, and what lies outside RFC 3339 without a crash.

PostgreSQL's range is wider than `datetime`'s: infinity, years BC and years after 9999 are legal
values of the column (FIELD.md A5). They print as ISO 8601 extended years (`-0043-03-15T...`,
`+20231-01-01T...`) and as `infinity` / `-infinity`.
"""

from __future__ import annotations

from functools import lru_cache

from relay.types import TIMESTAMP_INFINITY, TIMESTAMP_MINUS_INFINITY

__all__ = ["rfc3339"]

_DAY = 86_400
_LAST_YEAR = 9999  # of RFC 3339


def rfc3339(microseconds: int) -> str:
    """Text of a moment given in microseconds since the Unix epoch."""
    if microseconds == TIMESTAMP_INFINITY:
        return "infinity"
    if microseconds == TIMESTAMP_MINUS_INFINITY:
        return "-infinity"
    seconds, fraction = divmod(microseconds, 1_000_000)
    return f"{_seconds(seconds)}.{fraction:06d}Z"


@lru_cache(maxsize=256)
def _seconds(seconds: int) -> str:
    days, second = divmod(seconds, _DAY)
    year, month, day = _civil(days)
    if year > _LAST_YEAR:
        date = f"+{year}"
    elif year < 0:
        date = f"-{-year:04d}"
    else:
        date = f"{year:04d}"
    return f"{date}-{month:02d}-{day:02d}T{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"


def _civil(days: int) -> tuple[int, int, int]:
    """Proleptic Gregorian date of a day number, year 0 being 1 BC.

    The era arithmetic of Howard Hinnant's "chrono-Compatible Low-Level Date Algorithms" (civil_from_days).
    """
    days += 719_468
    era, day_of_era = divmod(days, 146_097)
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted = (5 * day_of_year + 2) // 153
    month = shifted + 3 if shifted < 10 else shifted - 9
    return era * 400 + year_of_era + (month <= 2), month, day_of_year - (153 * shifted + 2) // 5 + 1
