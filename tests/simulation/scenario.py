"""One run: writers, pods, faults, then quiet; and the promises as invariants over what the brokers saw."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial

from relay.config import Config
from relay.pipeline import Pipeline, Stores
from relay.sources.polling.ownership import Ownership
from relay.sources.polling.source import PollingSource
from relay.telemetry.metrics import Metrics
from tests.simulation.cluster import Broker, Database, Event, Rules, Server, SimSink, Transaction
from tests.simulation.world import PodLoop, World

__all__ = ["Faults", "Report", "run"]

TTL = 6.0


@dataclass(frozen=True)
class Faults:
    """What goes wrong, per virtual second or per event."""

    pods: int = 2
    sinks: tuple[str, ...] = ("a",)
    crash: bool = True
    freeze: bool = True
    freeze_rate: float = 0.25
    lost_sessions: bool = False
    outage: bool = True
    database_outage: bool = False
    ambiguous: float = 0.0
    flaky: float = 0.0
    flaky_attempts: int = 2
    poison: float = 0.0
    hold: bool = False
    keyless: float = 0.1
    seconds: float = 30.0
    keys: int = 6
    attempts_max: int = 12


@dataclass
class Report:
    """What a run showed. `violations` is empty when every promise was kept."""

    violations: list[str] = field(default_factory=list)
    events: int = 0
    deliveries: int = 0
    repeats: int = 0
    parked: int = 0
    dead: int = 0
    kills: int = 0
    freezes: int = 0


class Pod:
    """The product's pipeline, source and ownership on a loop of its own."""

    def __init__(self, run: Run, number: int) -> None:
        self.name = f"pod-{number}"
        self.loop: PodLoop = run.world.loop(self.name)
        self.database = Database(run.server, self.name, self.loop, self.kill)
        self.task = run.world.spawn(self.loop, self._main(run))

    def kill(self) -> None:
        self.loop.dead = True

    async def _main(self, run: Run) -> None:
        config, faults = run.config, run.faults
        metrics = Metrics(faults.sinks)
        sinks = {name: SimSink(run.brokers[name], self.loop, concurrency=2) for name in faults.sinks}
        source = PollingSource(self.database, self.database, config.source.polling, metrics, run.world.rng)
        pipeline = Pipeline(config, sinks, Stores(self.database, self.database), source, metrics, run.world.rng)
        source.attach(pipeline)
        ownership = Ownership(self.name, self.database, source, pipeline, config.leases, metrics)
        self.pipeline, self.src = pipeline, source
        async with asyncio.TaskGroup() as group:
            group.create_task(pipeline.run())
            group.create_task(source.run())
            group.create_task(ownership.run())


