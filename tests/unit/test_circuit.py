"""An outage costs one attempt for each pause, whatever the number of workers."""

from __future__ import annotations

import asyncio
import random

import pytest

from relay.pipeline.circuit import Admission, Circuit
from relay.retry import Backoff


@pytest.fixture
def circuit() -> Circuit:
    """Pauses of 10 to 20 ms, doubling."""
    return Circuit(Backoff(0.02, 1.0, random.Random(1)))


async def test_a_closed_circuit_admits_everybody(circuit: Circuit) -> None:
    assert {await circuit.admit() for _ in range(5)} == {Admission.GO}
    assert not await circuit.succeed()
    assert circuit.pause() == 0


async def test_one_of_many_workers_probes(circuit: Circuit) -> None:
    """The others wait for its answer; when it is good they all go."""
    assert await circuit.fail("down", misconfigured=False)
    workers = [asyncio.create_task(circuit.admit()) for _ in range(8)]
    done, pending = await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result() for task in done] == [Admission.PROBE]
    assert len(pending) == 7
    assert await circuit.succeed()
    assert {await task for task in pending} == {Admission.GO}


async def test_pauses_grow_only_with_probes(circuit: Circuit) -> None:
    """Eight batches that were on their way when the circuit opened are one failure."""
    assert await circuit.fail("down", misconfigured=False)
    first = circuit._retry_at
    for _ in range(7):
        assert not await circuit.fail("down too", misconfigured=False)
    assert circuit._retry_at == first
    assert circuit.reason == "down"
    assert await circuit.admit() is Admission.PROBE
    assert not await circuit.fail("still down", misconfigured=True)
    assert (circuit.reason, circuit.misconfigured) == ("still down", True)
    assert circuit.pause() > 0.01
    assert circuit._failures == 2


async def test_an_outage_is_as_old_as_its_beginning(circuit: Circuit) -> None:
    await circuit.fail("down", misconfigured=False)
    since = circuit.down_since
    assert await circuit.admit() is Admission.PROBE
    await circuit.fail("down", misconfigured=False)
    assert circuit.down_since == since
    await circuit.succeed()
    assert circuit.down_since is None
    assert not circuit.is_open
    assert await circuit.fail("again", misconfigured=False)
    assert circuit._failures == 1


async def test_a_worker_gives_up_at_its_moment(circuit: Circuit) -> None:
    """Instead of waiting for a sink that stays down, what it has may be parked."""
    await circuit.fail("down", misconfigured=False)
    circuit._retry_at += 3600
    assert await circuit.admit(asyncio.get_running_loop().time() + 0.01) is Admission.GIVE_UP


async def test_a_worker_may_give_up_while_another_one_probes(circuit: Circuit) -> None:
    await circuit.fail("down", misconfigured=False)
    assert await circuit.admit() is Admission.PROBE
    assert await circuit.admit(asyncio.get_running_loop().time() + 0.01) is Admission.GIVE_UP


async def test_an_abandoned_probe_is_somebody_elses(circuit: Circuit) -> None:
    """A probe that was cancelled, or had nothing left to send, says nothing about the sink."""
    await circuit.fail("down", misconfigured=False)
    assert await circuit.admit() is Admission.PROBE
    waiting = asyncio.create_task(circuit.admit())
    await asyncio.sleep(0)
    await circuit.abandon()
    assert await asyncio.wait_for(waiting, 5) is Admission.PROBE
    assert circuit.is_open


async def test_nobody_need_ask_while_a_probe_is_on_its_way(circuit: Circuit) -> None:
    """Its answer may take as long as the sink's deadline; until then there is a pause, so that nobody spins."""
    await circuit.fail("down", misconfigured=False)
    assert await circuit.admit() is Admission.PROBE
    assert circuit.pause() > 0
    await circuit.abandon()
    assert circuit.pause() == 0
