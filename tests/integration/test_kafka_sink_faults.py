"""The Kafka sink while its broker is frozen, killed, cut off, or does not want it."""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Int8, Int16, Int32, Schema, String

from relay.errors import PermissionMissing
from relay.sink import CONFIRMED, Status
from relay.sinks.kafka import wire
from relay.testing.messages import make_message, make_messages
from tests.conftest import running
from tests.integration.kafka_reader import create_topic, records_of
from tests.integration.test_kafka_sink import ids, ids_of, opened, publish_until_confirmed, statuses
from tests.servers.kafka import Kafka

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from relay.types import Message
    from tests.servers.proxy import Proxy


def first_occurrences(records: Sequence[Any], key: str) -> list[str]:
    """Event ids of a key in the order of their first delivery."""
    return list(dict.fromkeys(ids_of(record for record in records if record.key == key.encode())))


def assert_in_order(records: Sequence[Any], messages: Sequence[Message]) -> None:
    """Nothing is lost and nothing overtakes; repeats are allowed."""
    for key in {message.key for message in messages if message.key}:
        assert first_occurrences(records, key) == [message.id for message in messages if message.key == key]


def _more(proxy: Proxy, counter: str, than: int) -> bool:
    return int(getattr(proxy, counter)) > than


# --- the wire ------------------------------------------------------------------------------------


async def test_connections_that_break_cost_no_repeats(kafka: Kafka, kafka_proxy: Proxy, unique: str) -> None:
    """Asked again with the same sequence numbers, the broker drops what it has: exactly once through twenty resets."""
    topic = await create_topic(kafka, unique, partitions=3)
    workers = [make_messages(topic, 3_000, keys=[f"{w}.{n}" for n in range(5)]) for w in range(3)]
    confirmed = asyncio.Event()
    async with opened(kafka, bootstrap_servers=kafka.proxied_bootstrap_servers, publish_timeout_seconds=20) as sink:

        async def work(messages: list[Message]) -> None:
            for start in range(0, len(messages), 50):
                assert set(await sink.publish(messages[start : start + 50])) == {CONFIRMED}
                confirmed.set()

        async def reset() -> None:
            for n in range(20):
                confirmed.clear()
                await confirmed.wait()  # not faster than the sink recovers: that is another test's outage
                sent, swallowed = kafka_proxy.bytes_to_server, kafka_proxy.bytes_swallowed
                if n % 2:
                    kafka_proxy.swallow_replies()
                    await kafka_proxy.wait_until(partial(_more, kafka_proxy, "bytes_swallowed", swallowed))
                    kafka_proxy._swallowing = False
                else:
                    await kafka_proxy.wait_until(partial(_more, kafka_proxy, "bytes_to_server", sent))
                kafka_proxy.cut_connections()

        resets = asyncio.create_task(reset())
        await asyncio.gather(*map(work, workers))
        assert resets.done()
        await resets
    everything = [message for messages in workers for message in messages]
    records = await records_of(kafka, topic, len(everything))
    assert len(records) == len(everything)
    assert_in_order(records, everything)


async def test_bytes_of_an_abandoned_batch_are_fenced_by_the_next_one(
    kafka: Kafka, kafka_proxy: Proxy, unique: str
) -> None:
    """Even if they are still on their way: the broker refuses the old epoch once it has seen the new one."""
    topic = await create_topic(kafka, unique)
    options: dict[str, Any] = {"bootstrap_servers": kafka.proxied_bootstrap_servers, "publish_timeout_seconds": 1.0}
    async with opened(kafka, **options) as sink:
        assert statuses(await sink.publish([make_message(topic)])) == ["confirmed"]
        assert sink._context is not None
        partition = sink._context.topics[topic].partitions[0]
        assert partition.producer_id is not None
        abandoned = (partition.producer_id, partition.epoch, partition.sequence)
        kafka_proxy.swallow_replies()
        batch = [make_message(topic), make_message(topic)]
        [first, second] = await sink.publish(batch)
        assert (first.status, first.sink_down, second.status) == (Status.UNAVAILABLE, True, Status.DEFERRED)
        await kafka_proxy.heal()
        await publish_until_confirmed(sink, batch)
        builder = wire.batch_builder(0, 1_000)
        builder.append(0, 0, b"late", b"late", [])
        builder.set_producer_state(*abandoned)
        connection = await wire.connect(
            wire.Address(kafka.host, kafka.port), client_id="late", timeout_seconds=5, security=wire.Security()
        )
        answers = await wire.produce(connection, [(topic, 0, builder.build())], 5)
        await wire.close(connection, 1)
        assert answers[topic, 0].code == 47  # INVALID_PRODUCER_EPOCH
    assert b"late" not in [record.key for record in await records_of(kafka, topic, 3)]


