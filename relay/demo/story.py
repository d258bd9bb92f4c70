"""What happens when: the shop opens, the broker is killed and comes back, a pod is killed and replaced.

Moments are shares of the length, so that a short demo tells the same story. Each chapter waits until
the damage is healed, with a limit: a relay that does not recover is for the final count to report.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.demo.scene import Scene

__all__ = ["drain", "play"]

_BROKER_DIES: Final = 0.2
_BROKER_IS_BACK: Final = 0.36
_POD_DIES: Final = 0.62
_SHOP_CLOSES: Final = 0.88
_PATIENCE_SECONDS: Final = 20.0
_FRESH_SECONDS: Final = 0.15
"""Nothing waits for longer than this: caught up."""
_GLANCE_SECONDS: Final = 0.02


async def play(scene: Scene) -> None:
    """Everything between the opening of the shop and the moment to close it."""
    await _until(scene, _BROKER_DIES)
    await _broker_dies(scene)
    await _until(scene, _POD_DIES)
    await _pod_dies(scene)
    await _until(scene, _SHOP_CLOSES)


async def drain(scene: Scene) -> None:
    """Wait until everything has arrived, or for so long that it never will."""
    await _within_patience(lambda: not scene.tally.waiting)


async def _broker_dies(scene: Scene) -> None:
    scene.tally.disturb()
    scene.broker_up = False
    scene.note("the broker is killed (SIGKILL); the shop goes on selling")
    await scene.stage.kill_broker()
    await _until(scene, _BROKER_IS_BACK)
    waiting = scene.tally.waiting
    await scene.stage.start_broker()
    scene.broker_up = True
    scene.note(f"the broker is back with what it had confirmed; {waiting:,} orders wait")
    back_at = scene.elapsed
    if await _caught_up(scene):
        scene.note(f"all of them delivered, {scene.elapsed - back_at:.1f} s later")
    scene.tally.calm(time.time())


async def _pod_dies(scene: Scene) -> None:
    victim = max(scene.stage.pods, key=scene.lanes_of)
    lanes, killed_at = scene.lanes_of(victim), scene.elapsed
    scene.tally.disturb()
    scene.note(f"{victim.label} is killed (SIGKILL) with {lanes} lanes in its name")
    await scene.stage.kill_pod(victim)
    successor = asyncio.create_task(scene.stage.start_pod())
    try:
        if await _within_patience(lambda: not scene.lanes_of(victim)) and await _caught_up(scene):
            scene.note(f"its lanes have new owners, nothing waits, {scene.elapsed - killed_at:.1f} s later")
    finally:
        pod = await successor
    scene.note(f"{pod.label} has started in its place")
    scene.tally.calm(time.time())


async def _caught_up(scene: Scene) -> bool:
    return await _within_patience(lambda: scene.tally.oldest_age(time.time()) < _FRESH_SECONDS)


async def _within_patience(is_done: Callable[[], bool]) -> bool:
    """Whether it was done in time. Looks often: the counts have no event to wait for, they change 600 times a second."""
    patience_ends = time.monotonic() + _PATIENCE_SECONDS
    while not is_done():
        if time.monotonic() > patience_ends:
            return False
        await asyncio.sleep(_GLANCE_SECONDS)
    return True


async def _until(scene: Scene, share: float) -> None:
    await asyncio.sleep(max(0.0, scene.seconds * share - scene.elapsed))
