"""Each test of the contract suite fails for a sink that breaks its sentence, or it would prove nothing."""

from __future__ import annotations

import asyncio
import inspect
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from relay.errors import SinkUnavailable
from relay.sink import CONFIRMED, Outcome, Status, unavailable
from relay.sinks.memory import MemorySink
from relay.testing.sink_contract import SinkContract
from tests.contract.test_memory_sink import MemoryHarness

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.types import Message


class Forgets(MemorySink):
    """Confirms the last message without delivering it."""

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        return [*await super().publish(batch[:-1]), *([CONFIRMED] if batch else [])]


class Reverses(MemorySink):
    """Delivers a batch from its end."""

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        return list(reversed(await super().publish(list(reversed(batch)))))


class Repeats(MemorySink):
    """Delivers everything twice without a reason."""

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        await super().publish(batch)
        return await super().publish(batch)


class Overtakes(MemorySink):
    """Goes on with a key whose message failed."""

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        for message in batch:
            outcomes += await super().publish([message])
        return outcomes


class StopsAtTheFirstFailure(MemorySink):
    """Lets a bad message hurt other keys."""

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        outcomes = list(await super().publish(batch))
        bad = next((n for n, outcome in enumerate(outcomes) if outcome.status is not Status.CONFIRMED), len(outcomes))
        return outcomes[:bad] + [unavailable("batch failed")] * (len(outcomes) - bad)


class CriesOutage(MemorySink):
    """Calls every failure an outage."""

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        return [
            outcome if outcome is CONFIRMED else replace(outcome, status=Status.UNAVAILABLE, sink_down=True)
            for outcome in await super().publish(batch)
        ]


class ConfirmsTheUnknown(MemorySink):
    """Takes silence for consent."""

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        return [CONFIRMED for _ in await super().publish(batch)]


class SendsLate(MemorySink):
    """Gives up, and delivers when the broker is there again."""

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        if not self._open_gate.is_set():
            self._late = asyncio.ensure_future(self._deliver_late(batch))
        return await super().publish(batch)

    async def _deliver_late(self, batch: Sequence[Message]) -> None:
        await self._open_gate.wait()
        self._deliver(batch)


class Leaks(MemorySink):
    """Opens something for each attempt."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.leaked: list[int] = []

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        self.leaked.append(os.dup(0))
        return await super().publish(batch)


class ClosesOnce(MemorySink):
    """Fails when it is closed again."""

    closed = False

    async def close(self) -> None:
        assert not self.closed
        self.closed = True


class Flushes(MemorySink):
    """Waits for the broker when it is closed."""

    async def close(self) -> None:
        await asyncio.sleep(3 if self._swallow else 0)


class NeedsItsBroker(MemorySink):
    """Cannot be opened without it."""

    async def open(self) -> None:
        await self.ping()


class ConfusesNothingAndNull(MemorySink):
    """Sends an empty payload for a tombstone."""

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        for message in batch:
            message.payload = message.payload or b""
        return await super().publish(batch)


class Talks(MemorySink):
    """Shows the payload in its reason."""

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        outcomes = await super().publish(batch)
        return [replace(o, reason=f"{o.reason} {m.payload!r}") for m, o in zip(batch, outcomes, strict=True)]


class KeepsItsPermit(MemorySink):
    """Is never usable again after a cancellation."""

    free = True

    async def publish(self, batch: Sequence[Message]) -> Sequence[Outcome]:
        if not self.free:
            return [unavailable("busy", sink_down=True)] * len(batch)
        self.free = False
        await asyncio.sleep(0)
        self.free = True
        return await super().publish(batch)


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (Forgets, "each_message_is_confirmed_and_readable"),
        (Forgets, "a_large_batch"),
        (Reverses, "keys_keep_their_order_within_and_across_batches"),
        (Reverses, "concurrent_batches_of_different_keys"),
        (Reverses, "a_batch_may_have_several_destinations"),
        (Repeats, "each_message_is_confirmed_and_readable"),
        (Repeats, "concurrent_batches_of_different_keys"),
        (Overtakes, "a_rejected_message_hurts_only_its_key"),
        (Overtakes, "a_key_does_not_overtake_itself_over_two_destinations"),
        (StopsAtTheFirstFailure, "a_rejected_message_hurts_only_its_key"),
        (StopsAtTheFirstFailure, "a_destination_with_a_fault_of_its_own_hurts_only_itself"),
        (CriesOutage, "a_destination_with_a_fault_of_its_own_hurts_only_itself"),
        (CriesOutage, "a_rejected_message_hurts_only_its_key"),
        (ConfirmsTheUnknown, "without_an_answer_nothing_is_confirmed"),
        (ConfirmsTheUnknown, "it_opens_without_a_broker_and_recovers"),
        (SendsLate, "after_a_timeout_unsent_bytes_are_never_sent"),
        (SendsLate, "after_a_cancellation_unsent_bytes_are_never_sent"),
        (Leaks, "failed_attempts_leave_no_descriptors"),
        (ClosesOnce, "close_is_idempotent"),
        (Flushes, "close_is_quick_with_the_broker_gone"),
        (NeedsItsBroker, "it_opens_without_a_broker_and_recovers"),
        (ConfusesNothingAndNull, "a_tombstone_an_empty_payload_and_json_null_differ"),
        (Talks, "reasons_tell_the_cause_and_no_secrets"),
        (KeepsItsPermit, "a_cancelled_publish_leaves_a_sink_that_works"),
        (MemorySink, "nothing_of_a_batch_is_held_afterwards"),
    ],
)
async def test_a_broken_sink_is_caught(
    broken: type[MemorySink], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the test that is about what it breaks."""
    monkeypatch.setattr("relay.testing.faults._RECOVERY_SECONDS_MAX", 1.0)
    harness = MemoryHarness(broken)
    harness.keeps_messages = False
    sink = harness.make()
    assert isinstance(sink, broken)
    test = getattr(SinkContract(), f"test_{sentence}")
    fixtures = {"harness": harness, "breakable": harness, "sink": sink}
    asked_for = {name: fixtures[name] for name in inspect.signature(test).parameters}
    try:
        with pytest.raises((AssertionError, TimeoutError, SinkUnavailable, pytest.fail.Exception)):
            await test(**asked_for)
    finally:
        for descriptor in getattr(sink, "leaked", []):
            os.close(descriptor)
