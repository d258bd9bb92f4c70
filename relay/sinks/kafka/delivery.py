"""One `publish`: packs a batch by partition, sends it in order, and finds the fate of each message.

Keeps the order of a key (DESIGN.md 2.2) and PROTOCOLS.md 19:

- one record batch in flight per partition, over all concurrent publishes, by the partition's lock
- a batch whose fate stays unknown is fenced: the partition begins a new epoch
- a record batch that is refused for one record is cut down to that one; its neighbours are delivered,
  later messages of its key are deferred
- a key with several destinations in the batch is sent in rounds, because partitions know no common order
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from functools import partial
from time import time
from typing import TYPE_CHECKING, Final

from relay.sink import CONFIRMED, DEFERRED, Outcome, rejected
from relay.sinks.kafka.answers import Step
from relay.sinks.kafka.attempt import Attempt, Reply
from relay.sinks.kafka.cluster import Unreachable
from relay.sinks.kafka.records import FUTURE_MAX_MS, Piece, headers, timestamp

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from relay.sinks.kafka.cluster import Cluster
    from relay.sinks.kafka.pace import Pace
    from relay.sinks.kafka.partitioner import KeyHashes
    from relay.sinks.kafka.topics import Partition, Topic, Topics
    from relay.types import Message

__all__ = ["Context", "Delivery"]


_TOO_LARGE: Final = frozenset({"MESSAGE_TOO_LARGE", "RECORD_LIST_TOO_LARGE"})


@dataclass(frozen=True, slots=True)
class Context:
    """What all publishes of a sink share."""

    cluster: Cluster
    topics: Topics
    hashes: KeyHashes
    pace: Pace
    codec: int
    request_bytes_max: int


class Delivery:
    """The delivery of one batch. `outcomes` are those found so far, None where there is none yet."""

    def __init__(self, context: Context, batch: Sequence[Message]) -> None:
        self.outcomes: list[Outcome | None] = [None] * len(batch)
        self._batch = batch
        self._context = context
        self._failed: dict[str, int] = {}  # index of the first message of a key that was not confirmed
        self._retimed: set[int] = set()
        self._down: Outcome | None = None  # once the whole sink is down, nothing more is tried

    async def run(self) -> None:
        """Deliver. Cancelled at any moment, it leaves nothing behind that would be sent later."""
        names = {message.destination for message in self._batch}
        try:
            if outdated := self._context.topics.outdated(names):
                await self._context.cluster.look_up(outdated)
        except Unreachable as unreachable:
            self.fail(range(len(self._batch)), unreachable.outcome)
            return
        topics = {name: self._context.topics[name] for name in names}
        for indexes in _rounds(self._batch) if len(names) > 1 else [range(len(self._batch))]:
            for window in self._windows(indexes):
                if self._down is None:
                    with self._context.pace.of(partial(self._bytes_of, window)):
                        await self._send_all(self._pack(window, topics))
                else:
                    self.fail(window, self._down)

    def fail(self, indexes: Iterable[int], outcome: Outcome) -> None:
        """The first message of each key has this outcome; later ones of the key are deferred."""
        if outcome.sink_down:
            self._down = outcome
        for index in indexes:
            if self.outcomes[index] is not None:
                continue
            key = self._batch[index].key
            if key is not None and self._failed.setdefault(key, index) < index:
                self.outcomes[index] = DEFERRED
            else:
                self.outcomes[index] = outcome

    def _windows(self, indexes: Sequence[int]) -> Iterator[Sequence[int]]:
        """Parts that are sent one after the other: all at once, unless the connection is slow."""
        while indexes:
            size = count = 0
            for index in indexes if self._context.pace.is_slow else ():
                size += _bytes_of(self._batch[index])
                if count and size > self._context.pace.bytes_max:
                    break
                count += 1
            yield indexes[: count or len(indexes)]
            indexes = indexes[count or len(indexes) :]

    def _bytes_of(self, indexes: Iterable[int]) -> int:
        return sum(_bytes_of(self._batch[index]) for index in indexes)

    # --- packing ---------------------------------------------------------------------------------

    def _pack(self, indexes: Iterable[int], topics: dict[str, Topic]) -> dict[Partition, deque[Piece]]:
        """Pieces by partition. The hot loop of the sink: no coroutine, future or task for a message."""
        batch, failed, hashes, codec = self._batch, self._failed, self._context.hashes, self._context.codec
        limit = self._context.request_bytes_max
        now = int(time() * 1000)
        latest = now + FUTURE_MAX_MS
        keyless: dict[Topic, Partition] = {}
        packed: dict[Partition, deque[Piece]] = {}
        current: dict[Partition, Piece] = {}
        for index in indexes:
            message = batch[index]
            topic = topics[message.destination]
            key = message.key
            if topic.failure is not None or (failed and key in failed):
                self.fail((index,), topic.failure or DEFERRED)
                continue
            try:
                if key is None:
                    partition = keyless.get(topic) or keyless.setdefault(topic, topic.next_partition())
                    raw = None
                else:
                    partition = topic.partitions[hashes[key] % len(topic.partitions)]
                    raw = key.encode()
                fields = headers(message)
            except (ValueError, AttributeError) as error:  # its text may show the key or the headers: only its name
                self.fail((index,), rejected(f"key or headers cannot be encoded: {type(error).__name__}"))
                continue
            milliseconds = message.created_at // 1000  # `records.timestamp`, without the call
            if not 0 <= milliseconds <= latest:
                milliseconds = now
            piece = current.get(partition)
            if piece is None or piece.append(len(piece.indexes), milliseconds, raw, message.payload, fields) is None:
                piece = current[partition] = Piece(codec, min(topic.batch_bytes, limit))
                piece.append(0, milliseconds, raw, message.payload, fields)
                packed.setdefault(partition, deque()).append(piece)
            piece.indexes.append(index)
        return packed

    def _repack(self, indexes: Iterable[int]) -> Piece:
        """One piece of messages that were packed before; those are known to be encodable."""
        piece = Piece(self._context.codec, 2**31 - 1)
        now = int(time() * 1000)
        for index in indexes:
            message = self._batch[index]
            milliseconds = now if index in self._retimed else timestamp(message.created_at, now)
            key = None if message.key is None else message.key.encode()
            piece.add(index, milliseconds, key, message, headers(message))
        return piece

    # --- sending ---------------------------------------------------------------------------------

    async def _send_all(self, packed: dict[Partition, deque[Piece]]) -> None:
        if len(packed) == 1:
            await self._send_in_order(*packed.popitem())
            return
        async with asyncio.TaskGroup() as group:
            for partition, pieces in packed.items():
                group.create_task(self._send_in_order(partition, pieces), name=f"kafka {partition}")

    async def _send_in_order(self, partition: Partition, pieces: deque[Piece]) -> None:
        async with partition.lock:
            while pieces:
                piece = self._without_followers(pieces.popleft())
                if len(piece) > 1 and piece.size > partition.topic.batch_bytes:
                    pieces.extendleft(reversed(self._halves(piece)))
                elif piece:
                    reply = await self._send(partition, piece)
                    pieces.extendleft(reversed(self._settle(piece, reply)))
                    if reply.step is Step.FAIL:
                        for rest in pieces:
                            self.fail(rest.indexes, reply.outcome)
                        return

    def _without_followers(self, piece: Piece) -> Piece:
        """The piece without messages whose key has failed meanwhile."""
        if not self._failed:
            return piece
        kept = []
        for index in piece.indexes:
            key = self._batch[index].key
            if key is not None and self._failed.get(key, index) < index:
                self.outcomes[index] = DEFERRED
            else:
                kept.append(index)
        return piece if len(kept) == len(piece) else self._repack(kept)

    def _settle(self, piece: Piece, reply: Reply) -> list[Piece]:
        """Note the outcomes of a piece; what of it has to be sent again, in order."""
        match reply.step:
            case Step.CONFIRM:
                for index in piece.indexes:
                    self.outcomes[index] = CONFIRMED
                return []
            case Step.FAIL:
                self.fail(piece.indexes, reply.outcome)
                return []
            case Step.RETIME if not self._retimed.issuperset(named := _named(piece, reply) or piece.indexes):
                self._retimed.update(named)
                return [self._repack(piece.indexes)]
            case _:
                return self._narrow_down(piece, reply)

    def _narrow_down(self, piece: Piece, reply: Reply) -> list[Piece]:
        """Reject the records that the broker names, or the only one; else halve. The rest is sent again."""
        if named := _named(piece, reply):
            words = dict(reply.faults)
            for place, index in enumerate(piece.indexes):
                if index in named:
                    self.fail((index,), rejected(f"{reply.outcome.reason}: {words.get(place) or 'no reason given'}"))
            rest = [index for index in piece.indexes if index not in named]
            return [self._repack(rest)] if rest else []
        if len(piece) == 1:
            self.fail(piece.indexes, reply.outcome)
            return []
        return self._halves(piece)

    def _halves(self, piece: Piece) -> list[Piece]:
        middle = len(piece) // 2
        return [self._repack(piece.indexes[:middle]), self._repack(piece.indexes[middle:])]

    async def _send(self, partition: Partition, piece: Piece) -> Reply:
        """Send a piece until its fate is known or patience is over; the partition's lock is held."""
        attempt = Attempt(self._context.cluster, partition, self._context.request_bytes_max)
        try:
            while True:
                size = piece.size
                reply = await attempt.send(piece)
                if reply is not None:
                    return reply if reply.name not in _TOO_LARGE else self._too_large(partition, piece, size, reply)
                piece = self._repack(piece.indexes)
        except Unreachable as unreachable:
            return Reply(Step.FAIL, unreachable.outcome)
        finally:
            if not attempt.confirmed:
                # Cancelled, lost or refused: whatever may still be on its way is fenced by what comes next.
                partition.begin_epoch()

    def _too_large(self, partition: Partition, piece: Piece, size: int, reply: Reply) -> Reply:
        if len(piece) > 1:
            partition.topic.learn_limit(size)
            return reply
        payload = len(self._batch[piece.indexes[0]].payload or b"")
        what = f"a payload of {payload} bytes is too large for topic {partition.topic.name!r}"
        return Reply(Step.SPLIT, rejected(f"{what}: {reply.outcome.reason}"))


def _bytes_of(message: Message) -> int:
    return len(message.payload or b"") + len(message.headers or "") + 100


def _named(piece: Piece, reply: Reply) -> set[int]:
    """Messages whose records the broker names as the fault."""
    return {piece.indexes[place] for place, _ in reply.faults if 0 <= place < len(piece)}


def _rounds(batch: Sequence[Message]) -> list[Sequence[int]]:
    """Indexes in rounds that are sent one after the other: within a round a key has one destination."""
    rounds: list[list[int]] = [[]]
    last: dict[str, tuple[str, int]] = {}
    for index, message in enumerate(batch):
        number = 0
        if message.key is not None:
            destination, number = last.get(message.key, (message.destination, 0))
            if destination != message.destination:
                number += 1
            last[message.key] = (message.destination, number)
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(index)
    return list(rounds)
