"""PostgreSQL and a broker in memory, with the visibility and the locks that the rules are about.

Everything is an event of the world: a statement takes effect on the server at some moment, whether or
not the pod that sent it still lives, and its answer arrives later. Transactions of several statements
hold their locks in between. `Rules` leaves single rules out, to show that the tests would notice.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relay.errors import LeaseLost, SourceUnavailable
from relay.sink import CONFIRMED, DEFERRED, Outcome, rejected, unavailable
from relay.sources.polling.contracts import Cursor, Mark, Page
from relay.store import Burial, HeldKey, Membership, Parked, ParkedRun, RunResult
from relay.types import LANES, Lease, Message

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tests.simulation.world import PodLoop, World

__all__ = ["Broker", "Database", "Event", "Rules", "Server"]


@dataclass(frozen=True)
class Rules:
    """Rules of PROTOCOLS.md that a run keeps; each False is a planted mistake."""

    share_lock: bool = True
    compare_epoch: bool = True
    wait_for_holders: bool = True
    load_held: bool = True
    lock_key_until_deleted: bool = True
    fence_reads: bool = True
    doorman: bool = True


@dataclass
class Event:
    """A row of the outbox. `transaction` is what inserted it."""

    seq: int
    key: str | None
    lane: int
    topic: str
    transaction: Transaction
    settled: bool = False


@dataclass(eq=False)
class Transaction:
    """An application's transaction. It holds ROW EXCLUSIVE from its first insert until it ends."""

    name: str
    state: str = "open"
    events: list[Event] = field(default_factory=list)


@dataclass
class Row:
    """A row of outbox_parked or outbox_dead_letter."""

    number: int
    sink: str
    event: Event
    attempts: int
    retry_at: float | None
    holds: bool = False
    kind: str = ""


class Server:
    """The tables."""

    def __init__(self, world: World, rules: Rules, sinks: Sequence[str]) -> None:
        self.world, self.rules, self.sinks = world, rules, sinks
        self.events: dict[int, Event] = {}
        self.unsettled: dict[int, dict[int, Event]] = {}
        """Visible and not settled, by lane: the partial index."""
        self.open: set[Transaction] = set()
        self.last_value = 0
        self.leases: dict[int, tuple[str | None, int]] = dict.fromkeys(range(LANES), (None, 0))
        self.shared: dict[int, int] = dict.fromkeys(range(LANES), 0)
        self.members: dict[str, float] = {}
        self.parked: dict[int, Row] = {}
        self.dead: dict[int, Row] = {}
        self.numbers = 0
        self.up = True
        self.delivered: Callable[[str, Event], bool] = lambda _sink, _event: False
        self.lost: list[Event] = []
        self.double_claims = 0

    # -- applications ----------------------------------------------------------------------------

    def begin(self, name: str) -> Transaction:
        return Transaction(name)

    def insert(self, transaction: Transaction, key: str | None, lane: int, topic: str) -> Event:
        self.open.add(transaction)
        self.last_value += 1
        event = Event(self.last_value, key, lane, topic, transaction)
        transaction.events.append(event)
        self.events[event.seq] = event
        return event

    def end(self, transaction: Transaction, state: str) -> None:
        transaction.state = state
        self.open.discard(transaction)
        if state == "committed":
            for event in transaction.events:
                self.unsettled.setdefault(event.lane, {})[event.seq] = event

    def committed(self) -> list[Event]:
        return [event for event in self.events.values() if event.transaction.state == "committed"]

    def settle(self, seqs: Sequence[int]) -> None:
        for seq in seqs:
            event = self.events[seq]
            event.settled = True
            self.unsettled[event.lane].pop(seq, None)
            if not all(self.accounted(sink, event) for sink in self.sinks):
                self.lost.append(event)

    def accounted(self, sink: str, event: Event) -> bool:
        if self.delivered(sink, event):
            return True
        rows = [*self.parked.values(), *self.dead.values()]
        return any(row.event is event and row.sink == sink for row in rows)

    def live(self) -> frozenset[str]:
        return frozenset(pod for pod, expires in self.members.items() if expires > self.world.now)

    def mark(self) -> Mark:
        return Mark("server", self.last_value)


