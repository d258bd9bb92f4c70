"""Parking on PostgreSQL: the fence, the order of a key, bounds in bytes, and texts that a column refuses."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from relay.errors import LeaseLost, SourceUnavailable
from relay.store import Burial, HeldKey, Parked, RunResult
from relay.types import LANES, Lease
from tests.integration.pods import SINK, blocked, connected, lane_of, pod, publish, until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.types import Message
    from tests.integration.pods import Pod
    from tests.outbox import Outbox, OutboxFactory

MB = 1024 * 1024
NUMBERS = "SELECT key, retry_at IS NOT NULL FROM {parked} ORDER BY number"


def left(outbox: Outbox) -> int:
    """Rows of the outbox that are not settled."""
    return int(outbox.execute("SELECT count(*) FROM {outbox} WHERE published_at IS NULL")[0][0])


async def events(one: Pod, outbox: Outbox, *keys: str | None) -> list[Message]:
    """Claim everything, insert an event for each key and read them back in order."""
    leases = await one.join()
    await publish(outbox, *((key, "{}") for key in keys))
    return await one.read(list(leases.values()))


async def park(one: Pod, messages: Sequence[Message], **how: Any) -> None:
    await one.parking.park(SINK, [Parked(message, **how) for message in messages], messages)


def seqs(messages: Sequence[Message]) -> list[int]:
    return [message.seq for message in messages]


# --- rule 2: the fence ----------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["park", "bury", "finish"])
async def test_nobody_claims_a_lane_while_its_owner_decides(outbox: Outbox, action: str) -> None:
    """A's transaction is open, B claims and loads held keys, A commits: B must not have got the lane.

    The interleaving of PROTOCOLS.md rule 2. Without the share lock B would own the lane without having seen
    what A parks, and overtake it.
    """
    async with pod(outbox, "a") as a, pod(outbox, "b") as b:
        (message,) = await events(a, outbox, "k")
        lane = message.lane
        if action == "finish":
            await park(a, [message])
            (run,) = await a.parking.due(SINK, [message.lease], 1, 0)  # type: ignore[list-item]
            message = run.messages[0]
        await a.leases.renew(-1.0)  # A is slow: its time is over while it decides
        await b.leases.renew(60.0)
        assert message.lease is not None

        async with connected(
            outbox.admin_dsn
        ) as blocker:  # lets A's second statement wait: A is between fence and commit
            table = "dead_letter" if action == "bury" else "parked"
            transaction = blocker.transaction()
            await transaction.start()
            await blocker.execute(outbox.names.format(f"LOCK TABLE {{{table}}} IN SHARE MODE"))
            deciding = asyncio.create_task(decide(a, action, message))
            await until(partial(blocked, blocker))
            taken = {lease.lane: lease for lease in await asyncio.wait_for(b.leases.claim(LANES, ()), 5)}
            held_before = await b.parking.held(list(taken.values()))
            assert lane not in taken
            by_update = outbox.names.format("SELECT FROM {lease} WHERE lane = $1 FOR NO KEY UPDATE SKIP LOCKED")
            assert await blocker.fetch(by_update, lane) == [], "a plain UPDATE would take the lane"
            assert held_before == []
            await transaction.rollback()
        await deciding
        (late,) = await b.leases.claim(LANES, taken.keys())
        assert late.lane == lane
        held = await b.parking.held([late])
        assert held == ([] if action == "finish" else [HeldKey(SINK, lane, "k")])


async def decide(one: Pod, action: str, message: Message) -> None:
    assert message.lease is not None
    if action == "park":
        await one.parking.park(SINK, [Parked(message)], [message])
    elif action == "bury":
        await one.parking.bury([Burial(message, SINK, "rejected", "poison", 1, holds=True)], [message])
    else:
        await one.parking.finish(SINK, [RunResult(message.lease, message.key, confirmed=[message])])


@pytest.mark.parametrize("action", ["park", "bury", "finish"])
@pytest.mark.parametrize("stale", ["epoch", "owner", "server", "one of two"])
async def test_a_decision_under_a_stale_lease_has_no_effect(outbox: Outbox, action: str, stale: str) -> None:
    """Older epoch, another owner, another incarnation of the server: LeaseLost names the lane, no row changes."""
    async with pod(outbox, "a") as a, pod(outbox, "b") as b:
        (message,) = await events(a, outbox, "k")
        lease = message.lease
        assert lease is not None
        await park(a, [message])
        (run,) = await a.parking.due(SINK, [lease], 1, 0)
        await publish(outbox, ("k", "{}"))
        if action == "finish":
            (message,) = run.messages
        else:
            (message,) = await a.read([lease])
        if stale == "epoch":
            outbox.execute(f"UPDATE {{lease}} SET epoch = epoch + 1 WHERE lane = {lease.lane}")
        elif stale == "server":
            lease.server = "1.0/00000009"
        elif stale == "one of two":
            message.lease = Lease(lease.lane, lease.epoch - 1, lease.server)
        before = rows(outbox)
        decider = b if stale == "owner" else a
        with pytest.raises(LeaseLost) as caught:
            await decide(decider, action, message)
        assert caught.value.lanes == {message.lane}
        assert rows(outbox) == before


async def test_two_leases_of_one_lane_are_both_compared(outbox: Outbox) -> None:
    """The lane's present epoch in a batch does not vouch for an older one beside it."""
    async with pod(outbox) as a:
        first, second = await events(a, outbox, "k", "k")
        assert first.lease is not None
        second.lease = Lease(first.lane, first.lease.epoch - 1, first.lease.server)
        with pytest.raises(LeaseLost):
            await park(a, [first, second])
        assert left(outbox) == 2


