"""Things that happen to pods: SIGKILL, a freeze longer than a lease, SIGTERM, and new ones in their place."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.acceptance.pods import Pod, Pods

__all__ = ["Chaos"]


class Chaos:
    """Hurts pods at random while it is entered, and keeps their number; `done` counts what it did."""

    def __init__(self, pods: Pods, settings: Mapping[str, Any], *, seed: int, pause_seconds: float = 1.0) -> None:
        self._pods, self._settings, self._pause = pods, settings, pause_seconds
        self._rng = random.Random(seed)
        self._freeze_seconds = settings["leases"]["ttl_seconds"] + 1.0
        self._thawing: set[asyncio.Task[None]] = set()
        self.done: dict[str, int] = {"kill": 0, "freeze": 0, "terminate": 0}

    async def rage(self, seconds: float) -> None:
        """For so long. Afterwards nobody is frozen, and everybody is ready."""
        end = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end:
            await asyncio.sleep(self._rng.uniform(0.3, 1.7) * self._pause)
            if upright := self._upright():
                await self._hurt(self._rng.choice(upright))
        await asyncio.gather(*self._thawing)
        for pod in self._upright():
            await pod.ready()

    def _upright(self) -> list[Pod]:
        return [pod for pod in self._pods.running if not pod.frozen and not pod.leaving]

    async def _hurt(self, pod: Pod) -> None:
        what = self._rng.choice(("kill", "kill", "freeze", "freeze", "terminate"))
        self.done[what] += 1
        if what == "freeze":
            # A replacement only for the last one, so that somebody can take its lanes over.
            pod.freeze()
            self._thawing.add(asyncio.create_task(self._thaw_later(pod)))
            if not self._upright():
                await self._pods.launch(self._settings)
            return
        if what == "kill":
            await asyncio.to_thread(pod.kill9)
        else:
            pod.terminate()
        await self._pods.launch(self._settings)

    async def _thaw_later(self, pod: Pod) -> None:
        await asyncio.sleep(self._freeze_seconds * self._rng.uniform(1.0, 1.5))
        pod.thaw()
