"""Everything that we use of aiokafka 0.14.0, its private parts included, in this one place (PROTOCOLS.md 22).

aiokafka gives us connections (TCP, TLS, SASL), the request structures and the C record builder. Its
producer is not used: it retries by itself without a deadline, cannot take back a batch that it holds,
and drops the broker's word on single records (docs/adr/0010-kafka-producer.md). The pinned version
and the contract suite are what holds these names in place:

- `aiokafka.conn`: `create_conn`, and of a connection `_writer` (to drop bytes that were not sent yet),
  `_closed_fut` (set when the transport is really closed)
- `aiokafka.record.default_records.DefaultRecordBatchBuilder`: `append`, `size`, `set_producer_state`, `build`
- `aiokafka.protocol`: MetadataRequest, InitProducerIdRequest, `ProduceRequest_v7` and `_v8`
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from aiokafka.codec import has_gzip, has_lz4, has_snappy, has_zstd
from aiokafka.conn import collect_hosts, create_conn
from aiokafka.errors import (
    AuthenticationFailedError,
    AuthenticationMethodNotSupported,
    BrokerResponseError,
    IllegalSaslStateError,
    IncompatibleBrokerVersion,
    KafkaConnectionError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.produce import ProduceRequest_v7, ProduceRequest_v8
from aiokafka.protocol.transaction import InitProducerIdRequest
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from ssl import SSLContext

__all__ = [
    "AUTHENTICATION_ERRORS",
    "CODECS",
    "CUTS",
    "FAILURES",
    "Address",
    "Answer",
    "Broker",
    "Connection",
    "Metadata",
    "PartitionInfo",
    "Security",
    "TopicInfo",
    "abort",
    "addresses",
    "batch_builder",
    "close",
    "codec_is_available",
    "connect",
    "fetch_metadata",
    "fetch_producer_id",
    "is_open",
    "kafka_error_code",
    "produce",
]

# At debug level it prints requests, and with them the password of SASL PLAIN (FIELD.md F9).
logging.getLogger("aiokafka.conn").setLevel(logging.INFO)

_NO_TRANSACTION_TIMEOUT: Final = 2**31 - 1  # what clients without transactions send; a broker refuses 0

Connection: TypeAlias = Any
"""An `aiokafka.conn.AIOKafkaConnection`; the library is not typed."""

CODECS: Final[dict[str, int]] = {
    "none": 0,
    "gzip": DefaultRecordBatch.CODEC_GZIP,
    "snappy": DefaultRecordBatch.CODEC_SNAPPY,
    "lz4": DefaultRecordBatch.CODEC_LZ4,
    "zstd": DefaultRecordBatch.CODEC_ZSTD,
}
"""Names of the codecs and their bits in a batch's attributes."""

AUTHENTICATION_ERRORS: Final[tuple[type[Exception], ...]] = (
    AuthenticationFailedError,
    AuthenticationMethodNotSupported,
    IllegalSaslStateError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)

# struct.error and ValueError: an answer that is not Kafka's protocol, for example that of an HTTP server.
FAILURES: Final[tuple[type[Exception], ...]] = (
    OSError,
    EOFError,
    TimeoutError,
    KafkaError,
    NotImplementedError,
    ValueError,
    AssertionError,
    struct.error,
)
"""What a connection may raise instead of an answer."""


CUTS: Final[tuple[type[Exception], ...]] = (
    ConnectionResetError,
    ConnectionAbortedError,
    BrokenPipeError,
    EOFError,
    KafkaConnectionError,
)
"""Those of them that say that a connection was there and then was dropped."""


@dataclass(frozen=True, slots=True)
class Security:
    """How to talk to a broker: aiokafka's names."""

    protocol: str = "PLAINTEXT"
    ssl_context: SSLContext | None = None
    mechanism: str = "PLAIN"
    username: str | None = None
    password: str | None = None


class Address(NamedTuple):
    """Where a broker listens."""

    host: str
    port: int


class Broker(NamedTuple):
    """A broker of the cluster, as the cluster announces it."""

    id: int
    address: Address


class PartitionInfo(NamedTuple):
    """One partition; `leader` is -1 while there is none."""

    number: int
    leader: int


class TopicInfo(NamedTuple):
    """What the cluster says about a topic: an error code, or its partitions by number."""

    name: str
    code: int
    partitions: tuple[PartitionInfo, ...]


class Metadata(NamedTuple):
    """Brokers, and the topics that were asked for."""

    cluster_id: str | None
    brokers: tuple[Broker, ...]
    topics: tuple[TopicInfo, ...]


class Answer(NamedTuple):
    """What the broker says to one record batch (Produce v8, KIP-467).

    `faults` are the indexes, within the batch, of the records that it names, with its words for each.
    """

    code: int
    message: str | None = None
    faults: tuple[tuple[int, str | None], ...] = ()


def codec_is_available(name: str) -> bool:
    """Whether the library of a codec is installed."""
    checks = {"gzip": has_gzip, "snappy": has_snappy, "lz4": has_lz4, "zstd": has_zstd}
    return name == "none" or bool(checks[name]())


def kafka_error_code(error: BaseException) -> int | None:
    """The protocol's code of an error that a broker answered with, or None for the client's own errors."""
    return error.errno if isinstance(error, BrokerResponseError) else None


def addresses(servers: Sequence[str]) -> list[Address]:
    """Addresses of `host[:port]` texts, in random order so that the load of a start is spread."""
    return [Address(host, port) for host, port, _ in collect_hosts(list(servers))]


