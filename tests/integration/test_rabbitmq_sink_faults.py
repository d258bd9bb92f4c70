"""A broker that is stopped, frozen, full, misconfigured or forbids: what is charged to whom, and what happens next."""

from __future__ import annotations

import asyncio
import json
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
import pytest_asyncio

from relay.errors import InvalidConfig, PermissionMissing, SinkUnavailable
from relay.sink import Outcome, Status
from relay.sinks.rabbitmq.wire import Channel
from relay.testing.messages import make_message, make_messages
from tests.conftest import running
from tests.integration.rabbitmq_topology import (
    EXCHANGE,
    Topology,
    collector_of,
    ids,
    new_sink,
    open_sink,
    publish_until_confirmed,
    repeating,
    statuses,
    topology_of,
)
from tests.servers.rabbitmq import RabbitMQ

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from pamqp import commands as spec

    from relay.sinks.rabbitmq import RabbitMQSink
    from tests.conftest import MakeProxy

CONFIRMED, UNAVAILABLE, DEFERRED, REJECTED = Status.CONFIRMED, Status.UNAVAILABLE, Status.DEFERRED, Status.REJECTED
MESSAGE_BYTES_MAX = 1_000_000


@pytest.fixture(scope="module")
def shared_victim() -> Iterator[RabbitMQ]:
    """A broker that only these tests hurt, one after the other; it takes messages of 1 MB at most."""
    yield from running(lambda: RabbitMQ(settings={"max_message_size": MESSAGE_BYTES_MAX}))


@pytest.fixture
def victim(shared_victim: RabbitMQ, unique: str) -> Iterator[RabbitMQ]:
    """The broker with a fresh vhost named `unique`, well again afterwards."""
    shared_victim.add_vhost(unique)
    yield shared_victim
    shared_victim.thaw()
    shared_victim.start()
    if unique in str(shared_victim.api("GET", "/api/vhosts")):
        shared_victim.delete_vhost(unique)


@pytest_asyncio.fixture
async def topology(victim: RabbitMQ, unique: str) -> AsyncIterator[Topology]:
    async with topology_of(victim.url(unique)) as made:
        yield made


@pytest_asyncio.fixture
async def sink(victim: RabbitMQ, unique: str, topology: Topology) -> AsyncIterator[RabbitMQSink]:
    async with open_sink(victim.url(unique)) as opened:
        yield opened


def assert_down(outcomes: Sequence[Outcome], *, misconfigured: bool = False) -> str:
    """The whole sink is unavailable, for one reason, which is returned."""
    assert set(statuses(outcomes)) <= {UNAVAILABLE, DEFERRED}
    failed = [outcome for outcome in outcomes if outcome.status is UNAVAILABLE]
    assert failed
    assert {(outcome.sink_down, outcome.misconfigured) for outcome in failed} == {(True, misconfigured)}
    return failed[0].reason


# --- the exchange ---


async def test_a_missing_exchange_waits_for_an_operator(vhost: str) -> None:
    """`ping` and `publish` name it; once it is there, everything goes."""
    async with open_sink(vhost, exchange="missing") as sink:
        batch = make_messages("q", 6, keys=("a", "b", None))
        assert "no exchange 'missing'" in assert_down(await sink.publish(batch), misconfigured=True)
        with pytest.raises(InvalidConfig, match="no exchange 'missing'") as caught:
            await sink.ping()
        assert "Create the exchange" in caught.value.hint
        async with topology_of(vhost, exchange="missing") as topology:
            queue = await topology.queue("q")
            await sink.ping()
            assert statuses(await sink.publish(batch)) == [CONFIRMED] * 6
            assert len(await topology.drain(queue)) == 6


