"""Keys land on the partition that Java's client chooses (FIELD.md C8)."""

from __future__ import annotations

import pytest
from aiokafka.partitioner import murmur2 as aiokafka_murmur2
from hypothesis import given
from hypothesis import strategies as st

from relay.sinks.kafka.partitioner import KeyHashes, murmur2

# Made with kafka-clients 4.4.0: Utils.murmur2(key) and BuiltInPartitioner.partitionForKey(key, 1 | 3 | 12 | 100).
VECTORS = [
    ("", 275646681, 0, 0, 9, 81),
    ("61", 2731586172, 0, 1, 4, 24),
    ("6162", 316155434, 0, 2, 2, 34),
    ("616263", 479470107, 0, 0, 3, 7),
    ("61626364", 2971317748, 0, 2, 8, 0),
    ("6162636465", 461995741, 0, 1, 1, 41),
    ("3231", 3321034988, 0, 0, 0, 40),
    ("666f6f626172", 3504634814, 0, 0, 6, 66),
    ("612d6c6974746c652d6269742d6c6f6e672d737472696e67", 3308985760, 0, 2, 8, 12),
    ("612d6c6974746c652d6269742d6c6f6e6765722d737472696e67", 2808662467, 0, 2, 11, 19),
    (
        "6c6b6a683233346c68396669756839307932336f697568736166756a6861646f66323239706872396831396838396838",
        4236069325,
        *(0, 2, 5, 77),
    ),
    ("6f726465722d31", 1221710326, 0, 1, 10, 26),
    ("6f726465722d3432", 501153024, 0, 0, 0, 24),
    ("637573746f6d65722d31303030", 1747198871, 0, 2, 11, 71),
    ("30313934336130302d303030302d373030302d383030302d303030303030303030303031", 3621280025, 0, 0, 9, 77),
    ("d0bad0bbd18ed187", 2122343024, 0, 2, 8, 24),
    ("e6bca2e5ad97", 1024270057, 0, 1, 1, 57),
    ("f09fa68a20666f78", 1970409301, 0, 1, 1, 1),
    ("6e756c6c", 4219285819, 0, 2, 11, 71),
    ("20", 3307735169, 0, 0, 9, 21),
    ("6b65790a77697468006e756c", 2732644518, 0, 1, 10, 70),
]


@pytest.mark.parametrize(("key", "expected_hash", "of_1", "of_3", "of_12", "of_100"), VECTORS)
def test_a_key_has_the_partition_that_java_gives_it(
    key: str, expected_hash: int, of_1: int, of_3: int, of_12: int, of_100: int
) -> None:
    """Hash and partition of each vector, with every number of partitions."""
    raw = bytes.fromhex(key)
    positive = KeyHashes()[raw.decode()]
    assert murmur2(raw) == expected_hash
    assert [positive % partitions for partitions in (1, 3, 12, 100)] == [of_1, of_3, of_12, of_100]


def test_a_key_longer_than_the_prepared_formats_has_javas_hash() -> None:
    """1,000 bytes, high ones among them; the hash is Java's."""
    assert murmur2(bytes(n * 7 % 256 for n in range(1000))) == 483719753


@given(st.binary(max_size=400))
def test_the_hash_equals_the_plain_one(data: bytes) -> None:
    """The unrolled hash is the byte-by-byte one of aiokafka."""
    assert murmur2(data) == aiokafka_murmur2(data)


def test_remembered_hashes_are_bounded_and_stay_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """More keys than are remembered cost time, never memory or a wrong partition."""
    monkeypatch.setattr(KeyHashes, "SIZE_MAX", 10)
    hashes = KeyHashes()
    for number in [*range(100), *range(100)]:
        assert hashes[f"key{number}"] == murmur2(b"key%d" % number) & 0x7FFFFFFF
        assert len(hashes) <= 10
