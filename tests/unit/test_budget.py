"""The one bound of the pipeline: events and bytes, and room only when a read is worth it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from relay.pipeline.budget import Budget
from relay.testing.messages import make_message

if TYPE_CHECKING:
    from relay.types import Message


def messages(count: int, size: int = 10) -> list[Message]:
    made = [make_message("t") for _ in range(count)]
    for message in made:
        message.size = size
    return made


async def waiting(budget: Budget) -> asyncio.Task[tuple[int, int]]:
    task = asyncio.create_task(budget.room())
    for _ in range(3):
        await asyncio.sleep(0)
    return task


async def test_room_is_what_is_left() -> None:
    budget = Budget(100, 1_000)
    assert await budget.room() == (100, 1_000)
    budget.charge(messages(20))
    assert await budget.room() == (80, 800)


async def test_no_room_for_less_than_a_quarter_of_the_events() -> None:
    """One freed event must not cause a read of one row."""
    budget = Budget(100, 1_000_000)
    held = messages(80)
    budget.charge(held)
    task = await waiting(budget)
    budget.release(held[:4])
    await asyncio.sleep(0)
    assert not task.done()
    budget.release(held[4:5])
    assert (await task)[0] == 25


async def test_no_room_for_less_than_a_quarter_of_the_bytes() -> None:
    budget = Budget(1_000, 1_000)
    held = messages(80)
    budget.charge(held)
    task = await waiting(budget)
    budget.release(held[:5])
    assert (await task)[1] == 250


async def test_an_event_larger_than_everything_passes_alone() -> None:
    """While it is in flight nothing else comes, and once it is gone there is room again."""
    budget = Budget(100, 1_000)
    giant = messages(1, 50_000)
    budget.charge(giant)
    task = await waiting(budget)
    assert not task.done()
    budget.release(giant)
    assert await task == (100, 1_000)


async def test_empty_waits_for_the_last_one() -> None:
    budget = Budget(100, 1_000)
    held = messages(2)
    budget.charge(held)
    empty = asyncio.create_task(budget.empty())
    budget.release(held[:1])
    await asyncio.sleep(0)
    assert not empty.done()
    budget.release(held[1:])
    await empty
    assert (budget.events, budget.bytes) == (0, 0)