class Database:
    """One pod's connection pool: LeaseStore, ParkingStore, Settler, Outbox and Bell."""

    def __init__(self, server: Server, pod: str, loop: PodLoop, kill: Callable[[], None]) -> None:
        self._server, self._pod, self._loop, self._kill = server, pod, loop, kill
        self._world = server.world
        self.crash_after: int | None = None
        self.calls = 0

    async def _call(self, *steps: Callable[[], Any], rollback: Callable[[], None] = lambda: None) -> Any:
        """Send a transaction of one or more statements; each takes effect at a moment of its own."""
        if self._world.closed:
            raise SourceUnavailable("the world has ended")
        self.calls += 1
        reply = self._loop.create_future()
        crash = self.crash_after is not None and self.calls >= self.crash_after
        arrives = not crash or self._world.rng.random() < 0.5
        if arrives:
            self._world.at(self._world.latency(), lambda: self._run(list(steps), reply, rollback))
        if crash:
            self._kill()
        return await reply

    def _run(self, steps: list[Callable[[], Any]], reply: Any, rollback: Callable[[], None]) -> None:
        if self._world.closed:
            return
        if not self._server.up:
            rollback()
            self._answer(reply, error=SourceUnavailable("connection refused"))
            return
        try:
            result = steps.pop(0)()
        except Exception as error:  # noqa: BLE001  # whatever it is, the transaction is rolled back and the client told
            self._answer(reply, error=error)
            return
        if steps:
            # The client sends the next statement, and a frozen one sends nothing while its locks are held.
            frozen = max(self._loop.frozen_until - self._world.now, 0.0)
            self._world.at(frozen + self._world.latency(), lambda: self._run(steps, reply, rollback))
        else:
            self._answer(reply, result)

    def _answer(self, reply: Any, result: Any = None, error: Exception | None = None) -> None:
        def arrive() -> None:
            if self._loop.dead or self._world.closed:
                return
            self._loop.call_soon(
                lambda: reply.done() or (reply.set_exception(error) if error else reply.set_result(result))
            )

        self._world.at(self._world.latency(), arrive)

    # -- LeaseStore ------------------------------------------------------------------------------

    async def renew(self, ttl_seconds: float) -> None:
        def effect() -> None:
            self._server.members[self._pod] = self._world.now + ttl_seconds

        await self._call(effect)

    async def look(self) -> Membership:
        return await self._call(lambda: Membership(self._server.live(), dict(self._server.leases)))

    async def claim(self, count: int, owned: Collection[int]) -> Sequence[Lease]:
        server, held = self._server, set(owned)

        def effect() -> list[Lease]:
            live = server.live()
            free = [
                lane
                for lane, (owner, _) in server.leases.items()
                if (owner is None or owner not in live or (owner == self._pod and lane not in held))
                and not server.shared[lane]
            ]
            taken = self._world.rng.sample(free, min(count, len(free)))
            for lane in taken:
                server.leases[lane] = (self._pod, server.leases[lane][1] + 1)
            return [Lease(lane, server.leases[lane][1], "server") for lane in taken]

        return await self._call(effect)

    async def release(self, leases: Any) -> None:
        def effect() -> None:
            for lease in leases:
                if self._server.leases[lease.lane] == (self._pod, lease.epoch):
                    self._server.leases[lease.lane] = (None, lease.epoch)

        await self._call(effect)

    async def leave(self) -> None:
        def effect() -> None:
            self._server.members.pop(self._pod, None)
            for lane, (owner, epoch) in self._server.leases.items():
                if owner == self._pod:
                    self._server.leases[lane] = (None, epoch)

        await self._call(effect)

    # -- the fence -------------------------------------------------------------------------------

    async def _fenced(self, leases: Sequence[Lease], effect: Callable[[], Any]) -> Any:
        """Lock FOR SHARE and compare, then write and commit: two moments with the locks held between."""
        server = self._server
        lanes = sorted({lease.lane for lease in leases})
        locked: list[int] = []

        def unlock() -> None:
            for lane in locked:
                server.shared[lane] -= 1
            locked.clear()

        def check() -> None:
            if server.rules.compare_epoch:
                stale = [lease.lane for lease in leases if server.leases[lease.lane] != (self._pod, lease.epoch)]
                if stale:
                    raise LeaseLost(stale)
            if server.rules.share_lock:
                locked.extend(lanes)
                for lane in lanes:
                    server.shared[lane] += 1

        def commit() -> Any:
            unlock()
            return effect()

        return await self._call(check, commit, rollback=unlock)

    # -- ParkingStore ----------------------------------------------------------------------------

    async def held(self, leases: Sequence[Lease]) -> Sequence[HeldKey]:
        server, lanes = self._server, {lease.lane for lease in leases}

        def effect() -> list[HeldKey]:
            if not server.rules.load_held:
                return []
            rows = [*server.parked.values(), *(row for row in server.dead.values() if row.holds)]
            found = {(row.sink, row.event.lane, row.event.key) for row in rows if row.event.lane in lanes}
            return [HeldKey(*entry) for entry in found if entry[2] is not None]

        return await self._call(effect)

    async def park(self, sink: str, entries: Sequence[Parked], settle: Sequence[Message]) -> None:
        def effect() -> None:
            for entry in entries:
                self._insert(sink, entry)
            self._server.settle([message.seq for message in settle])

        await self._fenced(_leases(entry.message for entry in entries), effect)

    def _insert(self, sink: str, entry: Parked) -> None:
        server, event = self._server, self._server.events[entry.message.seq]
        if any(row.sink == sink and row.event is event for row in server.parked.values()):
            return
        server.numbers += 1
        head = event.key is None or not self._held(sink, event)
        retry_at = self._world.now + entry.delay_seconds if head else None
        server.parked[server.numbers] = Row(server.numbers, sink, event, entry.attempts, retry_at)

    def _held(self, sink: str, event: Event) -> bool:
        rows = [*self._server.parked.values(), *(row for row in self._server.dead.values() if row.holds)]
        return any(row.sink == sink and row.event.lane == event.lane and row.event.key == event.key for row in rows)

    async def bury(self, entries: Sequence[Burial], settle: Sequence[Message]) -> None:
        def effect() -> None:
            for entry in entries:
                event = self._server.events[entry.message.seq]
                if not any(row.sink == entry.sink and row.event is event for row in self._server.dead.values()):
                    self._server.numbers += 1
                    self._bury(self._server.numbers, entry, event)
            self._server.settle([message.seq for message in settle])

        await self._fenced(_leases(entry.message for entry in entries), effect)

    def _bury(self, number: int, entry: Burial, event: Event) -> None:
        self._server.dead[number] = Row(number, entry.sink, event, entry.attempts, None, entry.holds, entry.kind)

    async def due(self, sink: str, leases: Sequence[Lease], heads: int, followers: int) -> Sequence[ParkedRun]:
        by_lane = {lease.lane: lease for lease in leases}

        def effect() -> list[ParkedRun]:
            rows = [row for row in self._server.parked.values() if row.sink == sink and row.event.lane in by_lane]
            found = [row for row in rows if row.retry_at is not None and row.retry_at <= self._world.now]
            found = [row for row in found if self._is_head(row, rows)][:heads]
            return [self._run_of(head, rows, followers, by_lane[head.event.lane]) for head in found]

        return await self._call(effect)

    def _is_head(self, row: Row, rows: Sequence[Row]) -> bool:
        key = (row.event.lane, row.event.key)
        return row.event.key is None or all((r.event.lane, r.event.key) != key or r.number >= row.number for r in rows)

    def _run_of(self, head: Row, rows: Sequence[Row], followers: int, lease: Lease) -> ParkedRun:
        key, run = head.event.key, [head]
        if key is not None:
            behind = [r for r in rows if r.event.key == key and r.event.lane == lease.lane and r.number > head.number]
            run += sorted(behind, key=lambda row: row.number)
        messages = [_message(row.event, lease, row.number, row.attempts) for row in run[: followers + 1]]
        return ParkedRun(messages, complete=len(run) <= followers + 1)

    async def finish(self, sink: str, results: Sequence[RunResult]) -> set[tuple[int, str | None]]:
        def effect() -> set[tuple[int, str | None]]:
            server = self._server
            for result in results:
                for message in result.confirmed:
                    server.parked.pop(message.parked or 0, None)
                if result.failed is not None and (row := server.parked.get(result.failed.parked or 0)):
                    row.attempts = result.attempts
                    row.retry_at = self._world.now + result.delay_seconds
                    if result.burial:
                        del server.parked[row.number]
                        self._bury(row.number, result.burial, row.event)
                self._promote(sink, result.lease.lane, result.key)
            rows = [*server.parked.values(), *(row for row in server.dead.values() if row.holds)]
            return {(row.event.lane, row.event.key) for row in rows if row.sink == sink}

        return await self._fenced([result.lease for result in results], effect)

    def _promote(self, sink: str, lane: int, key: str | None) -> None:
        rows = [r for r in self._server.parked.values() if (r.sink, r.event.lane, r.event.key) == (sink, lane, key)]
        dead = [r for r in self._server.dead.values() if (r.sink, r.event.lane, r.event.key) == (sink, lane, key)]
        if key is not None and rows and not any(row.holds for row in dead):
            head = min(rows, key=lambda row: row.number)
            if head.retry_at is None:
                head.retry_at = self._world.now

    async def next_due(self, sink: str, leases: Sequence[Lease]) -> float | None:
        lanes = {lease.lane for lease in leases}

        def effect() -> float | None:
            rows = [row for row in self._server.parked.values() if row.sink == sink and row.event.lane in lanes]
            moments = [row.retry_at for row in rows if row.retry_at is not None]
            return max(min(moments) - self._world.now, 0.0) if moments else None

        return await self._call(effect)

    # -- Settler ---------------------------------------------------------------------------------

    async def settle(self, messages: Sequence[Message]) -> None:
        await self._call(lambda: self._server.settle([message.seq for message in messages]))

    # -- Outbox ----------------------------------------------------------------------------------

    async def read(self, cursors: Sequence[Cursor], durable: int = 0) -> Page:
        server = self._server

        def effect() -> Page:
            rows: dict[Lease, list[Message]] = {}
            for cursor in cursors:
                if server.rules.fence_reads and server.leases[cursor.lease.lane][1] != cursor.lease.epoch:
                    continue
                if lane := server.unsettled.get(cursor.lease.lane):
                    found = sorted(seq for seq in lane if seq > cursor.floor)[: cursor.limit]
                    rows[cursor.lease] = [_message(lane[seq], cursor.lease) for seq in found]
            return Page(rows, server.mark())

        return await self._call(effect)

    async def read_all(self, leases: Sequence[Lease], floor: int, limit: int, durable: int = 0) -> Page:
        server = self._server

        def effect() -> Page:
            if server.rules.fence_reads and any(server.leases[lease.lane][1] != lease.epoch for lease in leases):
                return Page({}, server.mark())
            by_lane = {lease.lane: lease for lease in leases}
            found = sorted(seq for rows in server.unsettled.values() for seq in rows if seq > floor)[:limit]
            messages = [_message(server.events[seq], by_lane[server.events[seq].lane]) for seq in found]
            rows: dict[Lease, list[Message]] = {}
            for message in messages:
                rows.setdefault(by_lane[message.lane], []).append(message)
            return Page(rows, server.mark(), last=messages[-1] if messages else None)

        return await self._call(effect)

    async def payload(self, message: Message) -> bool:
        raise NotImplementedError

    async def holders(self) -> set[str] | None:
        names = (
            {transaction.name for transaction in self._server.open} if self._server.rules.wait_for_holders else set()
        )
        return await self._call(lambda: names)

    async def below(self, cursors: Sequence[Cursor]) -> Mapping[Lease, Sequence[int]]:
        return {}

    # -- Bell: a timer is enough here, tests/integration has the real one ------------------------------

    async def busy(self) -> None: ...

    async def sleep(self) -> bool:
        return False

    async def wake(self) -> None: ...

    async def wait(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "timeout"

    def ring(self) -> None: ...


def _leases(messages: Any) -> list[Lease]:
    return list({id(m.lease): m.lease for m in messages}.values())


def _message(event: Event, lease: Lease, parked: int | None = None, attempts: int = 0) -> Message:
    return Message(
        seq=event.seq, id=str(event.seq), topic=event.topic, key=event.key, payload=b"", headers=None,
        created_at=0, stored_at=0, lane=event.lane, destination=event.topic, lease=lease, parked=parked,
        attempts=attempts, size=100,
    )  # fmt: skip


class Broker:
    """One sink's broker. Keeps what was delivered, in order, and fails as it is told to."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.deliveries: list[int] = []
        self.known: set[int] = set()
        self.up = True
        self.ambiguous = 0.0
        self.flaky: dict[int, int] = {}
        self.poison: set[int] = set()
        self.attempts: dict[int, int] = {}

    def deliver(self, seq: int) -> None:
        self.deliveries.append(seq)
        self.known.add(seq)


class SimSink:
    """A pod's connection to a broker, true to the contract of relay.sink."""

    def __init__(self, broker: Broker, loop: PodLoop, concurrency: int) -> None:
        self._broker, self._loop, self.concurrency = broker, loop, concurrency

    async def open(self) -> None: ...

    async def ping(self) -> None: ...

    async def close(self) -> None: ...

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        world, broker = self._broker.world, self._broker
        reply = self._loop.create_future()
        messages = [(message.seq, message.key) for message in batch]

        def arrive() -> None:
            outcomes = self._take(messages)
            if world.rng.random() < broker.ambiguous:
                outcomes = [unavailable("no answer", sink_down=True) for _ in outcomes]

            def answer() -> None:
                if not self._loop.dead and not world.closed:
                    self._loop.call_soon(_resolve, reply, outcomes)

            world.at(world.latency(), answer)

        world.at(world.latency(), arrive)
        return await reply

    def _take(self, messages: Sequence[tuple[int, str | None]]) -> list[Outcome]:
        broker = self._broker
        outcomes: list[Outcome] = []
        failed: set[str] = set()
        # A cut in the middle: some prefix is in, the rest is not.
        cut = broker.world.rng.randrange(len(messages) + 1) if not broker.up and broker.world.rng.random() < 0.3 else 0
        for index, (seq, key) in enumerate(messages):
            if broker.up or index < cut:
                outcome = DEFERRED if key in failed else self._one(seq)
                if outcome is not CONFIRMED and key is not None:
                    failed.add(key)
            else:
                outcome = unavailable("down", sink_down=True)
            outcomes.append(outcome)
        return outcomes if broker.up else [unavailable("down", sink_down=True)] * len(messages)

    def _one(self, seq: int) -> Outcome:
        broker = self._broker
        broker.attempts[seq] = broker.attempts.get(seq, 0) + 1
        if seq in broker.poison:
            return rejected("poison")
        if broker.flaky.get(seq, 0) > 0:
            broker.flaky[seq] -= 1
            return unavailable("not this one")
        broker.deliver(seq)
        return CONFIRMED


def _resolve(reply: asyncio.Future[Any], result: Any) -> None:
    if not reply.done():
        reply.set_result(result)
