"""The application team's side: tills whose transactions change the shop's tables and insert an outbox row.

Each transaction takes its customer's row first, which is what makes "in order per key" mean something:
the customer's orders have one order in the database, and their numbers are counted under that lock.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any, Final

import asyncpg
from uuid6 import uuid7

from relay.client import enqueue

if TYPE_CHECKING:
    from relay.demo.tally import Tally

__all__ = ["ROLE", "SCHEMA", "TILLS", "TOPIC", "Shop"]

TILLS: Final = 8
TOPIC: Final = "orders"
ROLE: Final = "shop"
"""The application's role, that SCHEMA grants to."""
_CUSTOMERS: Final = 50  # as many as SCHEMA makes
_ROLLED_BACK: Final = 0.05
_MENU: Final = {"espresso": 220, "cappuccino": 340, "tea": 260, "croissant": 190, "cheesecake": 450}

SCHEMA: Final = """
CREATE TABLE customer (name text PRIMARY KEY, orders integer NOT NULL DEFAULT 0);
CREATE TABLE orders (
    customer text NOT NULL REFERENCES customer,
    number   integer NOT NULL,
    item     text NOT NULL,
    cents    integer NOT NULL,
    event    uuid NOT NULL UNIQUE,
    PRIMARY KEY (customer, number)
);
INSERT INTO customer (name) SELECT 'customer-' || n FROM generate_series(1, 50) n;
GRANT SELECT, UPDATE (orders) ON customer TO shop;
GRANT INSERT ON orders TO shop;
"""

_LOCK_CUSTOMER: Final = "UPDATE customer SET orders = orders + 1 WHERE name = $1 RETURNING orders"
_INSERT_ORDER: Final = "INSERT INTO orders (customer, number, item, cents, event) VALUES ($1, $2, $3, $4, $5)"


class Shop:
    """Sells until it is closed; every transaction that was begun is brought to its end."""

    def __init__(self, dsn: str, tally: Tally, *, orders_per_second: float) -> None:
        self._dsn, self._tally = dsn, tally
        self.orders_per_second = orders_per_second
        self._closed = asyncio.Event()

    def close(self) -> None:
        """No further orders; `run` returns when the last one is done."""
        self._closed.set()

    async def run(self) -> None:
        """All tills at work."""
        async with asyncio.TaskGroup() as group:
            for number in range(1, TILLS + 1):
                group.create_task(self._till(), name=f"till {number}")

    async def _till(self) -> None:
        connection = await asyncpg.connect(self._dsn)
        try:
            while not self._closed.is_set():
                began = time.monotonic()
                await self._sell(connection)
                pause = random.uniform(0, 2) * TILLS / self.orders_per_second
                await self._rest(began + pause - time.monotonic())
        finally:
            await connection.close(timeout=2)

    async def _sell(self, connection: asyncpg.Connection[Any]) -> None:
        customer = f"customer-{random.randint(1, _CUSTOMERS)}"
        item, cents = random.choice(list(_MENU.items()))
        transaction = connection.transaction()
        await transaction.start()
        number = await connection.fetchval(_LOCK_CUSTOMER, customer)
        event = uuid7()
        await connection.execute(_INSERT_ORDER, customer, number, item, cents, event)
        at = time.time()
        order = {"customer": customer, "number": number, "item": item, "cents": cents, "committed_at": at}
        await enqueue(connection, TOPIC, order, key=customer, id=event)
        if random.random() < _ROLLED_BACK:  # the customer leaves without paying
            await transaction.rollback()
            self._tally.roll_back(str(event))
        else:
            await transaction.commit()
            self._tally.commit(str(event), at)

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(seconds, 0)):
                await self._closed.wait()
        except TimeoutError:
            pass
