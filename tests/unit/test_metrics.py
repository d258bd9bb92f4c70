"""Counts are exact, labels are bounded, and a batch of thousands is cheap to count."""

from __future__ import annotations

import random
from bisect import bisect_left
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from relay.telemetry.latency import BUCKETS_SECONDS, LatencySeries
from relay.telemetry.metrics import TOPICS_MAX, DeadLetterKind, FailureKind, Metrics, Wakeup

NOW = 1_764_000_000_000_000


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def one_by_one(stored: list[int], now: int) -> tuple[list[int], int]:
    """The obvious histogram: what the fast one has to equal."""
    counts, total = [0] * (len(BUCKETS_SECONDS) + 1), 0
    for moment in stored:
        latency = max(0, now - moment)
        counts[bisect_left([round(edge * 1e6) for edge in BUCKETS_SECONDS], latency)] += 1
        total += latency
    return counts, total


@given(
    st.lists(
        st.one_of(
            st.integers(-2_000_000, 4_000_000_000),
            st.sampled_from([round(edge * 1e6) + d for edge in BUCKETS_SECONDS for d in (-1, 0, 1)]),
        ),
        max_size=200,
    )
)
def test_a_batch_counts_like_its_events_one_by_one(latencies: list[int]) -> None:
    """Unsorted, on the edges, from the future (clock skew), few or many: no event is lost or in a wrong bucket."""
    stored = [NOW - latency for latency in latencies]
    series = LatencySeries()
    series.observe_many(stored, NOW)
    assert (series.counts, series.sum_us) == one_by_one(stored, NOW)


def test_observing_leaves_the_callers_list_alone() -> None:
    stored = random.Random(1).sample(range(NOW - 10_000, NOW), 100)
    before = list(stored)
    LatencySeries().observe_many(stored, NOW)
    assert stored == before


def test_confirmed_counts_delivered_and_latency() -> None:
    metrics = Metrics(["main"])
    metrics.sink("main").confirmed([NOW - 4_000] * 30 + [NOW - 100_000_000] * 2, NOW)
    assert value(metrics, "relay_delivered_total", sink="main") == 32
    assert value(metrics, "relay_publish_latency_seconds_count", sink="main") == 32
    assert value(metrics, "relay_publish_latency_seconds_bucket", sink="main", le="0.003") == 0
    assert value(metrics, "relay_publish_latency_seconds_bucket", sink="main", le="0.004") == 30
    assert value(metrics, "relay_publish_latency_seconds_bucket", sink="main", le="60.0") == 30
    assert value(metrics, "relay_publish_latency_seconds_sum", sink="main") == pytest.approx(200.12)


def test_every_configured_sink_is_shown_before_anything_happens() -> None:
    """A rate over a series that appears with its first failure misses that failure."""
    text = generate_latest(Metrics(["a", "b"]).registry).decode()
    for sink in "ab":
        assert f'relay_delivered_total{{sink="{sink}"}} 0.0' in text
        assert f'relay_dead_letters_total{{kind="rejected",sink="{sink}"}} 0.0' in text
        assert f'relay_publish_latency_seconds_count{{sink="{sink}"}} 0.0' in text


def test_two_relays_in_one_process_do_not_share_metrics() -> None:
    first, second = Metrics(["main"]), Metrics(["main"])
    first.sink("main").retries.inc()
    assert value(second, "relay_retries_total", sink="main") == 0


def test_sinks_that_are_not_configured_share_one_label() -> None:
    """A parked row may name a sink that was renamed since; a thousand of them are still one series."""
    metrics = Metrics(["main"])
    for number in range(1_000):
        metrics.sink(f"gone-{number}").parked.inc()
    assert value(metrics, "relay_parked_total", sink="other") == 1_000
    assert len(generate_latest(metrics.registry)) < 20_000


def test_an_event_without_a_route_is_counted_without_a_sink() -> None:
    metrics = Metrics(["main"])
    metrics.sink(None).dead_lettered(DeadLetterKind.UNROUTED)
    assert value(metrics, "relay_dead_letters_total", sink="none", kind="unrouted") == 1


def test_kinds_and_causes_are_a_fixed_set() -> None:
    """FIELD.md F8: an error text never becomes a label."""
    metrics = Metrics(["main"])
    for number in range(1_000):
        metrics.sink("main").dead_lettered(f"Error {number}")
        metrics.woke(f"cause {number}")
    metrics.sink("main").dead_lettered("rejected", 3)
    metrics.sink("main").failed(FailureKind.SINK_DOWN, 2)
    metrics.woke(Wakeup.NOTIFY)
    assert value(metrics, "relay_dead_letters_total", sink="main", kind="other") == 1_000
    assert value(metrics, "relay_dead_letters_total", sink="main", kind="rejected") == 3
    assert value(metrics, "relay_failures_total", sink="main", kind="sink_down") == 2
    assert value(metrics, "relay_wakeups_total", cause="other") == 1_000
    assert value(metrics, "relay_wakeups_total", cause="notify") == 1


def test_topics_are_bounded_and_what_is_over_is_added_up() -> None:
    """FIELD.md F8: 100,000 topics over the life of a pod stay 101 series."""
    metrics = Metrics()
    for start in range(0, 100_000, 10_000):
        metrics.backlog((f"topic-{number}", 2, float(number)) for number in range(start, start + 10_000))
    exported = [s for f in metrics.registry.collect() if f.name == "relay_backlog_events" for s in f.samples]
    assert len(exported) == TOPICS_MAX + 1
    assert value(metrics, "relay_backlog_events", topic="other") == 20_000
    assert value(metrics, "relay_backlog_oldest_age_seconds", topic="other") == 99_999


def test_a_backlog_that_is_gone_falls_to_zero() -> None:
    metrics = Metrics()
    metrics.backlog([("orders", 5, 12.5), ("mails", 1, 1.0)])
    metrics.backlog([("mails", 2, 3.0)])
    assert value(metrics, "relay_backlog_events", topic="orders") == 0
    assert value(metrics, "relay_backlog_oldest_age_seconds", topic="orders") == 0
    assert value(metrics, "relay_backlog_events", topic="mails") == 2


def test_build_info_names_the_version() -> None:
    text = generate_latest(Metrics().registry).decode()
    assert 'relay_build_info{python="3.' in text
    assert 'version="' in text


def test_every_metric_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text("utf-8")
    for family in Metrics().registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        assert name.startswith("process_") or f"`{name}" in text, name
