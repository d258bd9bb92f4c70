"""The contract of a sink whose broker fails: unknown is never confirmed, nothing is lost, nothing overtakes."""

from __future__ import annotations

import asyncio
import os
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Final

import pytest
import pytest_asyncio

from relay.errors import InvalidConfig, PermissionMissing, RelayError, SinkUnavailable
from relay.sink import Outcome, Sink, Status
from relay.testing.delivery import assert_confirmed, ids, statuses
from relay.testing.messages import make_message, make_messages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from relay.testing.harness import Harness
    from relay.types import Message

__all__ = ["FaultContract"]

_CLOSE_SECONDS_MAX: Final = 2.5
_RECOVERY_SECONDS_MAX: Final = 20.0
_FAILED_ATTEMPTS: Final = 50
_FD_SLACK: Final = 3
_STALLED_BYTES: Final = 40_000_000
"""More than the socket buffers on the way hold, so that the end of the batch is still in the sink."""


@pytest.mark.asyncio
class FaultContract:
    """Half of the suite; see `relay.testing.sink_contract`."""

    @pytest_asyncio.fixture
    async def breakable(self, harness: Harness) -> AsyncIterator[Harness]:
        """The harness, if its broker can be broken; healed afterwards, so that servers stop cleanly."""
        if not harness.can_break:
            pytest.skip("the broker of this sink cannot be broken")
        yield harness
        await harness.heal()

    async def test_it_opens_without_a_broker_and_recovers(self, breakable: Harness) -> None:
        """The relay starts before its broker: not ready, then ready by itself."""
        destination = await breakable.destination()
        await breakable.cut()
        sink = breakable.make()
        await sink.open()
        try:
            with pytest.raises(SinkUnavailable):
                await sink.ping()
            message = make_message(destination)
            assert _is_down(await sink.publish([message]))
            await breakable.heal()
            await _publish_until_confirmed(sink, [message])
            await sink.ping()
            assert ids(await breakable.read(destination, 1)) == [message.id]
        finally:
            await sink.close()

    async def test_a_cut_while_publishing_loses_nothing_and_keeps_order(self, breakable: Harness, sink: Sink) -> None:
        """Batches go on through cuts in their middle; first deliveries stay complete and in order."""
        destination = await breakable.destination()
        messages = make_messages(destination, 2_000, keys=("a", "b", "c"))
        progress, failed = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            for start in range(0, len(messages), 20):
                batch = messages[start : start + 20]
                while batch:
                    outcomes = await sink.publish(batch)
                    batch = _unconfirmed(batch, outcomes)
                    if batch:
                        failed.set()
                        await asyncio.sleep(0.01)
                progress.set()

        task = asyncio.create_task(work())
        try:
            for _ in range(3):
                progress.clear()
                await _first(progress, task)
                failed.clear()
                await breakable.cut()
                await _first(failed, task)
                await breakable.heal()
            await asyncio.wait_for(task, _RECOVERY_SECONDS_MAX)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        received = await breakable.read(destination, len(messages))
        for key in ("a", "b", "c"):
            assert list(dict.fromkeys(ids(received, key))) == ids(messages, key)

    async def test_without_an_answer_nothing_is_confirmed(self, breakable: Harness, sink: Sink) -> None:
        """Swallowed replies mean unknown: `unavailable` within the deadline, and a repeat later (FIELD.md C3, E1)."""
        destination = await breakable.destination()
        warm = make_message(destination)
        assert_confirmed(await sink.publish([warm]), 1)
        await breakable.swallow_replies()
        batch = make_messages(destination, 30)
        started = monotonic()
        outcomes = await sink.publish(batch)
        assert monotonic() - started < breakable.deadline_seconds + 3
        assert _is_down(outcomes)
        await breakable.heal()
        await _publish_until_confirmed(sink, batch)
        received = await breakable.read(destination, 31)
        for key in ("a", "b", "c"):
            assert list(dict.fromkeys(ids(received, key))) == ids(batch, key)

    async def test_after_a_timeout_unsent_bytes_are_never_sent(self, breakable: Harness, sink: Sink) -> None:
        """What was still in the sink when it gave up stays unsent, also after the broker reads again."""
        destination, probe = await breakable.destination(), await breakable.destination()
        batch = _stalled_batch(breakable, destination)
        assert_confirmed(await sink.publish([make_message(probe)]), 1)
        await breakable.stall()
        assert _is_down(await sink.publish(batch))
        await breakable.heal()
        await self._assert_the_end_never_arrives(breakable, sink, batch, probe)

    async def test_after_a_cancellation_unsent_bytes_are_never_sent(self, breakable: Harness, sink: Sink) -> None:
        """A cancelled `publish` raises CancelledError at once, sends nothing more, and the sink goes on."""
        destination, probe = await breakable.destination(), await breakable.destination()
        batch = _stalled_batch(breakable, destination)
        assert_confirmed(await sink.publish([make_message(probe)]), 1)
        await breakable.stall()
        task = asyncio.create_task(_publish(sink, batch))
        # Long enough to be inside `publish`, well below its deadline: that it still runs is asserted.
        await asyncio.wait([task], timeout=breakable.deadline_seconds / 4)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, _CLOSE_SECONDS_MAX)
        await breakable.heal()
        await self._assert_the_end_never_arrives(breakable, sink, batch, probe)

    async def _assert_the_end_never_arrives(
        self, harness: Harness, sink: Sink, batch: Sequence[Message], probe: str
    ) -> None:
        """The sink works again, the bytes that were held have passed, and the end of the batch is not among them."""
        markers = [make_message(probe, key=f"marker{n}") for n in range(3)]
        for marker in markers:
            await _publish_until_confirmed(sink, [marker])
        await harness.held_bytes_passed()
        received = await harness.read(probe, 4)
        assert set(ids(markers)) <= set(ids(received))
        assert batch[-1].id not in ids(await harness.read(batch[0].destination, 0))

    async def test_a_cancelled_publish_leaves_a_sink_that_works(self, harness: Harness, sink: Sink) -> None:
        """Cancelled at each of its first awaits, it publishes the same batch again, in order."""
        destination = await harness.destination()
        batch = make_messages(destination, 30)
        for steps in range(6):
            task = asyncio.create_task(_publish(sink, batch))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await _publish_until_confirmed(sink, batch)
        received = await harness.read(destination, 30)
        for key in ("a", "b", "c"):
            assert list(dict.fromkeys(ids(received, key))) == ids(batch, key)

    async def test_close_is_idempotent(self, harness: Harness) -> None:
        """Before `open`, after it, and twice."""
        sink = harness.make()
        await sink.close()
        sink = harness.make()
        await sink.open()
        destination = await harness.destination()
        assert_confirmed(await sink.publish([make_message(destination)]), 1)
        await sink.close()
        await sink.close()

    async def test_close_is_quick_with_the_broker_gone(self, breakable: Harness, sink: Sink) -> None:
        """SIGTERM during an outage: `close` flushes nothing and waits for nobody (FIELD.md C1)."""
        destination = await breakable.destination()
        assert_confirmed(await sink.publish([make_message(destination)]), 1)
        await breakable.swallow_replies()
        await _assert_closes_quickly(sink)

    async def test_close_ends_a_publish_that_hangs(self, breakable: Harness, sink: Sink) -> None:
        """A publish in flight returns (unavailable) or is cancelled by its caller; `close` does not hang on it."""
        destination = await breakable.destination()
        assert_confirmed(await sink.publish([make_message(destination)]), 1)
        await breakable.swallow_replies()
        task = asyncio.create_task(_publish(sink, make_messages(destination, 3)))
        await asyncio.wait([task], timeout=0.2)
        await _assert_closes_quickly(sink)
        outcomes = await asyncio.wait_for(task, breakable.deadline_seconds + 3)
        assert Status.CONFIRMED not in statuses(outcomes)

    async def test_failed_attempts_leave_no_descriptors(self, breakable: Harness, sink: Sink) -> None:
        """Fifty attempts without a broker leak no socket (FIELD.md C1)."""
        destination = await breakable.destination()
        assert_confirmed(await sink.publish([make_message(destination)]), 1)
        await breakable.cut()
        assert _is_down(await sink.publish([make_message(destination)]))
        before = _open_descriptors()
        for _ in range(_FAILED_ATTEMPTS):
            assert _is_down(await sink.publish([make_message(destination)]))
        assert _open_descriptors() <= before + _FD_SLACK

    async def test_reasons_tell_the_cause_and_no_secrets(self, breakable: Harness, sink: Sink) -> None:
        """An outage has a reason; it shows neither a password nor a payload (FIELD.md F9)."""
        destination = await breakable.destination()
        await breakable.cut()
        outcomes = await sink.publish([make_message(destination, payload=b'"pay-load-secret"')])
        assert outcomes[0].reason
        _assert_no_secrets(outcomes[0].reason, (*breakable.secrets, "pay-load-secret"))

    async def test_a_wrong_password_is_an_operators_task(self, harness: Harness) -> None:
        """Events wait and an operator is asked; nothing is dead-lettered for it, nothing secret is shown (D8)."""
        sink = harness.make_with_wrong_password()
        if sink is None:
            pytest.skip("this sink has no credentials")
        destination = await harness.destination()
        await sink.open()
        try:
            [outcome] = await sink.publish([make_message(destination)])
            assert (outcome.status, outcome.sink_down, outcome.misconfigured) == (Status.UNAVAILABLE, True, True)
            with pytest.raises((PermissionMissing, InvalidConfig)) as caught:
                await sink.ping()
            _assert_no_secrets(f"{outcome.reason} {_chain(caught.value)}", harness.secrets)
        finally:
            await sink.close()