def batch_builder(codec: int, bytes_max: int) -> DefaultRecordBatchBuilder:
    """An empty record batch. Its first record always fits, whatever `bytes_max` is."""
    return DefaultRecordBatchBuilder(2, codec, 0, -1, -1, 0, bytes_max)


# --- connections ---------------------------------------------------------------------------------


async def connect(address: Address, *, client_id: str, timeout_seconds: float, security: Security) -> Connection:
    """An authenticated connection. Raises one of FAILURES or AUTHENTICATION_ERRORS."""
    return await create_conn(
        address.host,
        address.port,
        client_id=client_id,
        request_timeout_ms=int(timeout_seconds * 1000),
        security_protocol=security.protocol,
        ssl_context=security.ssl_context,
        sasl_mechanism=security.mechanism,
        sasl_plain_username=security.username,
        sasl_plain_password=security.password,
    )


def is_open(connection: Connection) -> bool:
    """Whether neither side has closed it yet."""
    return bool(connection.connected())


def abort(connection: Connection) -> None:
    """Close at once and drop what was not sent: neither our buffer nor the kernel's is flushed."""
    writer = connection._writer  # noqa: SLF001  # the only way to the transport
    connection.close()
    if writer is None:
        return
    if (sock := writer.transport.get_extra_info("socket")) is not None:
        # A zero linger makes the kernel send a reset instead of what is still in its send buffer.
        with contextlib.suppress(OSError):  # closed by the peer in this moment: there is nothing left to drop
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def close(connection: Connection, timeout_seconds: float) -> None:
    """Abort, and wait until the socket is gone."""
    abort(connection)
    await asyncio.wait([connection._closed_fut], timeout=timeout_seconds)  # noqa: SLF001


# --- requests ------------------------------------------------------------------------------------


async def fetch_metadata(connection: Connection, topics: Sequence[str]) -> Metadata:
    """Brokers of the cluster and the state of these topics; none asked for means none answered.

    Lets the broker create missing topics if it is configured to, like every Kafka producer does.
    """
    answer = await connection.send(MetadataRequest(list(topics), allow_auto_topic_creation=True))
    brokers = tuple(Broker(node, Address(host, port)) for node, host, port, *_ in answer.brokers)
    return Metadata(getattr(answer, "cluster_id", None), brokers, tuple(map(_topic, answer.topics)))


def _topic(row: tuple[Any, ...]) -> TopicInfo:
    code, name, _, partitions = row
    return TopicInfo(name, code, tuple(sorted(PartitionInfo(number, leader) for _, number, leader, *_ in partitions)))


async def fetch_producer_id(connection: Connection) -> tuple[int, int]:
    """Error code, and a producer id that nobody else has."""
    answer = await connection.send(InitProducerIdRequest(None, _NO_TRANSACTION_TIMEOUT))
    return answer.error_code, answer.producer_id


async def produce(
    connection: Connection, batches: Sequence[tuple[str, int, bytearray]], timeout_seconds: float
) -> dict[tuple[str, int], Answer]:
    """Send one record batch per partition, `acks=all`, and the broker's answer to each.

    The bytes are handed to the transport before the first suspension, so a caller that is cancelled
    knows that they were written. `timeout_seconds` is how long the broker may wait for its replicas.
    """
    response = await connection.send(_Produce(batches, int(timeout_seconds * 1000)))
    return {(topic, row[0]): _answer(row) for topic, rows in response.topics for row in rows}


def _answer(row: tuple[Any, ...]) -> Answer:
    code = row[1]
    if code == 0 or len(row) <= _MESSAGE:
        return Answer(code)
    faults = tuple((index, words) for index, words in row[_FAULTS] or ())
    return Answer(code, row[_MESSAGE], faults)


_FAULTS: Final = 5  # places of `record_errors` and `error_message` in a partition's answer, from version 8
_MESSAGE: Final = 6


class _Produce:
    """Chooses the version of a produce request; aiokafka's own stops at 7, without the faults of single records."""

    def __init__(self, batches: Sequence[tuple[str, int, bytearray]], timeout_ms: int) -> None:
        self._batches = batches
        self._timeout_ms = timeout_ms

    def prepare(self, versions: dict[int, tuple[int, int]]) -> _Encoded:
        lowest, highest = versions[0]
        for kind, version in ((_Produce8, 8), (_Produce7, 7)):
            if lowest <= version <= highest:
                return kind(None, -1, self._timeout_ms, self._batches)
        raise IncompatibleBrokerVersion("Kafka 2.1 or newer is needed")


class _Encoded:
    """Encodes a produce request with one copy of the record batches; the schema's own way makes five."""

    timeout: int
    topics: Sequence[tuple[str, int, bytearray]]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.topics)} record batches)"  # never the records: it may be logged

    def encode(self) -> bytes:
        topics: dict[str, list[tuple[int, bytearray]]] = {}
        for topic, partition, records in self.topics:
            topics.setdefault(topic, []).append((partition, records))
        parts: list[bytes | bytearray] = [struct.pack(">hhii", -1, -1, self.timeout, len(topics))]
        for topic, partitions in topics.items():
            name = topic.encode()
            parts.append(struct.pack(f">h{len(name)}si", len(name), name, len(partitions)))
            for partition, records in partitions:
                parts += (struct.pack(">ii", partition, len(records)), records)
        return b"".join(parts)


class _Produce7(_Encoded, ProduceRequest_v7):  # type: ignore[misc]  # the library is not typed
    pass


class _Produce8(_Encoded, ProduceRequest_v8):  # type: ignore[misc]  # the library is not typed
    pass
