"""Enqueue an event from Python, inside the transaction that makes it true.

For applications: needs only the rights of the application role, and imports nothing of the relay but its
errors. One function for asyncpg and psycopg's `AsyncConnection`, its `_sync` twin for psycopg's `Connection`.
How and why: docs/enqueue.md.
"""

from __future__ import annotations

from relay.client.enqueue import enqueue, enqueue_many, enqueue_many_sync, enqueue_sync
from relay.client.event import Event, InvalidEvent
from relay.client.transaction import NotInTransaction

__all__ = [
    "Event",
    "InvalidEvent",
    "NotInTransaction",
    "enqueue",
    "enqueue_many",
    "enqueue_many_sync",
    "enqueue_sync",
]
