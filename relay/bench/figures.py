"""Arithmetic on measurements: medians, paired ratios, percentiles."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["median_of", "paired_ratio", "percentile"]


def median_of(values: Iterable[float]) -> float:
    """Median; 0 of nothing."""
    found = list(values)
    return median(found) if found else 0.0


def paired_ratio(values: Sequence[float], floors: Sequence[float]) -> float:
    """Median of the ratios within each round: what both sides of a round share cancels out."""
    return median_of([value / floor for value, floor in zip(values, floors, strict=True) if floor])


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that so many percent do not exceed; 0 of nothing."""
    found = sorted(values)
    return found[max(-(-len(found) * percent // 100) - 1, 0).__int__()] if found else 0.0
