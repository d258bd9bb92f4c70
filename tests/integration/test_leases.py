"""Lanes on PostgreSQL: never two owners, dead pods' lanes are free at once, and a fair share for everybody."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from relay.config import Leases
from relay.sources.polling.ownership import Ownership
from relay.telemetry.metrics import Metrics
from relay.types import LANES, Lease
from tests.integration.pods import blocked, connected, pod, until

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from relay.types import Message
    from tests.integration.pods import Pod
    from tests.outbox import Outbox


async def test_twelve_pods_that_claim_at_once_never_get_a_lane_twice(outbox: Outbox) -> None:
    """Everybody asks for all lanes at the same moment, three times over, and each lane has one taker."""
    async with AsyncExitStack() as stack:
        pods = [await stack.enter_async_context(pod(outbox, f"pod {number}")) for number in range(12)]
        for one in pods:
            await one.leases.renew(60.0)
        for _ in range(3):
            claims = await asyncio.gather(*(one.leases.claim(LANES, ()) for one in pods))
            taken = Counter(lease.lane for leases in claims for lease in leases)
            assert set(taken.values()) == {1}
            view = await pods[0].leases.look()
            assert all(
                view.owners[lease.lane] == (one.name, lease.epoch)
                for one, leases in zip(pods, claims, strict=True)
                for lease in leases
            )
            for one, leases in zip(pods, claims, strict=True):
                await one.leases.release(leases)


async def test_a_claim_raises_the_epoch_even_of_an_own_lane(outbox: Outbox) -> None:
    """A pod that lost its memory claims its own lanes anew: what it sent before must not decide any more."""
    async with pod(outbox) as one:
        first = await one.join()
        assert {lease.epoch for lease in first.values()} == {1}
        assert await one.leases.claim(LANES, first.keys()) == []
        again = await one.leases.claim(LANES, ())
        assert {lease.epoch for lease in again} == {2}


async def test_a_living_pods_lanes_are_not_free(outbox: Outbox) -> None:
    async with pod(outbox, "a") as a, pod(outbox, "b") as b:
        await a.join(10)
        taken = await b.join()
        assert len(taken) == LANES - 10


async def test_a_pod_that_did_not_renew_is_dead(outbox: Outbox) -> None:
    """Its time over by the server's clock, its lanes are claimed at the next epoch and it is not listed."""
    async with pod(outbox, "a") as a, pod(outbox, "b") as b:
        await a.join(10)
        await a.leases.renew(-1.0)
        taken = await b.join()
        assert len(taken) == LANES
        assert sum(lease.epoch == 2 for lease in taken.values()) == 10
        assert (await b.leases.look()).members == {"b"}


async def test_a_killed_pod_is_dead_as_soon_as_its_session_is(outbox: Outbox) -> None:
    """Its heartbeat has a minute left, but the lock that its session held is gone."""
    async with pod(outbox, "a") as a, pod(outbox, "b") as b:
        a.session_key = outbox.names.advisory_key("pod a")
        async with connected(outbox.relay_dsn) as session:
            await session.execute("SELECT pg_advisory_lock($1)", a.session_key)
            await a.join()
            assert (await b.leases.look()).members == {"a"}
            assert await b.join() == {}

        async def alone() -> bool:
            return (await b.leases.look()).members == {"b"}

        await until(alone)
        assert len(await b.leases.claim(LANES, ())) == LANES


async def test_a_release_of_an_older_epoch_changes_nothing(outbox: Outbox) -> None:
    async with pod(outbox, "a") as a, pod(outbox, "b") as b:
        old = await a.join(3)
        await a.leases.renew(-1.0)
        await b.join()
        await a.leases.release(list(old.values()))
        view = await b.leases.look()
        assert {owner for owner, _ in view.owners.values()} == {"b"}


async def test_a_pod_that_leaves_is_gone_with_all_it_had(outbox: Outbox) -> None:
    async with pod(outbox, "a") as a, pod(outbox, "b") as b:
        await a.join()
        await a.leases.leave()
        view = await b.leases.look()
        assert view.members == frozenset()
        assert {owner for owner, _ in view.owners.values()} == {None}


async def test_a_lane_whose_owner_is_deciding_is_skipped(outbox: Outbox) -> None:
    """The claim waits for nobody: it takes the others, and this one the next time."""
    async with pod(outbox, "a") as a, pod(outbox, "b") as b:
        await a.join(2)
        await a.leases.renew(-1.0)
        await b.leases.renew(60.0)
        async with connected(outbox.relay_dsn) as deciding:
            async with deciding.transaction():
                await deciding.execute(outbox.names.format("SELECT FROM {lease} WHERE lane = 0 FOR SHARE"))
                taken = await asyncio.wait_for(b.leases.claim(LANES, ()), 5)
                assert {lease.lane for lease in taken} == set(range(1, LANES))
            assert [lease.lane for lease in await b.leases.claim(LANES, {lease.lane for lease in taken})] == [0]


