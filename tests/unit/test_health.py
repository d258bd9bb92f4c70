"""Live and ready are different answers, and a dead or silent loop is noticed (FIELD.md F7)."""

from __future__ import annotations

import asyncio

import pytest

from relay.telemetry.health import Health
from relay.telemetry.looplag import LOOP, watch_loop_lag
from relay.telemetry.metrics import Metrics


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(("main", "audit"), clock)


def test_a_loop_that_beats_is_live(health: Health, clock: Clock) -> None:
    with health.running("reader", limit_seconds=10):
        for _ in range(5):
            clock.now += 9
            health.beat("reader")
        clock.now += 10
        assert health.not_live_because() == ()


def test_a_silent_loop_is_named_with_its_limit(health: Health, clock: Clock) -> None:
    with health.running("reader", limit_seconds=10):
        clock.now += 10.5
        assert health.not_live_because() == ("loop reader has been silent for 10.5 s, its limit is 10 s",)
        health.beat("reader")
        assert health.not_live_because() == ()


def test_a_loop_that_died_stays_dead(health: Health) -> None:
    """Nothing beats for it any more, and no other loop hides it."""
    with pytest.raises(ValueError, match="boom"), health.running("reader", 10):
        raise ValueError("boom at redis://user:secret@host")
    health.beat("reader")
    assert health.not_live_because() == ("loop reader died: ValueError: boom at redis://user:***@host",)


def test_a_loop_that_ended_on_purpose_is_not_missed(health: Health, clock: Clock) -> None:
    with health.running("reader", 10):
        pass
    with pytest.raises(asyncio.CancelledError), health.running("writer", 10):
        raise asyncio.CancelledError
    clock.now += 1_000
    health.beat("reader")
    assert health.not_live_because() == ()


def test_a_broker_outage_fails_readiness_only(health: Health) -> None:
    health.source_connected()
    assert health.not_ready_because() == ("sink main: not tried yet", "sink audit: not tried yet")
    health.sink_down("main", "refused: amqp://guest:secret@host")
    health.sink_down("audit", "no exchange", misconfigured=True)
    assert health.not_ready_because() == ("sink main: refused: amqp://guest:***@host", "sink audit: no exchange")
    assert health.not_live_because() == ()


def test_one_sink_that_is_up_is_enough(health: Health) -> None:
    health.source_connected()
    health.sink_down("main", "refused")
    health.sink_up("audit")
    assert health.not_ready_because() == ()


def test_a_lost_source_and_draining_fail_readiness(health: Health) -> None:
    health.sink_up("main")
    assert health.not_ready_because() == ("source: not connected yet",)
    health.source_connected()
    assert health.not_ready_because() == ()
    health.source_lost("connection closed")
    health.drain()
    assert health.not_ready_because() == ("draining", "source: connection closed")
    assert health.not_live_because() == ()


async def test_the_lag_watcher_beats_and_leaves_with_its_task() -> None:
    metrics, health = Metrics(), Health()
    beaten = asyncio.Event()
    health.beat = lambda name: beaten.set() if name == LOOP else None  # type: ignore[method-assign]  # a spy
    task = asyncio.create_task(watch_loop_lag(metrics, health))
    await asyncio.wait_for(beaten.wait(), 10)
    lag = metrics.registry.get_sample_value("relay_loop_lag_seconds")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert lag is not None
    assert 0 <= lag < 5
    assert health.not_live_because() == ()
