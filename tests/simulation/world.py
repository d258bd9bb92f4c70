"""A deterministic world: virtual time, one event loop for each pod, and everything random from one seed.

Each pod runs the product's own code on its own event loop, so that a pod can be frozen (its loop is
not stepped, timers included, as with SIGSTOP) or killed (its loop is thrown away) at any point, while
what it has sent already still arrives. Effects on the database and the broker are events of the world.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from asyncio import events
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["PodLoop", "World"]


_STEPS_BETWEEN_LOOKS = 100


class _NoSelector:
    """A selector without files: nothing ever becomes readable."""

    def select(self, timeout: float | None = None) -> list[Any]:
        return []

    def register(self, *_args: object) -> None: ...

    def unregister(self, *_args: object) -> None: ...

    def modify(self, *_args: object) -> None: ...

    def close(self) -> None: ...

    def get_map(self) -> dict[Any, Any]:
        return {}

    def get_key(self, _file: object) -> None:
        raise KeyError


class PodLoop(asyncio.SelectorEventLoop):
    """An event loop that reads the world's clock and is stepped by the world."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        super().__init__(_NoSelector())  # type: ignore[arg-type]
        self.name = name
        self.frozen_until = 0.0
        self.dead = False
        self.set_exception_handler(self._on_exception)
        self.failures: list[dict[str, Any]] = []

    def time(self) -> float:
        return self._world.now

    def _on_exception(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(context)

    @property
    def runnable(self) -> bool:
        return not self.dead and self.frozen_until <= self._world.now and bool(self._ready)  # type: ignore[attr-defined]

    def next_timer(self) -> float | None:
        if self.dead:
            return None
        if self._ready:  # type: ignore[attr-defined]
            return max(self._world.now, self.frozen_until)
        timers = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0].cancelled():
            heapq.heappop(timers)._scheduled = False
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
        return max(timers[0].when(), self.frozen_until) if timers else None

    def step(self) -> None:
        previous = events._get_running_loop()
        events._set_running_loop(self)
        try:
            self._run_once()  # type: ignore[attr-defined]
        finally:
            events._set_running_loop(previous)


class World:
    """Clock, scheduler and source of randomness."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 1_000.0
        self.closed = False
        self.loops: list[PodLoop] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def loop(self, name: str) -> PodLoop:
        loop = PodLoop(self, name)
        self.loops.append(loop)
        return loop

    def at(self, delay: float, action: Callable[[], None]) -> None:
        """Something that happens outside of all pods."""
        heapq.heappush(self._events, (self.now + delay, next(self._order), action))

    def latency(self, scale: float = 0.002) -> float:
        """Mostly short, sometimes long: what makes schedules differ."""
        return self.rng.expovariate(1 / scale) + (self.rng.random() < 0.03) * self.rng.uniform(0, 0.3)

    def spawn(self, loop: PodLoop, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return loop.create_task(work)

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Run until the condition holds; False when the virtual time limit is reached first."""
        deadline = self.now + limit
        while not until():
            for _ in range(_STEPS_BETWEEN_LOOKS):
                if not self._advance(deadline):
                    return until()
        return True

    def _advance(self, deadline: float) -> bool:
        runnable = [loop for loop in self.loops if loop.runnable]
        if self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()
        elif runnable:
            self.rng.choice(runnable).step()
        else:
            return self._advance_clock(deadline)
        return True

    def _advance_clock(self, deadline: float) -> bool:
        moments = [moment for loop in self.loops if (moment := loop.next_timer()) is not None]
        if self._events:
            moments.append(self._events[0][0])
        if not moments or min(moments) > deadline:
            return False
        self.now = max(min(moments), self.now)
        for loop in self.loops:
            if (moment := loop.next_timer()) is not None and moment <= self.now:
                loop.step()
        return True

    def close(self) -> None:
        """End all pods without any further effect on the world."""
        self.closed = True
        for loop in self.loops:
            loop.dead, loop.frozen_until = False, 0.0
            for _ in range(200):
                for task in asyncio.all_tasks(loop):
                    task.cancel()
                if not asyncio.all_tasks(loop):
                    break
                loop.step()
            loop.close()