def rows(outbox: Outbox) -> list[object]:
    tables = ("outbox", "parked", "dead_letter")
    return [outbox.execute(f"SELECT * FROM {{{table}}} ORDER BY seq") for table in tables]


async def test_a_decision_waits_for_a_claim_and_loses(outbox: Outbox) -> None:
    """B has claimed but not committed: A's decision waits for it and then finds B's epoch."""
    async with pod(outbox, "a") as a, connected(outbox.admin_dsn) as claiming:
        (message,) = await events(a, outbox, "k")
        transaction = claiming.transaction()
        await transaction.start()
        await claiming.execute(
            outbox.names.format("UPDATE {lease} SET owner = 'b', epoch = epoch + 1 WHERE lane = $1"), message.lane
        )
        deciding = asyncio.create_task(park(a, [message]))
        await until(partial(blocked, claiming))
        await transaction.commit()
        with pytest.raises(LeaseLost):
            await deciding
        assert outbox.execute("SELECT FROM {parked}") == []
        assert left(outbox) == 1


# --- rules 4 to 7 ---------------------------------------------------------------------------------


async def test_an_event_id_that_is_used_twice_is_two_events(outbox: Outbox) -> None:
    """Applications may repeat an id: both rows are parked, in order of their own numbers (rule 4)."""
    async with pod(outbox) as one:
        leases = await one.join()
        event = "01943a00-0000-7000-8000-000000000001"
        for payload in ('"first"', '"second"'):
            async with connected(outbox.app_dsn) as app:
                await app.execute(
                    outbox.names.format("INSERT INTO {outbox} (id, topic, key, payload) VALUES ($1, 't', 'k', $2)"),
                    event, payload,
                )  # fmt: skip
        messages = await one.read(list(leases.values()))
        await park(one, messages)
        (run,) = await one.parking.due(SINK, list(leases.values()), 10, 10)
        assert [message.id for message in run.messages] == [event, event]
        assert [message.payload for message in run.messages] == [b'"first"', b'"second"']


async def test_parking_again_changes_nothing_and_settles(outbox: Outbox) -> None:
    """A pod that repeats an unanswered decision: the row stays as it is, its attempts too."""
    async with pod(outbox) as one:
        (message,) = await events(one, outbox, "k")
        await one.parking.park(SINK, [Parked(message, 60.0, 3, "first")], [])
        await one.parking.park(SINK, [Parked(message, 0.0, 9, "second")], [message])
        assert outbox.execute("SELECT attempts, last_error FROM {parked}") == [(3, "first")]
        assert left(outbox) == 0


