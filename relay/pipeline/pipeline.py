"""Router, workers, drainers and settlement of one pod, behind the source's `Intake`.

It knows no broker and no database: sinks, stores and the source's ledger are handed in.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from relay.errors import StopError
from relay.pipeline.budget import Budget
from relay.pipeline.decisions import Decisions
from relay.pipeline.drainer import Drainer
from relay.pipeline.pipe import Pipe, PipeOptions
from relay.pipeline.recovery import Recovery
from relay.pipeline.router import Router, Target
from relay.pipeline.settlement import Settlement
from relay.pipeline.worker import Worker
from relay.retry import Backoff
from relay.store import Burial, ParkingStore, Settler
from relay.telemetry.logs import get_logger
from relay.types import Lease, Message, Outstanding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from relay.config import Config
    from relay.pipeline.circuit import Circuit
    from relay.sink import Sink
    from relay.source import Ledger
    from relay.telemetry.metrics import Metrics

__all__ = ["Pipeline", "Stores"]

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Stores:
    """Where decisions are written."""

    parking: ParkingStore
    settler: Settler


class _Lane:
    """One sink with its workers and its drainer."""

    def __init__(self, pipe: Pipe, leases: list[Lease]) -> None:
        self.pipe = pipe
        self.workers = [Worker(pipe) for _ in range(max(pipe.sink.concurrency, 1))]
        self.drainer = Drainer(pipe, lambda: leases, self.put)
        pipe.requeue = self.put_back

    def put(self, messages: Sequence[Message]) -> None:
        if len(self.workers) == 1:
            self.workers[0].put(messages)
            return
        for index, part in self._by_worker(messages).items():
            self.workers[index].put(part)

    def put_back(self, messages: Sequence[Message]) -> None:
        for index, part in self._by_worker(messages).items():
            self.workers[index].put_back(part)

    def _by_worker(self, messages: Sequence[Message]) -> dict[int, list[Message]]:
        count, parts = len(self.workers), dict[int, list[Message]]()
        for message in messages:
            parts.setdefault(message.lane % count, []).append(message)
        return parts


class Pipeline:
    """Takes messages from a source and brings them to the sinks."""

    def __init__(
        self,
        config: Config,
        sinks: Mapping[str, Sink],
        stores: Stores,
        ledger: Ledger,
        metrics: Metrics,
        rng: random.Random | None = None,
        on_sink: Callable[[str, Circuit], None] = lambda _name, _circuit: None,
    ) -> None:
        rng = rng or random.Random()  # noqa: S311  # jitter, not secrets
        retry = Backoff(config.retry.base_seconds, config.retry.cap_seconds, rng)
        outage = Backoff(0.05, config.retry.outage_cap_seconds, rng)
        recovery = Recovery(outage, _log)
        self._config, self._stores, self._metrics, self._recovery = config, stores, metrics, recovery
        self._router = Router(config.routing)
        self.budget = Budget(config.pipeline.events_max, config.pipeline.bytes_max)
        self._settlement = Settlement(stores.settler, ledger, self.budget, metrics, recovery)
        decisions = self._decisions = Decisions(stores.parking, self._settlement, recovery, metrics)
        self._leases: list[Lease] = []
        options = PipeOptions(
            config.pipeline.batch_events_max,
            config.pipeline.batch_bytes_max,
            config.retry.attempts_max,
            config.pipeline.park_outage_after_seconds if len(sinks) > 1 else None,
        )
        self.pipes = {
            name: Pipe(
                name,
                sink,
                options,
                parking=stores.parking,
                decisions=decisions,
                settlement=self._settlement,
                recovery=recovery,
                retry=retry,
                outage=outage,
                metrics=metrics,
                target=partial(self._target, name),
                on_change=partial(on_sink, name),
            )
            for name, sink in sinks.items()
        }
        self._lanes = {name: _Lane(pipe, self._leases) for name, pipe in self.pipes.items()}
        self._unrouted: list[Message] = []
        self._unrouted_waiting = asyncio.Event()

    # -- the source's side -----------------------------------------------------------------------

    async def room(self) -> tuple[int, int]:
        """Wait for room in the budget."""
        return await self.budget.room()

    def submit(self, messages: Sequence[Message]) -> None:
        """Route messages and queue them."""
        self.budget.charge(messages)
        only = self._router.only
        if only is not None and only.template is None:
            self._lanes[only.sink].put(messages)
            return
        parts: dict[str, list[Message]] = {}
        targets_of = self._router.targets
        for message in messages:
            targets = targets_of(message.topic)
            if len(targets) == 1:
                target = targets[0]
                if target.template is not None:
                    message.destination = target.destination(message.topic, message.key)
                parts.setdefault(target.sink, []).append(message)
            elif targets:
                _fan_out(message, targets, parts)
            else:
                self._unrouted.append(message)
                self._unrouted_waiting.set()
        for sink, part in parts.items():
            self._lanes[sink].put(part)

    async def adopt(self, leases: Sequence[Lease]) -> None:
        """Load what is held in newly claimed lanes (PROTOCOLS.md rule 3)."""
        held = await self._recovery.until_done("load held keys", lambda: self._stores.parking.held(leases))
        by_lane = {lease.lane: lease for lease in leases}
        for entry in held:
            if (pipe := self.pipes.get(entry.sink)) is not None:
                pipe.holds.hold(by_lane[entry.lane], entry.key)
        self._leases.extend(leases)
        for pipe in self.pipes.values():
            pipe.parked.set()

    async def drained(self, lease: Lease) -> None:
        """Stop bringing back parked rows of this lane, and wait for those on their way."""
        if lease in self._leases:
            self._leases.remove(lease)
        for lane in self._lanes.values():
            await lane.drainer.left(lease)

    def abandon(self, lease: Lease) -> None:
        """Forget the lane; what waited for its keys is dropped."""
        if lease in self._leases:
            self._leases.remove(lease)
        for lane in self._lanes.values():
            self._settlement.dropped(lane.pipe.holds.forget(lease))
            lane.pipe.run_ended.set()

    # -- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled; raises StopError when an event has no route and the policy is to stop."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._settlement.run(), name="settlement")
            group.create_task(self._bury_unrouted(), name="unrouted")
            for name, lane in self._lanes.items():
                group.create_task(lane.drainer.run(), name=f"drainer {name}")
                for index, worker in enumerate(lane.workers):
                    group.create_task(worker.run(), name=f"worker {name} {index}")

    # -- inside ------------------------------------------------------------------------------------

    def _target(self, sink: str, topic: str) -> Target | None:
        return next((target for target in self._router.targets(topic) if target.sink == sink), None)

    async def _bury_unrouted(self) -> None:
        """Policy for topics that no route takes: a dead letter by default, never silence."""
        while True:
            await self._unrouted_waiting.wait()
            self._unrouted_waiting.clear()
            messages, self._unrouted = self._unrouted, []
            if self._config.unrouted == "stop":
                raise _no_route(messages[0])
            _log.warning(
                "no route takes these topics", topics=sorted({m.topic for m in messages})[:10], events=len(messages)
            )

            await self._decisions.bury(
                [Burial(m, "", "unrouted", "no route takes its topic", 0, holds=False) for m in messages]
            )


def _fan_out(message: Message, targets: Sequence[Target], parts: dict[str, list[Message]]) -> None:
    """One copy for each sink; they share the count of those that are not done."""
    outstanding = Outstanding(len(targets))
    for target in targets:
        destination = target.destination(message.topic, message.key)
        parts.setdefault(target.sink, []).append(replace(message, destination=destination, outstanding=outstanding))


def _no_route(message: Message) -> StopError:
    return StopError(
        f"no route takes topic {message.topic!r} (event {message.id})",
        hint='add a [[routes]] entry for it, or set unrouted = "dead_letter"',
    )
