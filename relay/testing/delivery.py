"""The contract of `publish` while the broker is well: what arrives, in which order, and what a bad message costs."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import pytest
import pytest_asyncio

from relay.sink import Outcome, Sink, Status
from relay.testing.messages import CREATED_AT, HEADERS, PAYLOADS, make_message, make_messages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from relay.testing.harness import Harness, Received
    from relay.types import Message

__all__ = ["DeliveryContract", "assert_confirmed", "ids", "statuses"]

_LARGE_BATCH: Final = 10_000
_HELD_BACK: Final = {Status.DEFERRED, Status.UNAVAILABLE}


def statuses(outcomes: Iterable[Outcome]) -> list[Status]:
    """The bare statuses, which compare well in an assertion."""
    return [outcome.status for outcome in outcomes]


def assert_confirmed(outcomes: Sequence[Outcome], count: int) -> None:
    """Each of `count` messages was confirmed; otherwise show the outcomes that were not."""
    assert len(outcomes) == count
    assert [outcome for outcome in outcomes if outcome.status is not Status.CONFIRMED] == []


def ids(messages: Iterable[Message | Received], key: str | None = None) -> list[str]:
    """Event ids in order, of one key if it is given."""
    return [message.id for message in messages if key is None or message.key == key]


def _by_key(messages: Iterable[Message | Received]) -> dict[str | None, list[str]]:
    order: dict[str | None, list[str]] = defaultdict(list)
    for message in messages:
        order[message.key].append(message.id)
    return dict(order)


@pytest.mark.asyncio
class DeliveryContract:
    """Half of the suite; see `relay.testing.sink_contract`."""

    @pytest_asyncio.fixture
    async def sink(self, harness: Harness) -> AsyncIterator[Sink]:
        """An open sink."""
        sink = harness.make()
        await sink.open()
        yield sink
        await sink.close()

    async def test_it_is_a_sink(self, sink: Sink) -> None:
        """The object has the contract's methods, and takes at least one batch at a time."""
        assert isinstance(sink, Sink)
        assert sink.concurrency >= 1

    async def test_ping_succeeds_while_the_broker_is_well(self, sink: Sink) -> None:
        """`ping` returns, more than once."""
        await sink.ping()
        await sink.ping()

    async def test_an_empty_batch_has_no_outcomes(self, sink: Sink) -> None:
        """Nothing in, nothing out."""
        assert list(await sink.publish([])) == []

    async def test_each_message_is_confirmed_and_readable(self, harness: Harness, sink: Sink) -> None:
        """A confirmed message is there for an independent consumer, with id, key, payload, headers and time."""
        destination = await harness.destination()
        batch = make_messages(destination, 9)
        assert_confirmed(await sink.publish(batch), 9)
        received = await harness.read(destination, 9)
        assert _sorted(received) == _sorted(harness.expected(message) for message in batch)

    @pytest.mark.parametrize("kind", PAYLOADS)
    async def test_a_payload_arrives_byte_for_byte(self, harness: Harness, sink: Sink, kind: str) -> None:
        """No parsing, no normalising, no re-encoding (FIELD.md A1)."""
        await _round_trip(harness, sink, payload=PAYLOADS[kind])

    @pytest.mark.parametrize("kind", HEADERS)
    async def test_headers_arrive_by_the_documented_rule(self, harness: Harness, sink: Sink, kind: str) -> None:
        """Strings as they are, null as null, everything else as its own digits or JSON text (FIELD.md A9)."""
        await _round_trip(harness, sink, headers=HEADERS[kind])

    @pytest.mark.parametrize("kind", CREATED_AT)
    async def test_created_at_survives(self, harness: Harness, sink: Sink, kind: str) -> None:
        """Infinity, BC and years after 9999 are published like any other (FIELD.md A5)."""
        await _round_trip(harness, sink, created_at=CREATED_AT[kind])

    @pytest.mark.parametrize("key", [None, "", "plain", "ключ 🦊", "with space\r\nand line", "k" * 500])
    async def test_a_key_survives(self, harness: Harness, sink: Sink, key: str | None) -> None:
        """No key, an empty key and a long or odd one are different things."""
        await _round_trip(harness, sink, key=key)

    async def test_a_tombstone_an_empty_payload_and_json_null_differ(self, harness: Harness, sink: Sink) -> None:
        """Three inputs, three results (FIELD.md A3)."""
        destination = await harness.destination()
        batch = [make_message(destination, payload=payload) for payload in (None, b"", b"null")]
        assert_confirmed(await sink.publish(batch), 3)
        received = await harness.read(destination, 3)
        assert received == [harness.expected(message) for message in batch]
        assert len({message.payload for message in received}) == len(batch)

    async def test_keys_keep_their_order_within_and_across_batches(self, harness: Harness, sink: Sink) -> None:
        """First deliveries of a key come in the order they were published in."""
        destination = await harness.destination()
        batch = make_messages(destination, 300, keys=("a", "b", "c", "d", "e"))
        for start in range(0, 300, 60):
            assert_confirmed(await sink.publish(batch[start : start + 60]), 60)
        assert _by_key(await harness.read(destination, 300)) == _by_key(batch)

    async def test_concurrent_batches_of_different_keys(self, harness: Harness, sink: Sink) -> None:
        """`concurrency` batches at once: all arrive once, each key in order."""
        destination = await harness.destination()
        workers = [make_messages(destination, 200, keys=(f"a{n}", f"b{n}")) for n in range(sink.concurrency)]

        async def work(messages: list[Message]) -> None:
            for start in range(0, 200, 25):
                assert_confirmed(await sink.publish(messages[start : start + 25]), 25)

        await asyncio.gather(*(work(messages) for messages in workers))
        total = 200 * sink.concurrency
        received = await harness.read(destination, total)
        assert len(received) == total
        assert _by_key(received) == _by_key(message for messages in workers for message in messages)

    async def test_a_batch_may_have_several_destinations(self, harness: Harness, sink: Sink) -> None:
        """Messages reach their own destination, in the order of their key."""
        first, second = await harness.destination(), await harness.destination()
        batch = [make_message(first if n % 3 else second, key=f"k{n % 2}") for n in range(30)]
        assert_confirmed(await sink.publish(batch), 30)
        for destination in (first, second):
            sent = [message for message in batch if message.destination == destination]
            assert _by_key(await harness.read(destination, len(sent))) == _by_key(sent)

    async def test_a_large_batch(self, harness: Harness, sink: Sink) -> None:
        """10,000 messages in one call: all confirmed, all there, in order."""
        destination = await harness.destination()
        batch = make_messages(destination, _LARGE_BATCH, keys=[f"k{n}" for n in range(100)])
        assert_confirmed(await sink.publish(batch), _LARGE_BATCH)
        received = await harness.read(destination, _LARGE_BATCH)
        assert len(received) == _LARGE_BATCH
        assert _by_key(received) == _by_key(batch)

    async def test_nothing_of_a_batch_is_held_afterwards(self, harness: Harness, sink: Sink) -> None:
        """In-flight memory is the pipeline's to count, so the sink keeps none (DESIGN.md 2.6)."""
        if harness.keeps_messages:
            pytest.skip("this sink keeps messages on purpose")
        destination = await harness.destination()
        batch = make_messages(destination, 3, payload=bytes(bytearray(50_000)))
        before = _references(batch)
        assert_confirmed(await sink.publish(batch), 3)
        assert _references(batch) == before

    async def test_a_rejected_message_hurts_only_its_key(self, harness: Harness, sink: Sink) -> None:
        """It says why; later ones of its key wait and are not delivered; everything else is."""
        destination = await harness.destination()
        bad = harness.rejected_message(destination, "bad")
        if bad is None:
            pytest.skip("this sink rejects nothing")
        before, after = make_message(destination, key="bad"), make_message(destination, key="bad")
        others = make_messages(destination, 4, keys=("good", None))
        batch = [others[0], before, others[1], bad, others[2], after, others[3]]
        outcomes = await sink.publish(batch)
        assert statuses(outcomes)[:5] == [Status.CONFIRMED] * 3 + [Status.REJECTED, Status.CONFIRMED]
        assert outcomes[3].reason
        assert outcomes[5].status in _HELD_BACK
        assert not outcomes[5].sink_down
        assert outcomes[6].status is Status.CONFIRMED
        received = await harness.read(destination, 5)
        assert sorted(ids(received)) == sorted(ids([*others, before]))

    async def test_after_a_rejected_message_the_next_batch_succeeds(self, harness: Harness, sink: Sink) -> None:
        """One rejected message leaves no trace in the sink (PROTOCOLS.md 19)."""
        destination = await harness.destination()
        bad = harness.rejected_message(destination, "bad")
        if bad is None:
            pytest.skip("this sink rejects nothing")
        assert statuses(await sink.publish([bad])) == [Status.REJECTED]
        batch = make_messages(destination, 10, keys=("bad", "good"))
        assert_confirmed(await sink.publish(batch), 10)
        assert _by_key(await harness.read(destination, 10)) == _by_key(batch)

    async def test_a_destination_with_a_fault_of_its_own_hurts_only_itself(self, harness: Harness, sink: Sink) -> None:
        """Its messages are tried again without an alarm about the whole sink; others are delivered (FIELD.md E3)."""
        faulty, well = await harness.faulty_destination(), await harness.destination()
        if faulty is None:
            pytest.skip("a destination of this sink has no faults of its own")
        bad = make_messages(faulty, 3, keys=("x", "y", None))
        good = make_messages(well, 3)
        outcomes = await sink.publish([bad[0], good[0], bad[1], good[1], bad[2], good[2]])
        assert statuses(outcomes[1::2]) == [Status.CONFIRMED] * 3
        assert {outcome.status for outcome in outcomes[0::2]} <= {Status.UNAVAILABLE, Status.REJECTED}
        assert not any(outcome.sink_down for outcome in outcomes)
        assert all(outcome.reason for outcome in outcomes[0::2])
        assert sorted(ids(await harness.read(well, 3))) == sorted(ids(good))

    async def test_a_key_does_not_overtake_itself_over_two_destinations(self, harness: Harness, sink: Sink) -> None:
        """When a key's message fails at one destination, its later ones wait even if theirs is well."""
        faulty, well = await harness.faulty_destination(), await harness.destination()
        if faulty is None:
            pytest.skip("a destination of this sink has no faults of its own")
        first, failing = make_message(well, key="moving"), make_message(faulty, key="moving")
        follower, other = make_message(well, key="moving"), make_message(well, key="other")
        outcomes = await sink.publish([first, failing, follower, other])
        assert [outcomes[0].status, outcomes[3].status] == [Status.CONFIRMED] * 2
        assert outcomes[1].status in {Status.UNAVAILABLE, Status.REJECTED}
        assert outcomes[2].status in _HELD_BACK
        assert sorted(ids(await harness.read(well, 2))) == sorted(ids([first, other]))


def _references(batch: list[Message]) -> list[int]:
    gc.collect()
    return [sys.getrefcount(thing) for thing in (batch, batch[0], batch[0].payload)]


async def _round_trip(
    harness: Harness,
    sink: Sink,
    *,
    key: str | None = "key",
    payload: bytes | None = b"{}",
    headers: str | None = None,
    created_at: int = 0,
) -> None:
    destination = await harness.destination()
    message = make_message(destination, key=key, payload=payload, headers=headers, created_at=created_at)
    assert_confirmed(await sink.publish([message]), 1)
    assert await harness.read(destination, 1) == [harness.expected(message)]


def _sorted(received: Iterable[Received]) -> list[Received]:
    return sorted(received, key=lambda message: message.id)
