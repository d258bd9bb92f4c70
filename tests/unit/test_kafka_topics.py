"""What is known of topics and partitions, and for how long."""

from __future__ import annotations

import pytest

from relay.sink import Status
from relay.sinks.kafka import topics as module
from relay.sinks.kafka.topics import BATCH_BYTES, Partition, Topic, Topics
from relay.sinks.kafka.wire import PartitionInfo, TopicInfo


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    return clock


def info(name: str, partitions: int, *, code: int = 0, leader: int = 1) -> TopicInfo:
    return TopicInfo(name, code, tuple(PartitionInfo(number, leader) for number in range(partitions)))


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "naïve", "a/b", "x" * 250, "a\n", "with:colon"])
def test_an_illegal_name_is_rejected_without_a_question_to_the_broker(name: str) -> None:
    """Kafka's rule for names; the answer never gets old."""
    topics = Topics(60)
    assert topics.outdated([name]) == []
    failure = topics[name].failure
    assert failure is not None
    assert failure.status is Status.REJECTED


@pytest.mark.parametrize("name", ["orders", "a.b-c_D9", "...", "x" * 249, "-"])
def test_a_legal_name_is_looked_up(name: str) -> None:
    """Once; then it is known."""
    topics = Topics(60)
    assert topics.outdated([name]) == [name]
    topics.update([info(name, 3)])
    assert topics.outdated([name]) == []
    assert topics[name].failure is None


def test_a_missing_topic_has_an_answer_for_a_second_and_hurts_no_other(clock: Clock) -> None:
    """Within it nobody is asked; after it only this one is (FIELD.md C4)."""
    topics = Topics(60)
    topics.update([info("there", 1), info("missing", 0, code=3)])
    assert topics["missing"].failure is not None
    assert topics.outdated(["there", "missing"]) == []
    clock.now += 1.1
    assert topics.outdated(["there", "missing"]) == ["missing"]


def test_a_topic_that_appears_is_used(clock: Clock) -> None:
    """Its failure is forgotten."""
    topics = Topics(60)
    topics.update([info("late", 0, code=3)])
    topics.update([info("late", 2)])
    assert topics["late"].failure is None
    assert len(topics["late"].partitions) == 2


def test_metadata_gets_old_and_new_partitions_are_noticed(clock: Clock) -> None:
    """The old ones stay the same objects: they hold a lock and a sequence."""
    topics = Topics(60)
    topics.update([info("t", 2)])
    before = list(topics["t"].partitions)
    clock.now += 61
    assert topics.outdated(["t"]) == ["t"]
    topics.update([info("t", 5)])
    assert topics["t"].partitions[:2] == before
    assert [partition.number for partition in topics["t"].partitions] == [0, 1, 2, 3, 4]


def test_wrong_names_take_bounded_memory() -> None:
    """Ten thousand names of topics that do not exist."""
    topics = Topics(60)
    topics.update([info("there", 1)])
    for number in range(10_000):
        topics.update([info(f"missing{number}", 0, code=3)])
    assert len(topics._topics) <= 1_001
    assert topics["there"].failure is None


def test_a_partition_is_never_begun_twice(clock: Clock) -> None:
    """It would repeat sequence numbers, and the broker confirm without writing: it survives stale and failed metadata."""
    topics = Topics(60)
    topics.update([info("t", 3)])
    before = list(topics["t"].partitions)
    topics.update([info("t", 1)])
    assert topics["t"].partitions == before[:1]
    topics.update([info("t", 0, code=3)])
    for number in range(5_000):
        topics.update([info(f"missing{number}", 0, code=3)])
    topics.update([info("t", 3)])
    assert topics["t"].partitions == before


def test_keyless_batches_take_turns_over_partitions_that_have_a_leader() -> None:
    """A partition without one gets nothing while there are others."""
    topic = Topic("t")
    leaders = (1, -1, 2)
    topic.update(TopicInfo("t", 0, tuple(PartitionInfo(n, leader) for n, leader in enumerate(leaders))), 60)
    assert [topic.next_partition().number for _ in range(4)] == [0, 2, 0, 2]


def test_a_learned_limit_halves_and_is_forgotten_with_the_metadata() -> None:
    """Down to a floor, and up again when the topic is looked up."""
    topic = Topic("t")
    topic.learn_limit(600_000)
    assert topic.batch_bytes == 300_000
    for _ in range(30):
        topic.learn_limit(topic.batch_bytes)
    assert topic.batch_bytes == 1_000
    topic.update(info("t", 1), 60)
    assert topic.batch_bytes == BATCH_BYTES


def partition() -> Partition:
    made = Partition(Topic("t"), 0)
    made.begin(77)
    return made


def test_a_confirmed_batch_moves_the_sequence_and_an_unknown_one_the_epoch() -> None:
    """The next epoch begins at sequence 0, which is what fences the one before."""
    made = partition()
    made.advance(5)
    assert (made.producer_id, made.epoch, made.sequence) == (77, 0, 5)
    made.begin_epoch()
    assert (made.producer_id, made.epoch, made.sequence) == (77, 1, 0)


def test_epochs_and_sequences_never_overflow() -> None:
    """Signed 16 and 32 bits on the wire: a new epoch, and then a new producer id, come before."""
    made = partition()
    made.sequence = 2**31 - 1_000_000
    made.advance(2_000)
    assert (made.epoch, made.sequence) == (1, 0)
    made.epoch = 2**15 - 1
    made.begin_epoch()
    assert made.producer_id is None
    assert made.used_up == 77


def test_another_cluster_means_another_producer_id() -> None:
    """The same id may be somebody else's there."""
    topics = Topics(60)
    topics.update([info("t", 1)])
    topics["t"].partitions[0].begin(77)
    topics.forget_producer()
    assert topics["t"].partitions[0].producer_id is None