async def test_an_exchange_that_is_deleted_and_made_again_loses_nothing(vhost: str) -> None:
    """FIELD.md D4: in the middle of a run; what was in flight is sent again, once, in order."""
    async with topology_of(vhost) as topology, open_sink(vhost) as sink:
        await topology.queue("q")
        batch = make_messages("q", 80, keys=[f"k{n}" for n in range(8)])

        async def make_again() -> None:
            await topology.channel.exchange_delete(EXCHANGE)
            await topology.channel.declare_exchange(EXCHANGE, durable=True)
            await topology.queue("q")

        async with collector_of(vhost, "q") as consumer:
            async with repeating(make_again):
                attempts = await publish_until_confirmed(sink, batch)
            await consumer.assert_complete_and_in_order(batch)
        assert attempts > 1, "the exchange was never missed, so nothing was tried"


# --- rights (FIELD.md D8) ---


def add_user(broker: RabbitMQ, name: str, vhost: str, *, write: str) -> str:
    """A user with the right to write; its URL."""
    broker.api("PUT", f"/api/users/{name}", {"password": "pw", "tags": ""})
    broker.api("PUT", f"/api/permissions/{vhost}/{name}", {"configure": "", "write": write, "read": ""})
    return broker.url(vhost, name, "pw")


async def test_a_user_who_may_not_write_is_an_operators_task(victim: RabbitMQ, unique: str, topology: Topology) -> None:
    async with open_sink(add_user(victim, unique, unique, write="other")) as sink:
        outcomes = await sink.publish(make_messages("q", 4))
        assert "refused for user" in assert_down(outcomes, misconfigured=True)
        victim.api("PUT", f"/api/permissions/{unique}/{unique}", {"configure": "", "write": ".*", "read": ""})
        await topology.queue("q")
        # RabbitMQ caches rights for a channel, so this also proves that a fresh one is used.
        assert statuses(await sink.publish(make_messages("q", 2))) == [CONFIRMED] * 2


async def test_a_routing_key_that_is_forbidden_holds_back_only_its_messages(victim: RabbitMQ, unique: str) -> None:
    """Topic permissions close the channel for one message: found, set apart, the others go."""
    url = add_user(victim, unique, unique, write=".*")
    victim.api(
        "PUT", f"/api/topic-permissions/{unique}/{unique}", {"exchange": EXCHANGE, "write": "^free", "read": ".*"}
    )
    async with topology_of(victim.url(unique)) as topology:
        await topology.channel.exchange_delete(EXCHANGE)
        await topology.channel.declare_exchange(EXCHANGE, "topic", durable=True)
        queue = await topology.queue("q", "free.1", "secret.1")
        async with open_sink(url) as sink:
            batch = [make_message("free.1", key=f"k{n % 5}") for n in range(20)]
            batch[6] = make_message("secret.1", key="k1")
            outcomes = await sink.publish(batch)
        assert (outcomes[6].status, outcomes[6].sink_down, outcomes[6].misconfigured) == (UNAVAILABLE, False, True)
        assert statuses(outcomes[11::5]) == [DEFERRED] * 2
        assert statuses(outcomes).count(CONFIRMED) == 17
        received = ids(await topology.drain(queue))
        confirmed = [m.id for m, outcome in zip(batch, outcomes, strict=True) if outcome.status is CONFIRMED]
        assert set(received) == set(confirmed)


@pytest.mark.parametrize("wrong", ["vhost", "user", "password"])
async def test_a_wrong_address_within_the_broker_is_an_operators_task(rabbitmq: RabbitMQ, wrong: str) -> None:
    url = {
        "vhost": rabbitmq.url("no-such-vhost"),
        "user": rabbitmq.url("/", "nobody", "pw-secret"),
        "password": rabbitmq.url("/", "guest", "pw-secret"),
    }[wrong]
    async with open_sink(url) as sink:
        reason = assert_down(await sink.publish(make_messages("q", 4)), misconfigured=True)
        with pytest.raises(PermissionMissing) as caught:
            await sink.ping()
        assert "pw-secret" not in reason + str(caught.value) + caught.value.hint
        assert caught.value.hint