@pytest.mark.parametrize("fails", ["settle", "commit"])
async def test_a_decision_and_its_settle_are_one_transaction(outbox: Outbox, fails: str) -> None:
    """Either of them fails: nothing is parked or buried, and the source still delivers the event (rule 7)."""
    async with pod(outbox) as one:
        (message,) = await events(one, outbox, "k")
        outbox.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
            " $$BEGIN RAISE EXCEPTION 'no' USING ERRCODE = 'lock_not_available'; END$$"
        )
        if fails == "settle":
            outbox.execute("CREATE TRIGGER refuse BEFORE DELETE ON {outbox} FOR EACH ROW EXECUTE FUNCTION refuse()")
        for table in ("parked", "dead_letter") if fails == "commit" else ():
            outbox.execute(
                f"CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON {{{table}}} DEFERRABLE INITIALLY DEFERRED"
                " FOR EACH ROW EXECUTE FUNCTION refuse()"
            )
        for action in ("park", "bury"):
            with pytest.raises(SourceUnavailable, match="no"):
                await decide(one, action, message)
        assert outbox.execute("SELECT FROM {parked}") == outbox.execute("SELECT FROM {dead_letter}") == []
        assert left(outbox) == 1


async def test_only_the_first_row_of_a_key_is_due(outbox: Outbox) -> None:
    """Rows behind it have no time of their own, in one call and in the next one; rows without a key all have one."""
    async with pod(outbox) as one:
        messages = await events(one, outbox, "k", "k", "other", None, None, "k")
        await park(one, messages[:5])
        await park(one, messages[5:])
        parked = outbox.execute(NUMBERS)
        assert parked == [("k", True), ("k", False), ("other", True), (None, True), (None, True), ("k", False)]


async def test_a_head_that_comes_with_its_followers_leaves_complete(outbox: Outbox) -> None:
    """A run ends at its limit and says whether the key is through with it."""
    async with pod(outbox) as one:
        messages = await events(one, outbox, *["k"] * 5, None)
        leases = list({id(m.lease): m.lease for m in messages if m.lease}.values())
        await park(one, messages)
        runs = {run.messages[0].key: run for run in await one.parking.due(SINK, leases, 10, 3)}
        assert seqs(runs["k"].messages) == seqs(messages[:4])
        assert not runs["k"].complete
        assert seqs(runs[None].messages) == seqs(messages[5:])
        assert runs[None].complete
        runs = {run.messages[0].key: run for run in await one.parking.due(SINK, leases, 10, 4)}
        assert seqs(runs["k"].messages) == seqs(messages[:5])
        assert runs["k"].complete


async def test_what_is_left_of_a_run_is_promoted(outbox: Outbox) -> None:
    """After a partial run the next row is due at once; the key is held until the last one has gone (rule 5)."""
    async with pod(outbox) as one:
        messages = await events(one, outbox, *["k"] * 3)
        lease = messages[0].lease
        assert lease is not None
        await park(one, messages)
        (run,) = await one.parking.due(SINK, [lease], 10, 0)
        assert await one.parking.next_due(SINK, [lease]) == 0
        assert await one.parking.finish(SINK, [RunResult(lease, "k", list(run.messages))]) == {(lease.lane, "k")}
        (run,) = await one.parking.due(SINK, [lease], 10, 10)
        assert seqs(run.messages) == seqs(messages[1:])
        assert await one.parking.finish(SINK, [RunResult(lease, "k", list(run.messages))]) == set()
        assert await one.parking.held([lease]) == []
        assert await one.parking.next_due(SINK, [lease]) is None


async def test_a_failed_row_waits_its_time_and_what_is_behind_waits_for_it(outbox: Outbox) -> None:
    async with pod(outbox) as one:
        messages = await events(one, outbox, *["k"] * 3)
        lease = messages[0].lease
        assert lease is not None
        await park(one, messages)
        (run,) = await one.parking.due(SINK, [lease], 10, 10)
        first, second, _ = run.messages
        result = RunResult(lease, "k", [first], second, delay_seconds=60.0, attempts=4, error="refused")
        assert await one.parking.finish(SINK, [result]) == {(lease.lane, "k")}
        assert await one.parking.due(SINK, [lease], 10, 10) == []
        assert 50 < (await one.parking.next_due(SINK, [lease]) or 0) <= 60
        assert outbox.execute("SELECT attempts, last_error FROM {parked} ORDER BY number") == [
            (4, "refused"),
            (0, None),
        ]


