"""The floor on PostgreSQL: it rises only over what no transaction can still bring in (PROTOCOLS.md rule 8).

The source is driven read by read, and each read is followed by a look at the lock table.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.integration.pods import Pod, Sink, Timer, connected, lane_of, pod, publish, source_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    import asyncpg

    from relay.sources.polling.contracts import Cursor
    from relay.sources.polling.source import PollingSource
    from relay.telemetry.metrics import Metrics
    from relay.types import Lease
    from tests.outbox import Outbox

INSERT = "INSERT INTO {outbox} (topic, key) VALUES ('t', $1)"


@dataclass
class Reading:
    """A source that reads when it is told to."""

    pod: Pod
    source: PollingSource
    sink: Sink
    metrics: Metrics
    leases: dict[int, Lease]

    async def turn(self, times: int = 1) -> list[int]:
        """Read, look at the locks, settle. Returns what was new."""
        before = len(self.sink.taken)
        for _ in range(times):
            self.source._sampled_at = -1e9
            await self.source._read(10_000, 32 * 1024 * 1024)
            await self.sink.settled()
        return self.sink.taken[before:]

    def floor(self, key: str = "k") -> int:
        return self.source._lanes[self.leases[lane_of(self.pod.outbox, key)]].floor


@asynccontextmanager
async def reading(outbox: Outbox, *, settles: bool = True) -> AsyncIterator[Reading]:
    async with pod(outbox) as one:
        leases = await one.join()
        source, sink, metrics = source_of(one, Timer(), settles=settles)
        source.gain(leases.values())
        yield Reading(one, source, sink, metrics, leases)


async def insert(outbox: Outbox, app: asyncpg.Connection[Any], key: str = "k") -> None:
    await app.execute(outbox.names.format(INSERT), key)


async def test_the_first_event_ever_is_read(outbox: Outbox) -> None:
    """A pod that has read the empty outbox often: number 1 is not below its floor."""
    async with reading(outbox) as one:
        assert await one.turn(4) == []
        await publish(outbox, ("k", "{}"))
        assert await one.turn() == [1]


async def test_the_floor_rises_to_the_last_number(outbox: Outbox) -> None:
    async with reading(outbox) as one:
        await publish(outbox, *[("k", "{}")] * 3)
        assert await one.turn(4) == [1, 2, 3]
        assert one.floor() == 3
        assert one.floor("another key") == 3
        await publish(outbox, ("k", "{}"))
        assert await one.turn() == [4]


async def test_a_late_commit_with_a_lower_number_is_read(outbox: Outbox) -> None:
    """One session takes a number and waits; later ones commit and are delivered; then it commits too."""
    async with reading(outbox) as one, connected(outbox.app_dsn) as slow, connected(outbox.app_dsn) as fast:
        transaction = slow.transaction()
        await transaction.start()
        await insert(outbox, slow)
        for seq in (2, 3, 4):
            await insert(outbox, fast)
            assert await one.turn(3) == [seq]
            assert one.floor() == 0
        await transaction.commit()
        assert await one.turn(1) == [1]
        await one.turn(3)
        assert one.floor() == 4


async def test_a_transaction_that_began_before_the_pod_looked_counts(outbox: Outbox) -> None:
    """It was there at the first look, and it may hold a lower number than all that was read."""
    async with connected(outbox.app_dsn) as slow, reading(outbox) as one:
        transaction = slow.transaction()
        await transaction.start()
        await insert(outbox, slow)
        await publish(outbox, ("k", "{}"))
        assert await one.turn(4) == [2]
        assert one.floor() == 0
        await transaction.commit()
        assert await one.turn() == [1]


async def test_a_prepared_transaction_counts_until_it_ends(outbox: Outbox) -> None:
    """Also when it was prepared between two looks: it has no process any more, and is still the same transaction."""
    async with reading(outbox) as one, connected(outbox.app_dsn) as app:
        await app.execute("BEGIN")
        await insert(outbox, app)
        await publish(outbox, ("k", "{}"))
        assert await one.turn(2) == [2]
        gid = outbox.name
        await app.execute(f"PREPARE TRANSACTION '{gid}'")
        await publish(outbox, ("k", "{}"))
        assert await one.turn(4) == [3]
        assert one.floor() == 0
        await app.execute(f"COMMIT PREPARED '{gid}'")
        assert await one.turn() == [1]
        await one.turn(3)
        assert one.floor() == 3


async def test_transactions_that_overlap_for_ever_do_not_hold_the_floor(outbox: Outbox) -> None:
    """At each look somebody is writing, but never the same one for long."""
    async with reading(outbox) as one, connected(outbox.app_dsn) as first, connected(outbox.app_dsn) as second:
        writers = [first, second]
        await writers[0].execute("BEGIN")
        await insert(outbox, writers[0])
        floors = []
        for _ in range(6):
            await one.turn()
            await writers[1].execute("BEGIN")
            await insert(outbox, writers[1])
            await one.turn()
            await writers[0].execute("COMMIT")
            writers.reverse()
            floors.append(one.floor())
        await writers[0].execute("ROLLBACK")
        assert 3 <= floors[-1] < 7


async def test_writers_of_a_partition_count(outbox_factory: Any) -> None:
    outbox = outbox_factory(partitioned=True)
    async with reading(outbox) as one, connected(outbox.app_dsn) as slow:
        await slow.execute("BEGIN")
        await insert(outbox, slow)
        await publish(outbox, ("k", "{}"))
        assert await one.turn(4) == [2]
        assert one.floor() == 0
        await slow.execute("COMMIT")
        assert await one.turn() == [1]


async def test_a_sequence_with_a_cache_has_no_floor(outbox: Outbox) -> None:
    """Another session may still hold lower numbers without any lock, so every read starts at the bottom."""
    outbox.execute("ALTER SEQUENCE {outbox_seq} CACHE 10")
    async with reading(outbox) as one, connected(outbox.app_dsn) as first, connected(outbox.app_dsn) as second:
        await insert(outbox, first)
        await insert(outbox, second)
        assert await one.turn(4) == [1, 11]
        assert one.floor() == 0
        await insert(outbox, first)
        assert await one.turn() == [2]


async def test_a_new_claim_reads_from_the_bottom(outbox: Outbox) -> None:
    """What was in flight at another owner, or here under an older lease, lies below the floor that it had."""
    async with reading(outbox, settles=False) as one:
        await publish(outbox, *[("k", "{}")] * 3)
        assert await one.turn(4) == [1, 2, 3]
        assert one.floor() == 3
        lane = lane_of(outbox, "k")
        one.source.lose([one.leases[lane]])
        (one.leases[lane],) = await one.pod.leases.claim(1, set(one.leases) - {lane})
        one.source.gain([one.leases[lane]])
        assert await one.turn() == [1, 2, 3]


async def test_rows_of_another_server_are_not_handed_on(outbox: Outbox) -> None:
    """The lease was granted by another incarnation: nothing is submitted, the lane is lost, ownership looks at once."""
    async with reading(outbox) as one:
        await publish(outbox, ("k", "{}"))
        foreign: list[bool] = []
        one.source.on_foreign_server = lambda: foreign.append(True)
        for lease in one.leases.values():
            lease.server = "1.0/00000009"
        assert await one.turn() == []
        assert foreign == [True]
        assert all(lease.lost for lease in one.leases.values())


async def test_dead_entries_of_the_index_cost_nothing_above_the_floor(outbox: Outbox) -> None:
    """10,000 delivered events that somebody's old snapshot keeps in the index: a read crawls over them, or skips them."""
    async with reading(outbox) as one, connected(outbox.admin_dsn) as old, connected(outbox.admin_dsn) as admin:
        outbox.execute("INSERT INTO {outbox} (topic, key) SELECT 't', 'k' FROM generate_series(1, 10000)")
        await old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await old.execute("SELECT txid_current_if_assigned(), count(*) FROM pg_class")
        outbox.execute("DELETE FROM {outbox}")
        await one.turn(4)
        assert one.floor() == 10_000
        lane = lane_of(outbox, "k")

        async def buffers(floor: int) -> int:
            plan = outbox.names.format(
                "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF) SELECT seq FROM {outbox}"
                f" WHERE lane = {lane} AND seq > {floor} AND published_at IS NULL ORDER BY seq LIMIT 31"
            )
            lines = [row[0] for row in await admin.fetch(plan)]
            (line,) = [line for line in lines if line.strip().startswith("Buffers")][:1]
            return sum(int(part.split("=")[1]) for part in line.split() if part.startswith(("hit=", "read=")))

        await admin.execute("SET enable_seqscan = off; SET enable_bitmapscan = off")
        for floor in (0, one.floor()):
            await buffers(floor)  # hint bits
        assert await buffers(0) > 100
        assert await buffers(one.floor()) <= 6
        await old.execute("COMMIT")


