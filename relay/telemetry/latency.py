"""A latency histogram that takes a whole batch in one call, each event counted exactly.

`prometheus_client.Histogram.observe` costs about 2 µs an event: a fifth of a core at full drain. The
events of a batch were stored in nearly sorted order, so sorting them is linear and each bucket is one
binary search: about 0.06 µs an event.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["BUCKETS_SECONDS", "LatencyHistogram", "LatencySeries"]

BUCKETS_SECONDS: Final = (
    *(0.001, 0.002, 0.003, 0.004, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0),
)
"""Upper edges. Dense around the targets of 4 ms (p50) and 20 ms (p99); long enough to show an outage."""

_EDGES_US: Final = tuple(round(edge * 1_000_000) for edge in BUCKETS_SECONDS)
_NAMES: Final = (*(repr(edge) for edge in BUCKETS_SECONDS), "+Inf")
_SEARCH_EACH: Final = len(_EDGES_US)  # below so many events one search for each event is cheaper than one for each edge


class LatencySeries:
    """Latencies of one sink: a count for each bucket, and their sum."""

    __slots__ = ("counts", "sum_us")

    def __init__(self) -> None:
        self.counts = [0] * len(_NAMES)
        self.sum_us = 0

    def observe_many(self, stored_at_us: Sequence[int], now_us: int) -> None:
        """Count `now_us - stored` for each event; both in microseconds since the Unix epoch.

        An event stored after `now_us` (the clocks of server and pod differ) counts as no latency at all.
        """
        if len(stored_at_us) < _SEARCH_EACH:
            self._observe_each(stored_at_us, now_us)
        else:
            self._observe_sorted(sorted(stored_at_us), now_us)

    def _observe_each(self, stored_at_us: Sequence[int], now_us: int) -> None:
        for stored in stored_at_us:
            latency = now_us - stored if stored < now_us else 0
            self.counts[bisect_left(_EDGES_US, latency)] += 1
            self.sum_us += latency

    def _observe_sorted(self, stored: list[int], now_us: int) -> None:
        past = bisect_left(stored, now_us)
        self.sum_us += now_us * past - sum(stored if past == len(stored) else stored[:past])
        above = len(stored)  # events that no bucket has taken yet; the newest are the fastest
        for index, edge in enumerate(_EDGES_US):
            older = bisect_left(stored, now_us - edge, 0, above)
            self.counts[index] += above - older
            above = older
            if not above:
                return
        self.counts[-1] += above


class LatencyHistogram(Collector):
    """`LatencySeries` by sink, shown to Prometheus as one histogram."""

    def __init__(self, name: str, documentation: str, label: str, registry: CollectorRegistry) -> None:
        self._name, self._documentation, self._label = name, documentation, label
        self._series: dict[str, LatencySeries] = {}
        registry.register(self)

    def series(self, label: str) -> LatencySeries:
        """The series of one label value; made when it is first asked for."""
        return self._series.setdefault(label, LatencySeries())

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """Name and type without values, so that a second registration of the name is refused."""
        yield self._family()

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """All series in Prometheus's form: cumulative counts, seconds."""
        family = self._family()
        for label, series in self._series.items():
            buckets = list(zip(_NAMES, map(float, accumulate(series.counts)), strict=True))
            family.add_metric([label], buckets, series.sum_us / 1_000_000)
        yield family

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._documentation, labels=[self._label])