@pytest.mark.parametrize("holds", [True, False])
async def test_a_dead_head_holds_its_key_if_it_is_told_to(outbox: Outbox, holds: bool) -> None:
    """It keeps its number. With `hold` the rows behind it wait for an operator; without, the next one is due at once."""
    async with pod(outbox) as one:
        messages = await events(one, outbox, "k", "k")
        lease = messages[0].lease
        assert lease is not None
        await park(one, messages)
        (run,) = await one.parking.due(SINK, [lease], 10, 10)
        dead = run.messages[0]
        burial = Burial(dead, SINK, "rejected", "poison", 1, holds=holds)
        assert await one.parking.finish(SINK, [RunResult(lease, "k", failed=dead, burial=burial)]) == {
            (lease.lane, "k")
        }
        assert outbox.execute("SELECT number FROM {dead_letter}") == [(dead.parked,)]
        runs = await one.parking.due(SINK, [lease], 10, 10)
        assert [seqs(run.messages) for run in runs] == ([] if holds else [seqs(messages[1:])])
        assert await one.parking.held([lease]) == [HeldKey(SINK, lease.lane, "k")]


async def test_a_key_behind_a_dead_letter_is_parked_without_a_time(outbox: Outbox) -> None:
    """Buried directly, with `hold`: a new owner finds the key held, and what it parks behind is not due."""
    async with pod(outbox) as one:
        first, second = await events(one, outbox, "k", "k")
        assert first.lease is not None
        await one.parking.bury([Burial(first, SINK, "rejected", "poison", 1, holds=True)], [first])
        assert await one.parking.held([first.lease]) == [HeldKey(SINK, first.lane, "k")]
        await park(one, [second])
        assert outbox.execute(NUMBERS) == [("k", False)]


async def test_another_sinks_rows_are_not_ours(outbox: Outbox) -> None:
    """The same event parked for two sinks is two deliveries; held, due and finish keep them apart."""
    async with pod(outbox, sinks=("main", "other")) as one:
        (message,) = await events(one, outbox, "k")
        assert message.lease is not None
        for sink in ("main", "other"):
            await one.parking.park(sink, [Parked(message)], [])
        (run,) = await one.parking.due("other", [message.lease], 10, 10)
        assert await one.parking.finish("other", [RunResult(message.lease, "k", list(run.messages))]) == set()
        assert await one.parking.held([message.lease]) == [HeldKey("main", message.lane, "k")]


# --- bounds ---------------------------------------------------------------------------------------


async def fill(outbox: Outbox, one: Pod, parked: Sequence[tuple[str | None, int]]) -> list[Lease]:
    """Park rows of so many bytes directly in the table, in order; heads where they are."""
    leases = await one.join()
    seen: set[str] = set()
    for seq, (key, size) in enumerate(parked, 1):
        lane = 0 if key is None else lane_of(outbox, key)
        head = "now()" if key is None or key not in seen else "NULL"
        quoted = "NULL" if key is None else f"'{key}'"
        seen.add(key or "")
        outbox.execute(
            "INSERT INTO {parked} (sink, seq, lane, id, topic, key, payload, created_at, stored_at, retry_at) VALUES"
            f" ('{SINK}', {seq}, {lane}, gen_random_uuid(), 't', {quoted},"
            f" convert_to(repeat('x', {size}), 'UTF8'), now(), now(), {head})"
        )
    return list(leases.values())


async def test_a_cycle_is_bounded_in_bytes(outbox: Outbox) -> None:
    """Ten heads of 4 MB: those that fit come, the others in the next cycle; payloads compress, memory does not."""
    async with pod(outbox) as one:
        leases = await fill(outbox, one, [(f"k{number}", 4 * MB) for number in range(10)])
        runs = await one.parking.due(SINK, leases, 64, 64)
        assert 1 <= len(runs) <= 5
        assert all(run.complete for run in runs)


async def test_a_head_comes_however_large_it_is(outbox: Outbox) -> None:
    async with pod(outbox) as one:
        leases = await fill(outbox, one, [("k", 20 * MB)])
        (run,) = await one.parking.due(SINK, leases, 64, 64)
        assert len(run.messages[0].payload or b"") == 20 * MB


