"""What travels through the relay: one `Message` for each event and sink.

Plain data without behaviour that knows a broker or a database. Attributes of a `Message` are set
once by the source (and `destination` by the router) and are read-only from then on; the class is
not frozen because creating frozen instances costs three times as much on the hottest path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["LANES", "TIMESTAMP_INFINITY", "TIMESTAMP_MINUS_INFINITY", "Lease", "Message", "Outstanding"]

LANES: Final = 64
"""Number of lanes: the unit of ownership. `hash(key) mod 64`, a stored generated column."""

TIMESTAMP_INFINITY: Final = 2**63 - 1
"""`created_at` of PostgreSQL's `infinity`."""

TIMESTAMP_MINUS_INFINITY: Final = -(2**63)
"""`created_at` of PostgreSQL's `-infinity`."""


@dataclass(slots=True, eq=False)
class Lease:
    """The right to decide about one lane, as long as `epoch` is the row's epoch (PROTOCOLS.md 1, 2).

    `lost` turns true once, when this pod learns that the lane is no longer its own; whatever was
    read under the lease is then dropped before it is published.

    `server` is the incarnation of the database that granted it (start time and timeline). Numbers are
    only meaningful there: a promoted standby may give the same `seq` to another event.
    """

    lane: int
    epoch: int
    server: str = ""
    lost: bool = False


@dataclass(slots=True, eq=False)
class Message:
    """One event on its way to one sink.

    `seq`          number that the database assigned; the order of a key, and our own identity of the event
    `id`           the event's UUID as lower-case text; what consumers deduplicate by
    `topic`        as the application wrote it
    `key`          ordering key, or None: no order
    `payload`      the column's text in UTF-8, or raw bytes of a `bytea`; None is a tombstone
    `headers`      JSON text of an object exactly as PostgreSQL prints it, or None; see `relay.headers`
    `created_at`   microseconds since the Unix epoch, set by the application; may be infinite
    `stored_at`    microseconds since the Unix epoch, set by the server; what latency is measured from
    `lane`         lane of the key
    `destination`  Kafka topic, RabbitMQ routing key or Redis stream, made by the route
    `lease`        the lease under which it was read; None for sources without leases
    `parked`       its own number in `outbox_parked`, or None: it comes straight from the source
    `attempts`     attempts already counted against it, on any pod
    `outstanding`  shared by the copies of one event for several sinks; None when there is one sink
    `size`         bytes that it is charged with while it is in flight
    """

    seq: int
    id: str
    topic: str
    key: str | None
    payload: bytes | None
    headers: str | None
    created_at: int
    stored_at: int
    lane: int
    destination: str
    lease: Lease | None = None
    parked: int | None = None
    attempts: int = 0
    outstanding: Outstanding | None = None
    size: int = 0


@dataclass(slots=True, eq=False)
class Outstanding:
    """How many sinks have yet to be done with an event before it can be settled.

    `dropped`: one of them did not deliver it because the lease was lost, so it must not be settled.
    """

    sinks: int
    dropped: bool = False
