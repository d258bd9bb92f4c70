"""How much is sent at once over a slow connection."""

from __future__ import annotations

import pytest

from relay.sinks.kafka import pace as module
from relay.sinks.kafka.pace import Pace


class Link:
    """A connection of so many bytes a second, with a clock that moves by what is sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bytes_per_second: int) -> None:
        self.now = 0.0
        self.bytes_per_second = bytes_per_second
        self.pace = Pace(5.0)
        monkeypatch.setattr(module, "monotonic", lambda: self.now)

    def send(self, size: int) -> int:
        """Send as much as the pace allows; how much that was."""
        part = min(size, self.pace.bytes_max) if self.pace.is_slow else size
        with self.pace.of(lambda: part):
            self.now += part / self.bytes_per_second
        return part


def test_a_fast_connection_takes_everything_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody counts bytes then."""
    link = Link(monkeypatch, 100_000_000)
    assert link.send(4_000_000) == 4_000_000
    assert not link.pace.is_slow


def test_a_slow_connection_settles_at_parts_that_pass_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """50 kB/s and batches of 4 MB: parts that take a second or so, without another one that takes too long."""
    link = Link(monkeypatch, 50_000)
    while link.send(4_000_000) / link.bytes_per_second > 5:
        pass
    parts = [link.send(4_000_000) / link.bytes_per_second for _ in range(20)]
    assert max(parts) <= 5
    assert min(parts) > 0.5


def test_a_connection_that_recovers_is_used_in_full_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a few parts."""
    link = Link(monkeypatch, 10_000)
    for _ in range(5):
        link.send(4_000_000)
    assert link.pace.is_slow
    link.bytes_per_second = 100_000_000
    for _ in range(10):
        link.send(4_000_000)
    assert link.send(4_000_000) == 4_000_000


def test_a_transfer_that_fails_is_watched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled one has taken as long as it has."""
    link = Link(monkeypatch, 1)

    def fail_slowly() -> None:
        link.now += 30
        raise TimeoutError

    with pytest.raises(TimeoutError), link.pace.of(lambda: 1_000_000):
        fail_slowly()
    assert link.pace.bytes_max == 250_000
