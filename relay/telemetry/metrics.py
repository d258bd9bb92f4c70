"""Every metric of one pod, in a registry of its own (docs/metrics.md is the list).

Labels are bounded (FIELD.md F8): sinks come from the configuration, kinds and causes from the enums
here, and of topics the first `TOPICS_MAX` keep their name; all others are added up as `other`.
Nothing here is thread-safe: the engine and the HTTP server share one event loop.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from relay import __version__
from relay.telemetry.latency import LatencyHistogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["NO_SINK", "OTHER", "TOPICS_MAX", "DeadLetterKind", "FailureKind", "Metrics", "SinkMetrics", "Wakeup"]

TOPICS_MAX: Final = 100
OTHER: Final = "other"
NO_SINK: Final = "none"
"""Label of what happened to an event before any sink was chosen: no route took its topic."""

_EVENTS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)

# `_created` would be one more series for each counter, read by nobody.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # the library leaves it untyped


class FailureKind(StrEnum):
    """Why an attempt to publish did not end in a confirmation."""

    REJECTED = "rejected"
    UNAVAILABLE = "unavailable"
    SINK_DOWN = "sink_down"
    MISCONFIGURED = "misconfigured"


class DeadLetterKind(StrEnum):
    """Why an event was given up."""

    REJECTED = "rejected"
    ATTEMPTS = "attempts"
    UNROUTED = "unrouted"
    OTHER = "other"


class Wakeup(StrEnum):
    """What ended a sleep."""

    NOTIFY = "notify"
    FALLBACK = "fallback"
    RECONNECT = "reconnect"
    OTHER = "other"


class SinkMetrics:
    """The series of one sink, looked up once: a call costs no search for labels."""

    __slots__ = (
        "_confirmed_latency",
        "_dead_letters",
        "_failures",
        "batch_events",
        "delivered",
        "misconfigured",
        "parked",
        "parked_events",
        "retries",
        "up",
    )

    def __init__(self, metrics: Metrics, name: str) -> None:
        self.delivered: Counter = metrics.delivered.labels(name)
        self.retries: Counter = metrics.retries.labels(name)
        self.parked: Counter = metrics.parked.labels(name)
        self.parked_events: Gauge = metrics.parked_events.labels(name)
        self.batch_events: Histogram = metrics.batch_events.labels(name)
        self.up: Gauge = metrics.sink_up.labels(name)
        self.misconfigured: Gauge = metrics.sink_misconfigured.labels(name)
        self._confirmed_latency = metrics.publish_latency.series(name)
        self._failures = {kind: metrics.failures.labels(name, kind) for kind in FailureKind}
        self._dead_letters = {kind: metrics.dead_letters.labels(name, kind) for kind in DeadLetterKind}

    def confirmed(self, stored_at_us: Sequence[int], now_us: int) -> None:
        """Count events that the broker has confirmed, and the time since each was stored."""
        self.delivered.inc(len(stored_at_us))
        self._confirmed_latency.observe_many(stored_at_us, now_us)

    def failed(self, kind: FailureKind, count: int = 1) -> None:
        """Count attempts that did not end in a confirmation."""
        self._failures[kind].inc(count)

    def dead_lettered(self, kind: str, count: int = 1) -> None:
        """Count events given up; a kind that `DeadLetterKind` does not know counts as `other`."""
        series = self._dead_letters.get(kind)  # type: ignore[call-overload]  # a StrEnum is found by its text
        (series or self._dead_letters[DeadLetterKind.OTHER]).inc(count)


class Metrics:
    """The metrics of one pod. `sinks` are the configured names, the only ones that become labels."""

    def __init__(self, sinks: Iterable[str] = ()) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=True)
        self._delivery(registry)
        self._source(registry)
        self._process(registry)
        self._topics: set[str] = set()
        self._sinks = {name: SinkMetrics(self, name) for name in sinks}

    def _delivery(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        self.delivered = counter("relay_delivered", "Events that the broker has confirmed.", "sink")
        self.failures = counter("relay_failures", "Attempts that did not end in a confirmation.", "sink", "kind")
        self.retries = counter("relay_retries", "Events tried again after a failure of their own.", "sink")
        self.parked = counter("relay_parked", "Events set aside, their key with them.", "sink")
        self.parked_events = gauge(
            "relay_parked_events", "Events that are set aside now, in the whole cluster.", "sink"
        )
        self.dead_letters = counter("relay_dead_letters", "Events given up.", "sink", "kind")
        self.sink_up = gauge("relay_sink_up", "1 while the broker takes messages.", "sink")
        self.sink_misconfigured = gauge(
            "relay_sink_misconfigured", "1 while an operator has to act: password, rights, missing exchange.", "sink"
        )
        self.batch_events = Histogram(
            "relay_batch_events", "Events of one batch to a sink.", ("sink",), registry=registry, buckets=_EVENTS
        )
        self.publish_latency = LatencyHistogram(
            "relay_publish_latency_seconds", "From stored in the outbox to confirmed by the broker.", "sink", registry
        )

    def _source(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        self.backlog_events = gauge(
            "relay_backlog_events", "Events not settled, in the whole cluster; a lower bound when it is large.", "topic"
        )
        self.backlog_oldest_age_seconds = gauge(
            "relay_backlog_oldest_age_seconds", "Age of the oldest event that is not settled.", "topic"
        )
        self.lanes_owned = gauge("relay_lanes_owned", "Lanes that this pod owns, of 64.")
        self.in_flight_events = gauge("relay_in_flight_events", "Events read and not settled yet.")
        self.in_flight_bytes = gauge("relay_in_flight_bytes", "Bytes of the events in flight.")
        self.reads = counter("relay_reads", "Reads of the outbox.")
        self.read_events = Histogram(
            "relay_read_events", "Events of one read.", registry=registry, buckets=(0, *_EVENTS)
        )
        self.settled = counter("relay_settled", "Events settled in the outbox.")
        self.floor_violations = counter(
            "relay_floor_violations",
            "Events that a full sweep found below the floor; each one is a bug or a foreign nextval.",
        )
        self.leases_lost = counter("relay_lease_lost", "Lanes that another pod took before this one gave them up.")
        self.source_reconnects = counter(
            "relay_source_reconnects", "Connections to PostgreSQL made again after a loss."
        )
        self.asleep = gauge("relay_asleep", "1 while this pod waits for a notification.")
        self.wakeups = counter("relay_wakeups", "Ends of a sleep.", "cause")
        self._wakeups = {cause: self.wakeups.labels(cause) for cause in Wakeup}

    def _process(self, registry: CollectorRegistry) -> None:
        self.loop_lag = Gauge(
            "relay_loop_lag_seconds", "Longest delay of the event loop in the last 15 seconds.", registry=registry
        )
        build = Gauge("relay_build_info", "Always 1.", ("version", "python"), registry=registry)
        build.labels(__version__, platform.python_version()).set(1)
        prometheus_client.ProcessCollector(registry=registry)

    def sink(self, name: str | None) -> SinkMetrics:
        """The series of a sink. None is an event that no route took; an unconfigured name counts as `other`."""
        if (found := self._sinks.get(NO_SINK if name is None else name)) is None:
            label = NO_SINK if name is None else OTHER
            found = self._sinks.setdefault(label, SinkMetrics(self, label))
        return found

    def read(self, events: int) -> None:
        """Count one read of the outbox that returned so many events."""
        self.reads.inc()
        self.read_events.observe(events)

    def woke(self, cause: str) -> None:
        """Count the end of a sleep; a cause that `Wakeup` does not know counts as `other`."""
        series = self._wakeups.get(cause)  # type: ignore[call-overload]  # a StrEnum is found by its text
        (series or self._wakeups[Wakeup.OTHER]).inc()

    def backlog(self, topics: Iterable[tuple[str, int, float]]) -> None:
        """Replace the backlog by (topic, events, age of the oldest in seconds) for each topic that has one.

        A topic that has none any more shows 0, so that its graph falls instead of ending.
        """
        events: dict[str, int] = defaultdict(int, dict.fromkeys(self._topics, 0))
        ages: dict[str, float] = defaultdict(float)
        for topic, count, age in topics:
            label = self._topic(topic)
            events[label] += count
            ages[label] = max(ages[label], age)
        for label, count in events.items():
            self.backlog_events.labels(label).set(count)
            self.backlog_oldest_age_seconds.labels(label).set(ages[label])

    def _topic(self, topic: str) -> str:
        if topic in self._topics:
            return topic
        label = topic if len(self._topics) < TOPICS_MAX else OTHER
        self._topics.add(label)
        return label