async def test_a_vhost_that_is_deleted_mid_run_is_an_operators_task(
    victim: RabbitMQ, unique: str, sink: RabbitMQSink, topology: Topology
) -> None:
    await topology.queue("q")
    assert statuses(await sink.publish([make_message("q")])) == [CONFIRMED]
    victim.delete_vhost(unique)
    # The first may only learn that its connection was closed; the next one is refused with the reason.
    await sink.publish([make_message("q")])
    assert_down(await sink.publish([make_message("q")]), misconfigured=True)


async def test_a_server_of_another_protocol_version_is_an_operators_task() -> None:
    """By AMQP's rules it answers with the version it speaks, and hangs up."""

    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"AMQP\x00\x01\x00\x00")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, open_sink(f"amqp://guest:guest@127.0.0.1:{port}/") as sink:
        assert "does not speak AMQP 0-9-1" in assert_down(await sink.publish([make_message("q")]), misconfigured=True)
        with pytest.raises(InvalidConfig, match="does not speak AMQP 0-9-1"):
            await sink.ping()


# --- one message that the broker closes the channel for ---


async def test_a_message_that_the_broker_cannot_take_is_found_and_rejected(
    sink: RabbitMQSink, topology: Topology
) -> None:
    """The limit is the broker's own (`max_message_size`). It names no message, so it is found by halves."""
    queue = await topology.queue("q")
    batch = make_messages("q", 100, keys=[f"k{n}" for n in range(10)])
    for at in (20, 57):
        batch[at] = make_message("q", key=batch[at].key, payload=b"x" * (MESSAGE_BYTES_MAX + 1))
    outcomes = await sink.publish(batch)
    assert statuses([outcomes[20], outcomes[57]]) == [REJECTED] * 2
    assert "larger than configured max size" in outcomes[20].reason
    assert statuses(outcomes[30::10]) == [DEFERRED] * 7
    assert statuses(outcomes[67::10]) == [DEFERRED] * 4
    confirmed = [m.id for m, outcome in zip(batch, outcomes, strict=True) if outcome.status is CONFIRMED]
    assert len(confirmed) == 100 - 2 - 7 - 4
    first_deliveries = list(dict.fromkeys(ids(await topology.drain(queue))))
    assert sorted(map(str, first_deliveries)) == sorted(confirmed)
    for key in {message.key for message in batch}:
        mine = [m.id for m in batch if m.key == key and m.id in confirmed]
        assert [event for event in first_deliveries if event in mine] == mine


async def test_a_batch_of_nothing_but_bad_messages_is_rejected(sink: RabbitMQSink, topology: Topology) -> None:
    await topology.queue("q")
    batch = make_messages("q", 5, keys=(None,), payload=b"x" * (MESSAGE_BYTES_MAX + 1))
    assert statuses(await sink.publish(batch)) == [REJECTED] * 5


# --- the broker as a whole ---


async def test_a_broker_that_is_killed_mid_batch_loses_nothing_confirmed(victim: RabbitMQ, unique: str) -> None:
    """Kill -9 between two confirms, and a start: complete and in order for each key (FIELD.md C1)."""
    url = victim.url(unique)
    async with topology_of(url) as topology:
        await topology.queue("q")
    batch = make_messages("q", 3_000, keys=[f"k{n}" for n in range(30)])
    async with open_sink(url) as sink:
        async with topology_of(url) as topology:
            assert statuses(await sink.publish(batch[:300])) == [CONFIRMED] * 300
            task = asyncio.create_task(sink.publish(batch[300:]))
            queue = await topology.queue("q")
            while ((await queue.declare()).message_count or 0) < 600:
                assert not task.done()
        await asyncio.to_thread(victim.kill9)
        outcomes = await task
        unknown = [m for m, outcome in zip(batch[300:], outcomes, strict=True) if outcome.status is not CONFIRMED]
        assert_down([outcome for outcome in outcomes if outcome.status is not CONFIRMED])
        assert unknown
        with pytest.raises(SinkUnavailable):
            await sink.ping()
        await asyncio.to_thread(victim.start)
        await publish_until_confirmed(sink, unknown)
        async with collector_of(url, "q") as consumer:
            await consumer.assert_complete_and_in_order(batch)