# --- the sweep -------------------------------------------------------------------------------------


async def test_the_sweep_finds_what_is_below_the_floor(outbox: Outbox) -> None:
    """Whatever went wrong: the row is counted as a violation, and the lane is read from its start."""
    async with reading(outbox) as one:
        await publish(outbox, ("k", "{}"))
        for lane in one.source._lanes.values():
            lane.floor = 7
        assert await one.turn() == []
        await one.source._sweep(list(one.source._lanes.values()))
        assert one.metrics.floor_violations._value.get() == 1
        assert await one.turn() == [1]


async def test_the_sweep_knows_what_is_in_flight(outbox: Outbox) -> None:
    """Below the floor and unsettled, because it is on its way: no violation."""
    async with reading(outbox, settles=False) as one:
        await publish(outbox, *[("k", "{}")] * 3)
        await one.turn(4)
        assert one.floor() == 3
        await one.source._sweep(list(one.source._lanes.values()))
        assert one.metrics.floor_violations._value.get() == 0


async def test_what_is_settled_during_a_sweep_is_no_violation(outbox: Outbox) -> None:
    """The sweep's snapshot still shows the row when the pipeline is done with it."""
    async with reading(outbox, settles=False) as one:
        await publish(outbox, ("k", "{}"))
        await one.turn(4)
        messages = await one.pod.read(list(one.leases.values()))
        below = one.pod.reader.below

        async def done_before_the_answer(cursors: Sequence[Cursor]) -> Mapping[Lease, Sequence[int]]:
            found = await below(cursors)
            one.source.done(messages)
            return found

        one.pod.reader.below = done_before_the_answer  # type: ignore[method-assign]
        await one.source._sweep(list(one.source._lanes.values()))
        assert one.metrics.floor_violations._value.get() == 0
        assert one.floor() == 1
        assert one.source._lanes[one.leases[lane_of(outbox, "k")]].in_flight == set()


async def test_the_sweep_runs_beside_the_reads(outbox: Outbox) -> None:
    async with reading(outbox) as one:
        await publish(outbox, ("k", "{}"))
        for lane in one.source._lanes.values():
            lane.floor = 7
        one.source._swept_at, one.source._sweep_pause = -1e9, 0.0
        await one.turn()
        assert await one.turn() == [1]