async def test_large_followers_do_not_come_along_with_small_heads(outbox: Outbox) -> None:
    """Otherwise 64 small heads would bring 64 large rows: the run ends before them and is not complete."""
    async with pod(outbox) as one:
        leases = await fill(outbox, one, [(f"k{n}", size) for n in range(8) for size in (10, 4 * MB)])
        runs = await one.parking.due(SINK, leases, 64, 64)
        assert [len(run.messages) for run in runs] == [1] * 8
        assert not any(run.complete for run in runs)


async def test_a_run_is_bounded_in_bytes(outbox: Outbox) -> None:
    async with pod(outbox) as one:
        leases = await fill(outbox, one, [("k", 100 * 1024)] * 10)
        (run,) = await one.parking.due(SINK, leases, 64, 64)
        assert 2 <= len(run.messages) <= 3
        assert not run.complete


@pytest.mark.parametrize("keys", [1_000, 1_001])
async def test_more_held_keys_than_memory_lists_hold_the_whole_lane(outbox: Outbox, keys: int) -> None:
    """One entry without a key; one key less and they are listed. Rows without a key hold nobody."""
    async with pod(outbox) as one:
        lease = (await one.join())[7]
        outbox.execute(
            "INSERT INTO {parked} (sink, seq, lane, id, topic, key, created_at, stored_at)"
            f" SELECT '{SINK}', n, 7, gen_random_uuid(), 't', CASE WHEN n > 10 THEN 'k' || n % {keys} END, now(), now()"
            f" FROM generate_series(1, 3 * {keys} + 10) n"
        )
        held = await one.parking.held([lease])
        if keys > 1_000:
            assert held == [HeldKey(SINK, 7, None)]
        else:
            assert {entry.key for entry in held} == {f"k{n}" for n in range(keys)}


# --- odd texts ------------------------------------------------------------------------------------


async def test_what_a_broker_says_never_makes_a_decision_fail(outbox: Outbox) -> None:
    """NUL, lone surrogates and endless texts in errors and reasons (FIELD.md A1)."""
    awful = "a\0b\ud800c" + "x" * 100_000
    async with pod(outbox) as one:
        first, second, third = await events(one, outbox, "k", "k", "j")
        assert first.lease is not None
        await one.parking.park(SINK, [Parked(first, 0.0, 1, awful), Parked(second)], [first, second])
        await one.parking.bury([Burial(third, SINK, "rejected", awful, 1, holds=False)], [third])
        (run,) = await one.parking.due(SINK, [first.lease], 1, 0)
        failed = run.messages[0]
        await one.parking.finish(SINK, [RunResult(first.lease, "k", failed=failed, attempts=2, error=awful)])
        burial = Burial(failed, SINK, "attempts", awful, 3, holds=False)
        await one.parking.finish(SINK, [RunResult(first.lease, "k", failed=failed, burial=burial)])
        texts = [row[0] for row in outbox.execute("SELECT reason FROM {dead_letter} ORDER BY number")]
        assert [text[:5] for text in texts] == ["a\ufffdb?c"] * 2
        assert all(len(text) < 3_000 for text in texts)


async def test_parked_and_buried_payloads_keep_every_byte(outbox_factory: OutboxFactory) -> None:
    """Text of json that jsonb refuses, digits beyond float64, infinite moments: out of parking as they came."""
    outbox = outbox_factory()
    payload = r'{"s":"\u0000\ud800", "n":1234567890123456789012,"e":1e1000}'
    async with pod(outbox) as one:
        leases = await one.join()
        async with connected(outbox.app_dsn) as app:
            for moment in ("infinity", "-infinity", "0044-03-15 00:00:00+00 BC", "20231-01-01+00"):
                await app.execute(
                    outbox.names.format(
                        "INSERT INTO {outbox} (topic, key, payload, headers, created_at)"
                        f" VALUES ('t', 'k', $1, '{{\"n\": 1.50, \"x\": null}}', '{moment}')"
                    ),
                    payload,
                )
        messages = await one.read(list(leases.values()))
        await park(one, messages)
        (run,) = await one.parking.due(SINK, list(leases.values()), 10, 10)

        def content(message: Message) -> tuple[object, ...]:
            return message.payload, message.headers, message.created_at, message.stored_at, message.id, message.key

        assert [content(row) for row in run.messages] == [content(message) for message in messages]
        assert run.messages[0].payload == payload.encode()