async def test_a_frozen_broker_is_given_up_at_the_deadline_and_found_again(
    victim: RabbitMQ, unique: str, sink: RabbitMQSink, topology: Topology
) -> None:
    """SIGSTOP: connections stay open and nothing answers."""
    await topology.queue("q")
    warm, batch = make_messages("q", 1), make_messages("q", 40, keys=("a", "b", None))
    assert statuses(await sink.publish(warm)) == [CONFIRMED]
    victim.freeze()
    started = monotonic()
    reason = assert_down(await sink.publish(batch))
    assert "did not answer within 2 s" in reason
    with pytest.raises(SinkUnavailable, match="did not answer"):
        await sink.ping()
    assert monotonic() - started < 7
    victim.thaw()
    await publish_until_confirmed(sink, batch)
    async with collector_of(victim.url(unique), "q") as consumer:
        await consumer.assert_complete_and_in_order([*warm, *batch])


async def test_close_is_quick_with_a_frozen_broker(victim: RabbitMQ, unique: str, topology: Topology) -> None:
    """With a batch in flight, which is then unknown."""
    await topology.queue("q")
    sink = new_sink(victim.url(unique), publish_timeout_seconds=20.0)
    assert statuses(await sink.publish(make_messages("q", 3))) == [CONFIRMED] * 3
    victim.freeze()
    task = asyncio.create_task(sink.publish(make_messages("q", 3)))
    await asyncio.sleep(0)
    started = monotonic()
    await sink.close()
    assert monotonic() - started < 2
    assert_down(await task)


async def test_a_resource_alarm_blocks_until_it_is_over(
    victim: RabbitMQ, sink: RabbitMQSink, topology: Topology
) -> None:
    """FIELD.md D2: bounded, named, and the batch that waits goes as soon as the alarm ends."""
    queue = await topology.queue("q")
    assert statuses(await sink.publish([make_message("q")])) == [CONFIRMED]
    await asyncio.to_thread(victim.ctl, "set_vm_memory_high_watermark", "0")
    try:
        batch = make_messages("q", 10)
        assert "resource alarm" in assert_down(await sink.publish(batch))
        patient = new_sink(sink._options.url.get_secret_value(), publish_timeout_seconds=30.0)
        task = asyncio.create_task(patient.publish(batch))
        with pytest.raises(SinkUnavailable, match="resource alarm"):
            await ping_until_it_fails(patient)
        assert not task.done()
    finally:
        await asyncio.to_thread(victim.ctl, "set_vm_memory_high_watermark", "0.4")
    assert statuses(await asyncio.wait_for(task, 10)) == [CONFIRMED] * 10
    await patient.close()
    received = ids(await topology.drain(queue))
    assert [event for event in dict.fromkeys(received) if event in ids(batch)] == ids(batch)


async def ping_until_it_fails(sink: RabbitMQSink) -> None:
    """A ping right after connecting succeeds: the broker tells a client that it is blocked when it publishes."""
    async with asyncio.timeout(15):
        while True:
            await sink.ping()


async def test_a_connection_that_an_administrator_closes_is_replaced(
    victim: RabbitMQ, unique: str, sink: RabbitMQSink, topology: Topology
) -> None:
    """CONNECTION_FORCED, as at a broker's shutdown: tried again, no operator is asked."""
    await topology.queue("q")
    assert statuses(await sink.publish([make_message("q")])) == [CONFIRMED]
    name = await connection_of(victim, "outbox-relay sink rabbit", unique)
    victim.api("DELETE", f"/api/connections/{quote(name)}")
    wire = sink._connections._wire
    assert wire is not None
    await asyncio.wait({wire._connection.closing})
    assert wire.ended is not None
    assert wire.ended.code == 320
    assert statuses(await sink.publish([make_message("q")])) == [CONFIRMED]


async def connection_of(broker: RabbitMQ, name: str, vhost: str) -> str:
    """RabbitMQ's own name of the connection that a client named so; statistics appear after a moment."""
    async with asyncio.timeout(20):
        while True:
            connections = await asyncio.to_thread(broker.api, "GET", f"/api/vhosts/{vhost}/connections")
            assert isinstance(connections, list)
            for connection in connections:
                if name in json.dumps(connection.get("client_properties", {})):
                    return str(connection["name"])