class Run:
    """One seed."""

    def __init__(self, seed: int, faults: Faults, rules: Rules) -> None:
        self.world = World(seed)
        self.faults, self.rng = faults, self.world.rng
        self.server = Server(self.world, rules, faults.sinks)
        self.brokers = {name: Broker(self.world, name) for name in faults.sinks}
        self.server.delivered = lambda sink, event: event.seq in self.brokers[sink].known
        self.config = _config(faults)
        self.report = Report()
        self.pods: list[Pod] = []
        self.pods_started = 0
        self.writing = True
        self.stop_at = self.world.now + faults.seconds
        for _ in range(faults.pods):
            self._start_pod()
        for number in range(faults.keys):
            self.world.at(self.rng.random(), partial(self._write, f"k{number}", (number * 11) % 64))
        self._faults()

    # -- writers: one for each key, as if each held its aggregate's lock -------------------------------

    def _write(self, key: str, lane: int) -> None:
        if self.world.now >= self.stop_at:
            return
        transaction = self.server.begin(f"{key}@{self.world.now}")
        self._insert_some(transaction, key, lane)
        patience = self.rng.choice([0.001, 0.01, 0.05, 0.05, 3.0 if self.rng.random() < 0.2 else 0.3])
        self.world.at(self.rng.expovariate(1 / patience), lambda: self._end(transaction, key, lane))

    def _insert_some(self, transaction: Transaction, key: str, lane: int) -> None:
        for _ in range(self.rng.choice([1, 1, 1, 2, 3])):
            keyless = self.rng.random() < self.faults.keyless
            event = self.server.insert(transaction, None if keyless else key, lane, "t")
            for broker in self.brokers.values():
                if self.rng.random() < self.faults.flaky:
                    broker.flaky[event.seq] = self.rng.randint(1, self.faults.flaky_attempts)
                if self.rng.random() < self.faults.poison:
                    broker.poison.add(event.seq)

    def _end(self, transaction: Transaction, key: str, lane: int) -> None:
        if transaction.state == "open":
            self.server.end(transaction, "rolled back" if self.rng.random() < 0.15 else "committed")
        self.world.at(self.rng.expovariate(1 / 0.08), lambda: self._write(key, lane))

    # -- faults ----------------------------------------------------------------------------------

    def _start_pod(self) -> None:
        self.pods_started += 1
        self.pods.append(Pod(self, self.pods_started))

    def _faults(self) -> None:
        if self.world.now >= self.stop_at:
            return
        faults, rng = self.faults, self.rng
        if faults.crash and rng.random() < 0.25:
            self._crash_somebody()
        if faults.freeze and rng.random() < faults.freeze_rate:
            self._freeze_somebody()
        if faults.lost_sessions and rng.random() < 0.5:
            # Taken for dead by the others, while it goes on until its next look.
            self.server.members.pop(rng.choice(self.pods).name, None)
        if faults.outage and rng.random() < 0.15:
            broker = rng.choice(list(self.brokers.values()))
            broker.up = False
            self.world.at(rng.choice([0.2, 1.0, 8.0]), lambda: setattr(broker, "up", True))
        if faults.database_outage and rng.random() < 0.1:
            self.server.up = False
            self.world.at(rng.choice([0.2, 1.0, 9.0]), lambda: setattr(self.server, "up", True))
        for broker in self.brokers.values():
            broker.ambiguous = faults.ambiguous
        self.world.at(1.0, self._faults)

    def _crash_somebody(self) -> None:
        pod = self.rng.choice(self.pods)
        if pod.loop.dead or len(self.pods) == 1:
            return
        # At some call soon, before or after it takes effect: this reaches every await in turn.
        pod.database.crash_after = pod.database.calls + self.rng.randint(1, 12)
        self.report.kills += 1
        self.pods.remove(pod)
        self.world.at(self.rng.uniform(0.1, 4.0), self._start_pod)

    def _freeze_somebody(self) -> None:
        pod = self.rng.choice(self.pods)
        pod.loop.frozen_until = self.world.now + self.rng.choice([0.5, TTL, TTL * 1.7])
        self.report.freezes += 1

    # -- the end ---------------------------------------------------------------------------------

    def execute(self) -> Report:
        self.world.run(lambda: self.world.now >= self.stop_at + 1, self.faults.seconds + 2)
        self._calm()
        if not self.world.run(self._settled, 400.0):
            left = [event.seq for event in self.server.committed() if not event.settled]
            parked = [(row.event.seq, row.retry_at, row.attempts) for row in self.server.parked.values()]
            self.report.violations.append(f"never settled: {left[:10]}, parked: {parked[:5]}")
        self._judge()
        self._failures()
        self.world.close()
        return self.report

    def _calm(self) -> None:
        for broker in self.brokers.values():
            broker.up, broker.ambiguous = True, 0.0
        self.server.up = True
        for transaction in list(self.server.open):
            self.server.end(transaction, "committed")

    def _settled(self) -> bool:
        waiting = [row for row in self.server.parked.values() if not self._behind_a_dead_letter(row.sink, row.event)]
        return not any(self.server.unsettled.values()) and not waiting and not self.server.open

    def _behind_a_dead_letter(self, sink: str, event: Event) -> bool:
        return any(d.holds and d.sink == sink and d.event.key == event.key for d in self.server.dead.values())

    def _judge(self) -> None:
        report, committed = self.report, self.server.committed()
        report.events = len(committed)
        report.dead = len(self.server.dead)
        for event in self.server.lost:
            report.violations.append(f"settled but neither delivered nor written down: {event.seq}")
        for name, broker in self.brokers.items():
            report.deliveries += len(broker.deliveries)
            report.repeats += len(broker.deliveries) - len(broker.known)
            self._judge_sink(name, broker, committed)

    def _judge_sink(self, name: str, broker: Broker, committed: list[Event]) -> None:
        violations = self.report.violations
        dead = {row.event.seq for row in self.server.dead.values() if row.sink == name}
        waiting = {row.event.seq for row in self.server.parked.values() if row.sink == name}
        seqs = {event.seq for event in committed}
        violations += [f"{name}: lost {seq}" for seq in sorted(seqs - broker.known - dead - waiting)]
        violations += [f"{name}: rolled back but delivered {seq}" for seq in sorted(broker.known - seqs)]
        violations += [f"{name}: dead without cause {seq}" for seq in sorted(dead) if not self._may_die(broker, seq)]
        firsts = list(dict.fromkeys(broker.deliveries))
        by_key: dict[str, list[int]] = {}
        for seq in firsts:
            if (key := self.server.events[seq].key) is not None:
                by_key.setdefault(key, []).append(seq)
        violations += [
            f"{name}: {key} out of order {_swap(order)}" for key, order in by_key.items() if order != sorted(order)
        ]
        self._judge_holds(name, by_key)
        self._judge_attempts(name, broker)

    def _may_die(self, broker: Broker, seq: int) -> bool:
        return seq in broker.poison or self.faults.flaky_attempts >= self.faults.attempts_max

    def _judge_holds(self, name: str, by_key: dict[str, list[int]]) -> None:
        for row in self.server.dead.values():
            if row.holds and row.sink == name:
                after = [seq for seq in by_key.get(row.event.key or "", []) if seq > row.event.seq]
                if after:
                    self.report.violations.append(f"{name}: {after} passed the dead letter {row.event.seq}")

    def _judge_attempts(self, name: str, broker: Broker) -> None:
        for row in self.server.dead.values():
            if row.sink == name and row.attempts > broker.attempts.get(row.event.seq, 0):
                self.report.violations.append(f"{name}: {row.event.seq} counted {row.attempts} attempts, made fewer")

    def _failures(self) -> None:
        for pod in self.pods:
            if pod.task.done() and not pod.task.cancelled() and (error := pod.task.exception()):
                self.report.violations.append(f"{pod.name} failed: {_innermost(error)!r}")
            self.report.violations += [f"{pod.name}: {context['message']}" for context in pod.loop.failures]


def _innermost(error: BaseException) -> BaseException:
    return _innermost(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _swap(order: list[int]) -> str:
    index = next(i for i in range(1, len(order)) if order[i] < order[i - 1])
    return f"{order[max(index - 2, 0) : index + 2]}"


def _config(faults: Faults) -> Config:
    return Config.model_validate(
        {
            "database": {"dsn": "postgres://x/y"},
            "source": {
                "polling": {"poll_interval_seconds": 0.02, "poll_interval_max_seconds": 0.2, "read_events_max": 60}
            },
            "pipeline": {"events_max": 80, "batch_events_max": 20, "park_outage_after_seconds": 2.0},
            "retry": {"base_seconds": 0.2, "cap_seconds": 3.0, "attempts_max": faults.attempts_max},
            "leases": {"ttl_seconds": TTL, "margin_seconds": 1.0},
            "sinks": {name: {"type": "memory"} for name in faults.sinks},
            "routes": [{"topic": "*", "sinks": faults.sinks, "on_dead_letter": "hold" if faults.hold else "continue"}],
        }
    )


def run(seed: int, faults: Faults, rules: Rules | None = None) -> Report:
    """Run one seed to its end."""
    return Run(seed, faults, rules or Rules()).execute()
