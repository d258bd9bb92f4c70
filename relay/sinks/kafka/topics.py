"""What we know of topics: partitions, leaders, limits, and for a while also which topics do not exist.

Our own metadata, not the library's: that one waits for a missing topic as long as a request may take and
asks for it again with each refresh, so that one wrong name slows everybody (FIELD.md C4). Here a topic that
fails has an answer at once, its own, for a second.
"""

from __future__ import annotations

import asyncio
import re
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Final

from relay.sink import Outcome, rejected
from relay.sinks.kafka.answers import after_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from relay.sinks.kafka.wire import TopicInfo

__all__ = ["Partition", "Topic", "Topics"]

BATCH_BYTES: Final = 1_000_000
"""Uncompressed bytes of a record batch at first: below 1,048,588, the default of `max.message.bytes`."""

_BATCH_BYTES_MIN: Final = 1_000
_FAILED_FOR_SECONDS: Final = 1.0
_FAILED_MAX: Final = 1_000
_LEGAL: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_EPOCH_MAX: Final = 2**15 - 1
_SEQUENCE_MAX: Final = 2**31 - 1


class Partition:
    """One partition: its leader, and where our sequence of record batches in it stands.

    `lock` is held from before a batch is stamped until its fate is known: one batch in flight per partition.

    The broker keeps (producer id, epoch, sequence) for each partition by itself, so each partition here has
    an epoch of its own. A higher epoch fences the lower: once one batch of it was written, bytes of an
    abandoned batch that are still in some buffer are refused (INVALID_PRODUCER_EPOCH).
    """

    __slots__ = ("epoch", "in_trouble", "leader", "lock", "number", "producer_id", "sequence", "topic", "used_up")

    def __init__(self, topic: Topic, number: int) -> None:
        self.topic = topic
        self.number = number
        self.leader = -1
        self.lock = asyncio.Lock()
        self.in_trouble = False
        """Whether a batch was given up for the partition's own sake, and none written since."""
        self.producer_id: int | None = None
        self.used_up: int | None = None
        """The producer id before, which the broker does not take here any more."""
        self.epoch = 0
        self.sequence = 0

    def __str__(self) -> str:
        return f"partition {self.number} of topic {self.topic.name!r}"

    def begin(self, producer_id: int) -> None:
        """The next batch is the first under this producer id."""
        self.producer_id, self.epoch, self.sequence = producer_id, 0, 0

    def advance(self, records: int) -> None:
        """A batch of so many records was written."""
        self.sequence += records
        if self.sequence > _SEQUENCE_MAX - 1_000_000:
            self.begin_epoch()  # the sequence is a signed 32-bit number; a new epoch is simpler than its wrap-around

    def begin_epoch(self) -> None:
        """The fate of a batch is unknown or bad: whatever comes next fences it."""
        if self.epoch >= _EPOCH_MAX:
            self.begin_producer()
        self.epoch += 1
        self.sequence = 0

    def begin_producer(self) -> None:
        """The broker does not take this producer id any more."""
        if self.producer_id is not None:
            self.used_up = self.producer_id
        self.producer_id = None


class Topic:
    """A topic: its partitions, or the outcome of whatever is sent to it now."""

    __slots__ = ("_available", "_known", "_turns", "batch_bytes", "failure", "name", "partitions", "valid_until")

    def __init__(self, name: str) -> None:
        self.name = name
        self.partitions: list[Partition] = []
        # Never forgotten while the producer id lives: a partition that began again at epoch 0 and sequence 0 would
        # be taken by the broker for its first batch sent again, and confirmed without being written.
        self._known: list[Partition] = []
        self.failure: Outcome | None = None
        self.valid_until = 0.0
        self.batch_bytes = BATCH_BYTES
        self._available: list[Partition] = []
        self._turns: Iterator[int] = count()

    @property
    def is_only_a_name(self) -> bool:
        """Whether nothing was ever sent to it."""
        return not self._known

    def next_partition(self) -> Partition:
        """The partition of the keyless messages of one batch: each in turn, if it has a leader."""
        choice = self._available or self.partitions
        return choice[next(self._turns) % len(choice)]

    def learn_limit(self, refused_bytes: int) -> None:
        """The topic takes only smaller batches: halve, until the metadata is looked up again."""
        self.batch_bytes = max(_BATCH_BYTES_MIN, min(self.batch_bytes, refused_bytes) // 2)

    def update(self, info: TopicInfo, age_max: float) -> None:
        """Take over what the cluster says. Partitions stay the same objects: they hold a lock and a sequence."""
        now = monotonic()
        if info.code != 0:
            self.failure = after_metadata(info.code, self.name)
            self.valid_until = now + _FAILED_FOR_SECONDS
            return
        for number, leader in info.partitions:
            while number >= len(self._known):
                self._known.append(Partition(self, len(self._known)))
            self._known[number].leader = leader
        self.partitions = self._known[: len(info.partitions)]
        self._available = [partition for partition in self.partitions if partition.leader >= 0]
        self.failure = None
        self.batch_bytes = BATCH_BYTES
        self.valid_until = now + age_max


class Topics:
    """All topics that were asked for lately, by name."""

    def __init__(self, age_max: float) -> None:
        self._age_max = age_max
        self._topics: dict[str, Topic] = {}

    def __getitem__(self, name: str) -> Topic:
        return self._topics[name]

    def outdated(self, names: Iterable[str]) -> list[str]:
        """Those of the names that have to be looked up. An illegal name never has to be."""
        now = monotonic()
        return [name for name in names if self._entry(name).valid_until <= now]

    def update(self, infos: Iterable[TopicInfo]) -> None:
        """Take over what the cluster says about topics."""
        for info in infos:
            self._entry(info.name).update(info, self._age_max)

    def forget_producer(self) -> None:
        """Begin under another producer id everywhere, because the cluster is another one."""
        for topic in self._topics.values():
            for partition in topic.partitions:
                partition.begin_producer()

    def _entry(self, name: str) -> Topic:
        if (topic := self._topics.get(name)) is None:
            self._forget_failed()
            topic = self._topics[name] = Topic(name)
            if not _LEGAL.fullmatch(name) or name in {".", ".."}:
                topic.failure = rejected(
                    f"{name[:249]!r} is not a legal topic name: 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-'"
                )
                topic.valid_until = float("inf")
        return topic

    def _forget_failed(self) -> None:
        """Bound the memory that wrong names can take."""
        failed = [name for name, topic in self._topics.items() if topic.failure is not None and topic.is_only_a_name]
        if len(failed) >= _FAILED_MAX:
            for name in failed:
                del self._topics[name]