# --- silence ---


async def test_a_queue_that_does_not_confirm_holds_back_only_its_messages(
    vhost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quorum queue without its majority: the channel answers, one confirm never comes. Others are confirmed."""
    async with topology_of(vhost) as topology, open_sink(vhost, publish_timeout_seconds=1.0) as sink:
        await topology.queue("q")
        batch = make_messages("q", 12, keys=("a", "b", "c"))
        await sink.publish([make_message("q")])  # so that the tags below are those of the second batch
        monkeypatch.setattr(Channel, "_answered", ignoring_tag(2 + 1))
        outcomes = await sink.publish(batch)
        assert [outcome.status for outcome in outcomes[1::3]] == [UNAVAILABLE, DEFERRED, DEFERRED, DEFERRED]
        assert statuses([*outcomes[0::3], *outcomes[2::3]]) == [CONFIRMED] * 8
        assert "the queue did not confirm" in outcomes[1].reason
        assert not outcomes[1].sink_down
        monkeypatch.undo()
        assert statuses(await sink.publish(batch[1::3])) == [CONFIRMED] * 4


def ignoring_tag(unheard: int) -> object:
    """A `Channel._answered` that hears every confirm but one."""

    def answered(channel: Channel, frame: spec.Basic.Ack) -> None:
        listener, last = channel.listener, frame.delivery_tag or 0
        assert listener is not None
        # Confirms are taken one by one, because one with `multiple` would include the unheard.
        known = getattr(channel, "heard", 0)
        for tag in range(known + 1 if frame.multiple else last, last + 1):
            if tag != unheard and channel.listener is listener:
                listener.acknowledged(tag, multiple=False)
        channel.__dict__["heard"] = max(known, last)

    return answered


async def test_a_slow_broker_is_not_given_up_while_it_confirms(
    rabbitmq: RabbitMQ, unique: str, vhost: str, proxy: MakeProxy
) -> None:
    """The batch takes longer than `publish_timeout_seconds`: sending it again would make it slower still."""
    slow = await proxy(rabbitmq.host, rabbitmq.port)
    url = f"amqp://guest:guest@{slow.host}:{slow.port}/{unique}"
    async with topology_of(vhost) as topology, open_sink(url, publish_timeout_seconds=1.0) as sink:
        queue = await topology.queue("q")
        await sink.ping()
        slow.throttle(60_000)
        started = monotonic()
        batch = make_messages("q", 100, keys=(None,), payload=b"x" * 1_000)
        assert statuses(await sink.publish(batch)) == [CONFIRMED] * 100
        assert monotonic() - started > 1.0
        assert len(await topology.drain(queue)) == 100


async def test_a_sink_that_is_too_slow_in_all_is_given_up(
    rabbitmq: RabbitMQ, unique: str, vhost: str, proxy: MakeProxy
) -> None:
    """Bounded all the same: four times `publish_timeout_seconds`."""
    slow = await proxy(rabbitmq.host, rabbitmq.port)
    url = f"amqp://guest:guest@{slow.host}:{slow.port}/{unique}"
    async with topology_of(vhost) as topology, open_sink(url, publish_timeout_seconds=0.5) as sink:
        await topology.queue("q")
        await sink.ping()
        slow.throttle(40_000)
        started = monotonic()
        outcomes = await sink.publish(make_messages("q", 1_000, keys=(None,), payload=b"x" * 1_000))
        assert monotonic() - started < 3.5
        found = statuses(outcomes)
        assert found.count(CONFIRMED) > 0
        assert_down([outcome for outcome in outcomes if outcome.status is not CONFIRMED])


# --- what is left behind ---


@pytest.mark.parametrize("given_up_by", ["timeout", "cancellation"])
async def test_unsent_bytes_of_a_batch_that_was_given_up_are_never_sent(
    victim: RabbitMQ, unique: str, topology: Topology, given_up_by: str
) -> None:
    """Without keys the whole batch is written at once, so the process and the kernel hold most of it.

    A frozen broker finds only what its own receive buffer has (128 kB), not our side's megabytes.
    """
    queue = await topology.queue("q")
    batch = make_messages("q", 40, keys=(None,), payload=b"x" * 900_000)
    async with open_sink(victim.url(unique), publish_timeout_seconds=1.0) as sink:
        assert statuses(await sink.publish([make_message("q")])) == [CONFIRMED]  # so that there is an open channel
        victim.freeze()
        if given_up_by == "timeout":
            assert_down(await sink.publish(batch))  # no task: the event loop gets no turn between its end and the thaw
        else:
            task = asyncio.create_task(sink.publish(batch))
            await asyncio.wait([task], timeout=0.3)  # inside `publish`, which the next line asserts
            assert task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        victim.thaw()
        marker = make_message("q")
        await publish_until_confirmed(sink, [marker])
    received = ids(await topology.drain(queue))
    assert marker.id in received
    assert not set(received) & set(ids(batch[1:]))


async def test_failed_attempts_leave_no_tasks(rabbitmq: RabbitMQ, unique: str, vhost: str, proxy: MakeProxy) -> None:
    """Refused, cut in the handshake, and refused by the broker: nothing of the client library stays behind."""
    broken = await proxy(rabbitmq.host, rabbitmq.port)
    url = f"amqp://guest:guest@{broken.host}:{broken.port}/{unique}"
    async with topology_of(vhost) as topology, open_sink(url) as sink, open_sink(rabbitmq.url("nowhere")) as refused:
        await topology.queue("q")
        assert statuses(await sink.publish([make_message("q")])) == [CONFIRMED]
        before = {task for task in asyncio.all_tasks() if "aiormq" in repr(task)}
        for attempt in range(20):
            broken.cut()
            assert_down(await sink.publish([make_message("q")]))
            assert_down(await refused.publish([make_message("q")]), misconfigured=True)
            if attempt % 5 == 4:
                await broken.heal()
                await publish_until_confirmed(sink, [make_message("q")])
        broken.cut()
        assert_down(await sink.publish([make_message("q")]))
        left = {task for task in asyncio.all_tasks() if "aiormq" in repr(task)} - before
        _, pending = await asyncio.wait(left, timeout=5) if left else (None, None)
        assert not pending


async def test_the_client_library_logs_nothing_of_an_outage(
    rabbitmq: RabbitMQ, unique: str, vhost: str, proxy: MakeProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """The outcome's reason is the one line; probes every two seconds would fill the log with tracebacks."""
    broken = await proxy(rabbitmq.host, rabbitmq.port)
    url = f"amqp://guest:guest@{broken.host}:{broken.port}/{unique}"
    async with topology_of(vhost) as topology, open_sink(url) as sink:
        await topology.queue("q")
        assert statuses(await sink.publish([make_message("q")])) == [CONFIRMED]
        broken.cut()
        for _ in range(3):
            assert_down(await sink.publish([make_message("q")]))
    assert [record for record in caplog.records if record.name.startswith(("aiormq", "aio_pika.connection"))] == []


async def test_an_idle_connection_is_kept_by_heartbeats(
    rabbitmq: RabbitMQ, unique: str, vhost: str, proxy: MakeProxy
) -> None:
    """For longer than the two heartbeats after which RabbitMQ drops a silent client (FIELD.md D7)."""
    watched = await proxy(rabbitmq.host, rabbitmq.port)
    url = f"amqp://guest:guest@{watched.host}:{watched.port}/{unique}"
    async with topology_of(vhost) as topology, open_sink(url, heartbeat_seconds=1) as sink:
        await topology.queue("q")
        assert statuses(await sink.publish([make_message("q")])) == [CONFIRMED]
        await asyncio.sleep(3.5)  # the passing of time is what is tested
        assert statuses(await sink.publish([make_message("q")])) == [CONFIRMED]
        assert watched.connections == 1