async def _publish(sink: Sink, batch: Sequence[Message]) -> Sequence[Outcome]:
    return await sink.publish(batch)


def _is_down(outcomes: Sequence[Outcome]) -> bool:
    """No message was confirmed, and the sink says that it is down for all of them."""
    assert Status.CONFIRMED not in statuses(outcomes)
    assert outcomes[0].status is Status.UNAVAILABLE
    return all(o.sink_down for o in outcomes if o.status is Status.UNAVAILABLE)


def _unconfirmed(batch: Sequence[Message], outcomes: Sequence[Outcome]) -> list[Message]:
    assert len(outcomes) == len(batch)
    assert Status.REJECTED not in statuses(outcomes)
    return [m for m, outcome in zip(batch, outcomes, strict=True) if outcome.status is not Status.CONFIRMED]


async def _publish_until_confirmed(sink: Sink, batch: Sequence[Message]) -> None:
    """Retry as the pipeline does, with a pause, for as long as a sink may need to recover."""
    async with asyncio.timeout(_RECOVERY_SECONDS_MAX):
        for attempt in count():
            batch = _unconfirmed(batch, await sink.publish(batch))
            if not batch:
                return
            await asyncio.sleep(min(0.02 * 2**attempt, 0.5))


async def _first(event: asyncio.Event, task: asyncio.Task[None]) -> None:
    """Wait for an event, or for the end of the task that should have set it."""
    waiter = asyncio.ensure_future(event.wait())
    await asyncio.wait([waiter, task], return_when=asyncio.FIRST_COMPLETED, timeout=_RECOVERY_SECONDS_MAX)
    waiter.cancel()


def _stalled_batch(harness: Harness, destination: str) -> list[Message]:
    payload = b"x" * harness.payload_bytes_max
    return make_messages(destination, _STALLED_BYTES // len(payload), keys=("stalled",), payload=payload)


async def _assert_closes_quickly(sink: Sink) -> None:
    started = monotonic()
    await sink.close()
    assert monotonic() - started < _CLOSE_SECONDS_MAX


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counted, not used as paths


def _chain(error: BaseException | None) -> str:
    """What a traceback would show: the error, its hint, and whatever caused it."""
    texts = []
    while error is not None:
        texts.append(f"{error!r} {getattr(error, 'hint', '')}" if isinstance(error, RelayError) else repr(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return " ".join(texts)


def _assert_no_secrets(text: str, secrets: Sequence[str]) -> None:
    assert [secret for secret in secrets if secret in text] == []
