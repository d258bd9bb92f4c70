"""Which partition a key belongs to: exactly Java's answer, so that our records and other producers' meet (FIELD.md C8).

`murmur2(key) & 0x7fffffff % partitions`, the rule of `org.apache.kafka.clients.producer.internals.
BuiltInPartitioner.partitionForKey` and `org.apache.kafka.common.utils.Utils.murmur2`. There is no compiled
murmur2 among our dependencies and one in Python costs more than the rest of a record, so hashes are remembered.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

__all__ = ["KeyHashes", "murmur2"]

_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_32_BITS: Final = 0xFFFFFFFF
_WORDS: Final = tuple(Struct(f"<{count}I").unpack_from for count in range(65))


def murmur2(data: bytes) -> int:
    """Unsigned 32-bit MurmurHash2 with Kafka's seed."""
    count = len(data) >> 2
    unpack = _WORDS[count] if count < len(_WORDS) else Struct(f"<{count}I").unpack_from
    state = _SEED ^ len(data)
    for word in unpack(data):
        word = word * _M & _32_BITS  # noqa: PLW2901  # the mixing step, as in every description of it
        state = (state * _M & _32_BITS) ^ ((word ^ (word >> 24)) * _M & _32_BITS)
    if len(data) & 3:
        state = (state ^ int.from_bytes(data[count << 2 :], "little")) * _M & _32_BITS
    state = (state ^ (state >> 13)) * _M & _32_BITS
    return state ^ (state >> 15)


class KeyHashes(dict[str, int]):
    """Positive hashes of keys seen lately: `hashes[key] % partitions` is the partition's number.

    Bounded: it is emptied when full, which costs less than keeping the least recently used apart.
    """

    __slots__ = ()

    SIZE_MAX: Final = 50_000
    """About 7 MB with keys of the length of a UUID."""

    def __missing__(self, key: str) -> int:
        if len(self) >= self.SIZE_MAX:
            self.clear()
        positive = self[key] = murmur2(key.encode()) & 0x7FFFFFFF
        return positive
