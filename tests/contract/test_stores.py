"""The contracts of relay.store, on PostgreSQL and on the in-memory stores that the simulation trusts.

What the simulation proves about the pipeline is worth as much as its stores are like the real ones.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import pytest

from relay.errors import LeaseLost
from relay.sources.polling.contracts import Cursor
from relay.store import Burial, HeldKey, LeaseStore, Parked, ParkedRun, ParkingStore, RunResult, Settler
from relay.types import LANES, Lease, Message
from tests.integration.pods import SINK, pod, publish
from tests.outbox import run_async
from tests.simulation.cluster import Database, Rules, Server
from tests.simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from relay.sources.polling.contracts import Outbox as Reader
    from tests.outbox import Outbox


@dataclass
class Member:
    """The stores of one pod."""

    leases: LeaseStore
    parking: ParkingStore
    settler: Settler
    reader: Reader

    async def join(self) -> dict[int, Lease]:
        await self.leases.renew(60.0)
        return {lease.lane: lease for lease in await self.leases.claim(LANES, ())}

    async def read(self, leases: Sequence[Lease]) -> list[Message]:
        page = await self.reader.read([Cursor(lease, 0, 1_000) for lease in leases])
        return sorted((row for rows in page.rows.values() for row in rows), key=lambda row: row.seq)


class Cluster(Protocol):
    """One database with two pods."""

    a: Member
    b: Member

    async def insert(self, *keys: str | None) -> None:
        """Commit an event for each key, in this order."""


class OnPostgres:
    def __init__(self, outbox: Outbox, a: Member, b: Member) -> None:
        self._outbox, self.a, self.b = outbox, a, b

    async def insert(self, *keys: str | None) -> None:
        await publish(self._outbox, *((key, "{}") for key in keys))


class InMemory:
    def __init__(self, server: Server, a: Member, b: Member) -> None:
        self._server, self.a, self.b = server, a, b

    async def insert(self, *keys: str | None) -> None:
        transaction = self._server.begin("app")
        for key in keys:
            self._server.insert(transaction, key, sum((key or "").encode()) % LANES, "orders")
        self._server.end(transaction, "committed")


Behaviour: TypeAlias = "Callable[[Cluster], Coroutine[Any, Any, None]]"
Perform: TypeAlias = "Callable[[Behaviour], None]"


async def on_postgres(outbox: Outbox, behaviour: Behaviour) -> None:
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        pods = [await stack.enter_async_context(pod(outbox, name)) for name in "ab"]
        members = [Member(one.leases, one.parking, one.settler, one.reader) for one in pods]
        await behaviour(OnPostgres(outbox, *members))


def in_memory(behaviour: Behaviour) -> None:
    world = World(1)
    server = Server(world, Rules(), [SINK])
    loop = world.loop("pods")
    databases = [Database(server, name, loop, lambda: None) for name in "ab"]
    task = world.spawn(loop, behaviour(InMemory(server, *(Member(d, d, d, d) for d in databases))))
    try:
        assert world.run(task.done, 60.0)
        task.result()
        assert server.lost == []
    finally:
        world.close()
        loop.close()


@pytest.fixture(params=["postgresql", "memory"])
def perform(request: pytest.FixtureRequest) -> Perform:
    """Runs a behaviour on a fresh cluster."""
    if request.param == "memory":
        return in_memory
    outbox: Outbox = request.getfixturevalue("outbox")
    return lambda behaviour: run_async(on_postgres(outbox, behaviour))


def lease_of(message: Message) -> Lease:
    assert message.lease is not None
    return message.lease


async def first_events(cluster: Cluster, *keys: str | None) -> list[Message]:
    leases = await cluster.a.join()
    await cluster.insert(*keys)
    return await cluster.a.read(list(leases.values()))


async def park(member: Member, messages: Sequence[Message], delay_seconds: float = 0.0) -> None:
    await member.parking.park(SINK, [Parked(message, delay_seconds) for message in messages], messages)


async def due(member: Member, message: Message, heads: int = 10, followers: int = 10) -> Sequence[ParkedRun]:
    return await member.parking.due(SINK, [lease_of(message)], heads, followers)


def seqs(messages: Sequence[Message]) -> list[int]:
    return [message.seq for message in messages]


# --- leases ----------------------------------------------------------------------------------------


def test_a_claim_takes_what_nobody_living_owns(perform: Perform) -> None:
    async def behaviour(cluster: Cluster) -> None:
        await cluster.a.leases.renew(60.0)
        await cluster.b.leases.renew(60.0)
        first = await cluster.a.leases.claim(10, ())
        second = await cluster.b.leases.claim(LANES, ())
        assert len(first) == 10
        assert len(second) == LANES - 10
        assert {lease.lane for lease in first} | {lease.lane for lease in second} == set(range(LANES))
        view = await cluster.a.leases.look()
        assert view.members == {"a", "b"}
        assert all(view.owners[lease.lane] == ("a", 1) for lease in first)

    perform(behaviour)


def test_a_dead_pods_lanes_go_at_the_next_epoch(perform: Perform) -> None:
    async def behaviour(cluster: Cluster) -> None:
        old = await cluster.a.join()
        await cluster.a.leases.renew(-1.0)
        new = await cluster.b.join()
        assert {lease.epoch for lease in new.values()} == {2}
        await cluster.a.leases.release(list(old.values()))
        assert (await cluster.b.leases.look()).owners[0] == ("b", 2)

    perform(behaviour)


def test_an_own_lane_that_is_not_known_is_claimed_anew(perform: Perform) -> None:
    async def behaviour(cluster: Cluster) -> None:
        await cluster.a.join()
        (again,) = await cluster.a.leases.claim(LANES, set(range(1, LANES)))
        assert (again.lane, again.epoch) == (0, 2)

    perform(behaviour)


def test_release_and_leave_free_lanes(perform: Perform) -> None:
    async def behaviour(cluster: Cluster) -> None:
        leases = await cluster.a.join()
        await cluster.a.leases.release([leases[5]])
        view = await cluster.a.leases.look()
        assert [lane for lane, (owner, _) in view.owners.items() if owner is None] == [5]
        await cluster.a.leases.leave()
        view = await cluster.b.leases.look()
        assert view.members == frozenset()
        assert {owner for owner, _ in view.owners.values()} == {None}

    perform(behaviour)


# --- decisions -------------------------------------------------------------------------------------


def test_a_settled_event_is_gone(perform: Perform) -> None:
    async def behaviour(cluster: Cluster) -> None:
        first, second = await first_events(cluster, "k", "k")
        await park(cluster.a, [first])
        assert seqs(await cluster.a.read([lease_of(second)])) == [second.seq]

    perform(behaviour)


@pytest.mark.parametrize("action", ["park", "bury", "finish"])
def test_a_decision_of_a_lost_lane_has_no_effect(perform: Perform, action: str) -> None:
    async def behaviour(cluster: Cluster) -> None:
        parked, fresh = await first_events(cluster, "k", "j")
        await park(cluster.a, [parked])
        (run,) = await due(cluster.a, parked)
        await cluster.a.leases.renew(-1.0)
        leases = await cluster.b.join()
        decision: Callable[[], Awaitable[object]] = {
            "park": lambda: park(cluster.a, [fresh]),
            "bury": lambda: cluster.a.parking.bury([Burial(fresh, SINK, "rejected", "r", 1, holds=True)], [fresh]),
            "finish": lambda: cluster.a.parking.finish(SINK, [RunResult(lease_of(parked), "k", list(run.messages))]),
        }[action]
        with pytest.raises(LeaseLost):
            await decision()
        assert seqs(await cluster.b.read(list(leases.values()))) == [fresh.seq]
        assert await cluster.b.parking.held(list(leases.values())) == [HeldKey(SINK, parked.lane, "k")]

    perform(behaviour)


def test_a_key_comes_back_in_its_order(perform: Perform) -> None:
    """Whatever is parked first comes first, its head alone has a time, and the last one says that it is complete."""

    async def behaviour(cluster: Cluster) -> None:
        messages = await first_events(cluster, "k", "k", "k")
        await park(cluster.a, messages[:2])
        await park(cluster.a, messages[2:])
        await park(cluster.a, messages[:1])  # again: it stays where it is
        (run,) = await due(cluster.a, messages[0], followers=1)
        assert (seqs(run.messages), run.complete) == (seqs(messages[:2]), False)
        (run,) = await due(cluster.a, messages[0], followers=2)
        assert (seqs(run.messages), run.complete) == (seqs(messages), True)
        result = RunResult(lease_of(messages[0]), "k", list(run.messages[:2]))
        assert (messages[0].lane, "k") in await cluster.a.parking.finish(SINK, [result])
        (run,) = await due(cluster.a, messages[0])
        assert seqs(run.messages) == seqs(messages[2:])
        assert await cluster.a.parking.next_due(SINK, [lease_of(messages[0])]) == 0
        result = RunResult(lease_of(messages[0]), "k", list(run.messages))
        assert (messages[0].lane, "k") not in await cluster.a.parking.finish(SINK, [result])
        assert await cluster.a.parking.held([lease_of(messages[0])]) == []
        assert await cluster.a.parking.next_due(SINK, [lease_of(messages[0])]) is None

    perform(behaviour)


def test_events_without_a_key_come_alone(perform: Perform) -> None:
    async def behaviour(cluster: Cluster) -> None:
        messages = await first_events(cluster, None, None)
        await park(cluster.a, messages)
        runs = await cluster.a.parking.due(SINK, [lease_of(message) for message in messages], 10, 10)
        assert sorted(seqs(run.messages) for run in runs) == [seqs(messages[:1]), seqs(messages[1:])]
        assert all(run.complete for run in runs)
        assert await cluster.a.parking.held([lease_of(message) for message in messages]) == []

    perform(behaviour)


def test_a_failed_row_comes_again_at_its_time(perform: Perform) -> None:
    async def behaviour(cluster: Cluster) -> None:
        messages = await first_events(cluster, "k", "k")
        await park(cluster.a, messages)
        (run,) = await due(cluster.a, messages[0])
        result = RunResult(lease_of(messages[0]), "k", failed=run.messages[0], delay_seconds=0.2, attempts=3, error="e")
        assert (messages[0].lane, "k") in await cluster.a.parking.finish(SINK, [result])
        seconds = await cluster.a.parking.next_due(SINK, [lease_of(messages[0])])
        assert seconds is not None
        assert seconds <= 0.2
        while not (runs := await due(cluster.a, messages[0])):  # noqa: ASYNC110  # the contract has no event for it
            await asyncio.sleep(0.01)
        assert seqs(runs[0].messages) == seqs(messages)
        assert runs[0].messages[0].attempts == 3

    perform(behaviour)


@pytest.mark.parametrize("holds", [True, False])
def test_a_dead_head_holds_its_key_or_not(perform: Perform, holds: bool) -> None:
    async def behaviour(cluster: Cluster) -> None:
        messages = await first_events(cluster, "k", "k")
        await park(cluster.a, messages)
        (run,) = await due(cluster.a, messages[0])
        dead = run.messages[0]
        burial = Burial(dead, SINK, "rejected", "r", 1, holds=holds)
        result = RunResult(lease_of(messages[0]), "k", failed=dead, burial=burial)
        assert (messages[0].lane, "k") in await cluster.a.parking.finish(SINK, [result])
        runs = await due(cluster.a, messages[0])
        assert [seqs(run.messages) for run in runs] == ([] if holds else [seqs(messages[1:])])

    perform(behaviour)


def test_a_key_behind_a_dead_letter_is_held_for_the_next_owner(perform: Perform) -> None:
    async def behaviour(cluster: Cluster) -> None:
        first, second = await first_events(cluster, "k", "k")
        await cluster.a.parking.bury([Burial(first, SINK, "rejected", "r", 1, holds=True)], [first])
        await park(cluster.a, [second])
        await cluster.a.leases.leave()
        leases = await cluster.b.join()
        assert await cluster.b.parking.held(list(leases.values())) == [HeldKey(SINK, first.lane, "k")]
        assert await cluster.b.parking.due(SINK, list(leases.values()), 10, 10) == []

    perform(behaviour)