async def test_a_cancelled_batch_is_sent_again_in_order(kafka: Kafka, kafka_proxy: Proxy, unique: str) -> None:
    """Cancelled at many moments of a slow wire, each time sent again from its first message."""
    topic = await create_topic(kafka, unique, partitions=3)
    messages = make_messages(topic, 600, keys=("a", "b", "c", "d"), payload=b"x" * 2_000)
    async with opened(kafka, bootstrap_servers=kafka.proxied_bootstrap_servers) as sink:
        assert statuses(await sink.publish([make_message(topic, key="warm")])) == ["confirmed"]
        for start in range(0, 600, 60):
            batch = messages[start : start + 60]
            forwarded = kafka_proxy.bytes_to_server
            task = asyncio.create_task(publish_until_confirmed(sink, batch))
            await kafka_proxy.wait_until(partial(_more, kafka_proxy, "bytes_to_server", forwarded + start * 100))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await publish_until_confirmed(sink, batch)
    assert_in_order(await records_of(kafka, topic, 600), messages)


@pytest.mark.parametrize("end", ["deadline", "cancellation"])
async def test_bytes_that_are_not_sent_yet_never_are(kafka: Kafka, kafka_proxy: Proxy, unique: str, end: str) -> None:
    """A record larger than all buffers on the way is given up half sent; when the way is free, it does not arrive."""
    topic = await create_topic(kafka, unique, max_message_bytes=50_000_000)
    large = make_message(topic, payload=b"x" * 40_000_000)
    options = {"publish_timeout_seconds": 1.5 if end == "deadline" else 60.0, "max_request_size": 50_000_000}
    async with opened(kafka, bootstrap_servers=kafka.proxied_bootstrap_servers, **options) as sink:
        assert statuses(await sink.publish([make_message(topic)])) == ["confirmed"]
        kafka_proxy.delay(5)
        task = asyncio.ensure_future(sink.publish([large]))
        if end == "cancellation":
            # Long enough to have written, well below the deadline.
            await asyncio.wait([task], timeout=0.5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            assert statuses(await task) == ["unavailable"]
        stuck = set(kafka_proxy._links)
        await kafka_proxy.heal()
        await kafka_proxy.wait_until(lambda: not stuck & kafka_proxy._links)
        await publish_until_confirmed(sink, [make_message(topic, key="after")])
    assert large.id not in ids_of(await records_of(kafka, topic, 2))


async def test_a_slow_connection_still_makes_progress(kafka: Kafka, kafka_proxy: Proxy, unique: str) -> None:
    """A batch that cannot pass before the deadline is sent in parts that can, and each is confirmed (FIELD.md F10)."""
    topic = await create_topic(kafka, unique, partitions=3)
    batch = make_messages(topic, 180, keys=("a", "b", "c", "d"), payload=b"x" * 5_000)
    options: dict[str, Any] = {"bootstrap_servers": kafka.proxied_bootstrap_servers, "publish_timeout_seconds": 2.0}
    async with opened(kafka, **options) as sink:
        assert statuses(await sink.publish([make_message(topic, key="warm")])) == ["confirmed"]
        kafka_proxy.throttle(300_000)  # three seconds for all of it
        assert CONFIRMED not in await sink.publish(batch)
        await publish_until_confirmed(sink, batch)
    assert_in_order(await records_of(kafka, topic, 181), batch)


async def test_a_refused_connection_answers_long_before_the_deadline(kafka: Kafka, kafka_proxy: Proxy) -> None:
    """Nobody waits thirty seconds to learn that the port is closed."""
    async with (
        opened(kafka, bootstrap_servers=kafka.proxied_bootstrap_servers, publish_timeout_seconds=30) as sink,
        asyncio.timeout(5),
    ):
        await sink.ping()
        kafka_proxy.cut()
        [outcome] = await sink.publish([make_message("anything")])
    assert (outcome.status, outcome.sink_down) == (Status.UNAVAILABLE, True)


async def test_nothing_is_left_behind_by_close(kafka: Kafka, unique: str) -> None:
    """No task and no descriptor, also when publishes were in flight."""
    topic = await create_topic(kafka, unique, partitions=3)
    tasks, descriptors = asyncio.all_tasks(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # counted, not read
    async with opened(kafka) as sink:
        flying = [asyncio.ensure_future(sink.publish(make_messages(topic, 500))) for _ in range(3)]
        await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
    assert {len(await publish) for publish in flying} == {500}
    assert asyncio.all_tasks() == tasks
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208  # counted, not read


# --- the broker ----------------------------------------------------------------------------------


async def test_a_frozen_broker_is_an_outage_and_order_survives_it(own_kafka: Kafka, unique: str) -> None:
    """SIGSTOP in the middle: unavailable within the deadline, `close` within 2 s; SIGCONT: nothing lost, in order."""
    topic = await create_topic(own_kafka, unique, partitions=3)
    messages = make_messages(topic, 400, keys=("a", "b", "c", "d"))
    async with opened(own_kafka, publish_timeout_seconds=3.0) as sink, opened(own_kafka) as other:
        assert set(statuses(await sink.publish(messages[:100]))) == {"confirmed"}
        assert statuses(await other.publish([make_message(topic, key="other")])) == ["confirmed"]
        own_kafka.freeze()
        began = monotonic()
        outcomes = await sink.publish(messages[100:200])
        assert monotonic() - began < 4
        assert {outcome.status for outcome in outcomes} == {Status.UNAVAILABLE, Status.DEFERRED}
        assert all(outcome.sink_down for outcome in outcomes if outcome.status is Status.UNAVAILABLE)
        began = monotonic()
        await other.close()
        assert monotonic() - began < 2
        own_kafka.thaw()
        for start in range(100, 400, 100):
            await publish_until_confirmed(sink, messages[start : start + 100])
    assert_in_order(await records_of(own_kafka, topic, 401), messages)


async def test_a_killed_broker_comes_back_and_nothing_is_lost(own_kafka: Kafka, unique: str) -> None:
    """Kill -9 while three workers publish, then a start: every key complete and in order (FIELD.md C1, C2)."""
    topic = await create_topic(own_kafka, unique, partitions=3)
    workers = [make_messages(topic, 3_000, keys=[f"{w}.{n}" for n in range(5)]) for w in range(3)]
    confirmed = asyncio.Event()
    async with opened(own_kafka, publish_timeout_seconds=5.0) as sink:

        async def work(messages: list[Message]) -> None:
            for start in range(0, len(messages), 100):
                await publish_until_confirmed(sink, messages[start : start + 100])
                confirmed.set()

        working = asyncio.gather(*map(work, workers))
        await confirmed.wait()
        own_kafka.kill9()
        [outcome] = await sink.publish([make_message(topic, key="probe")])
        assert outcome.sink_down
        await asyncio.to_thread(own_kafka.start)
        await working
    everything = [message for messages in workers for message in messages]
    assert_in_order(await records_of(own_kafka, topic, len(everything)), everything)


# --- rights --------------------------------------------------------------------------------------

PASSWORD = "p@ss:w/r%d"
_LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"


@pytest.fixture(scope="module")
def guarded_kafka() -> Iterator[Kafka]:
    """A broker whose second listener asks for a password, and which has an authorizer."""

    class Guarded(Kafka):
        def _settings(self) -> dict[str, object]:
            return {
                **super()._settings(),
                "advertised.listeners": f"PLAINTEXT://{self.host}:{self.port},PROXIED://{self.host}:{self.behind_proxy_port}",
                "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,PROXIED:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
                "sasl.enabled.mechanisms": "PLAIN",
                "listener.name.proxied.plain.sasl.jaas.config": f'{_LOGIN} user_relay="{PASSWORD}";',
                "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                "super.users": "User:ANONYMOUS",
                "allow.everyone.if.no.acl.found": "true",
            }

    yield from running(Guarded)


def guarded(kafka: Kafka, password: str = PASSWORD) -> dict[str, Any]:
    return {
        "bootstrap_servers": f"{kafka.host}:{kafka.behind_proxy_port}",
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_username": "relay",
        "sasl_password": password,
    }


async def test_a_wrong_password_waits_for_an_operator(
    guarded_kafka: Kafka, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The sink is down and says whose move it is; the password is not shown, not even at debug level (D8, F9)."""
    caplog.set_level(logging.DEBUG)
    async with opened(guarded_kafka, **guarded(guarded_kafka, "wr@ng:one")) as sink:
        [outcome] = await sink.publish([make_message(unique)])
        assert (outcome.status, outcome.sink_down, outcome.misconfigured) == (Status.UNAVAILABLE, True, True)
        assert "wr@ng:one" not in outcome.reason
        with pytest.raises(PermissionMissing) as caught:
            await sink.ping()
        assert "wr@ng:one" not in f"{caught.value} {caught.value.hint} {caplog.text}"


async def test_a_topic_without_the_right_to_write_waits_alone(guarded_kafka: Kafka, unique: str) -> None:
    """TOPIC_AUTHORIZATION_FAILED: its events wait for an operator; other topics flow in the same batch."""
    denied = await create_topic(guarded_kafka, f"{unique}.denied")
    granted = await create_topic(guarded_kafka, f"{unique}.granted")
    await deny_writes(guarded_kafka, denied)
    async with opened(guarded_kafka, **guarded(guarded_kafka)) as sink:
        await sink.ping()
        batch = [make_message(topic, key=topic) for topic in (denied, granted, denied)]
        outcomes = await sink.publish(batch)
    assert statuses(outcomes) == ["unavailable", "confirmed", "deferred"]
    assert (outcomes[0].sink_down, outcomes[0].misconfigured) == (False, True)
    assert "TOPIC_AUTHORIZATION_FAILED" in outcomes[0].reason
    assert ids_of(await records_of(guarded_kafka, granted, 1)) == ids(batch[1:2])


class _CreateAclsResponse(Response):  # type: ignore[misc]  # the library is not typed
    API_KEY = 30
    API_VERSION = 1
    SCHEMA = Schema(("throttle", Int32), ("results", Array(("code", Int16), ("message", String("utf-8")))))


class _CreateAclsRequest(RequestStruct):  # type: ignore[misc]  # the library is not typed
    API_KEY = 30
    API_VERSION = 1
    RESPONSE_TYPE = _CreateAclsResponse
    SCHEMA = Schema(
        (
            "creations",
            Array(
                *(("resource_type", Int8), ("resource_name", String("utf-8")), ("pattern_type", Int8)),
                *(("principal", String("utf-8")), ("host", String("utf-8"))),
                *(("operation", Int8), ("permission", Int8)),
            ),
        )
    )


class _CreateAcls(Request[_CreateAclsRequest]):  # type: ignore[misc]  # the library is not typed
    API_KEY = 30

    def __init__(self, topic: str) -> None:
        # Topic, literal name, Write, Deny: numbers of the protocol (kafka.apache.org/protocol, CreateAcls).
        self._creation = (2, topic, 3, "User:relay", "*", 4, 2)

    def build(self, request_struct_class: type[_CreateAclsRequest]) -> _CreateAclsRequest:
        return request_struct_class([self._creation])


async def deny_writes(kafka: Kafka, topic: str) -> None:
    """Take the right to write from the sink's user; aiokafka's admin client cannot."""
    connection = await wire.connect(
        wire.Address(kafka.host, kafka.port), client_id="admin", timeout_seconds=5, security=wire.Security()
    )
    try:
        answer = await connection.send(_CreateAcls(topic))
    finally:
        await wire.close(connection, 1)
    assert [code for code, _ in answer.results] == [0]