class Watched:
    """Stands for source and pipeline: records who reads which lane, and fails when two do."""

    def __init__(self, name: str, reading: dict[int, str]) -> None:
        self.name, self.reading = name, reading
        self.lanes: set[int] = set()
        self.adopted: set[Lease] = set()

    def gain(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            assert lease in self.adopted, "read before its held keys were loaded (rule 3)"
            assert lease.lane not in self.reading, f"lane {lease.lane} has two owners"
            self.reading[lease.lane] = self.name
            self.lanes.add(lease.lane)

    def lose(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            if lease.lane in self.lanes:
                self.lanes.discard(lease.lane)
                del self.reading[lease.lane]

    async def quiet(self, lease: Lease) -> None: ...

    async def room(self) -> tuple[int, int]:
        return 1, 1

    def submit(self, messages: Sequence[Message]) -> None: ...

    async def adopt(self, leases: Sequence[Lease]) -> None:
        await asyncio.sleep(0)  # as a query does
        self.adopted.update(leases)

    async def drained(self, lease: Lease) -> None: ...

    def abandon(self, lease: Lease) -> None: ...


def start(one: Pod, reading: dict[int, str], group: asyncio.TaskGroup) -> tuple[Ownership, Watched, asyncio.Task[None]]:
    user = Watched(one.name, reading)
    options = Leases(ttl_seconds=9.0, margin_seconds=1.0)
    ownership = Ownership(one.name, one.leases, user, user, options, Metrics())
    return ownership, user, group.create_task(ownership.run())


async def settled(pods: Sequence[tuple[Ownership, Watched, asyncio.Task[None]]]) -> None:
    """Let everybody look again and again until each one has its share."""
    low, rest = divmod(LANES, len(pods))
    shares = sorted([low] * (len(pods) - rest) + [low + 1] * rest)
    while sorted(len(user.lanes) for _, user, _ in pods) != shares:
        for ownership, _, _ in pods:
            ownership.look()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("count", [1, 3, 12])
async def test_every_pod_gets_its_fair_share(outbox: Outbox, count: int) -> None:
    """Pods join one after the other's share is whole; no lane ever has two readers on the way."""
    reading: dict[int, str] = {}
    async with AsyncExitStack() as stack, asyncio.timeout(30), asyncio.TaskGroup() as group:
        first = await stack.enter_async_context(pod(outbox, "pod 00"))
        running = [start(first, reading, group)]
        await settled(running)
        for number in range(1, count):
            one = await stack.enter_async_context(pod(outbox, f"pod {number:02}"))
            running.append(start(one, reading, group))
        await settled(running)
        assert len(reading) == LANES
        for _, _, task in running:
            task.cancel()


async def test_the_lanes_of_a_pod_that_leaves_go_to_the_others(outbox: Outbox) -> None:
    reading: dict[int, str] = {}
    async with pod(outbox, "a") as a, pod(outbox, "b") as b, asyncio.timeout(30), asyncio.TaskGroup() as group:
        both = [start(a, reading, group), start(b, reading, group)]
        await settled(both)
        await both[0][0].leave(5.0)
        both[0][2].cancel()
        await settled(both[1:])
        both[1][2].cancel()


async def test_the_deadline_counts_from_before_the_renewal_was_sent(outbox: Outbox) -> None:
    """The answer may be late; the server's clock began when the statement ran, not when we heard of it (rule 1)."""
    async with pod(outbox) as one, connected(outbox.admin_dsn) as locking:
        user = Watched("a", {})
        ownership = Ownership("a", one.leases, user, user, Leases(ttl_seconds=9.0, margin_seconds=1.0), Metrics())
        await ownership._beat()
        loop = asyncio.get_running_loop()
        async with locking.transaction():
            await locking.execute(outbox.names.format("LOCK TABLE {member}"))
            ownership.renew()
            sent = loop.time()
            beat = asyncio.create_task(ownership._beat())
            await until(lambda: blocked(locking))
            await asyncio.sleep(0.1)  # the answer's delay
        await beat
        assert sent + 8.0 <= ownership._deadline < sent + 8.05


async def test_past_the_deadline_nothing_is_used(outbox: Outbox) -> None:
    """The database does not answer: every lane is given up and marked lost before the others may take it."""
    async with pod(outbox) as one, asyncio.TaskGroup() as group:
        reading: dict[int, str] = {}
        ownership, user, task = start(one, reading, group)
        await settled([(ownership, user, task)])
        leases = list(ownership._owned.values())
        ownership._deadline = asyncio.get_running_loop().time()
        async with asyncio.timeout(10):
            while reading:  # noqa: ASYNC110  # the watch runs by the clock
                await asyncio.sleep(0.01)
        assert all(lease.lost for lease in leases)
        task.cancel()
