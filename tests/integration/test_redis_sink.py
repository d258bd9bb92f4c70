"""What Redis and Valkey really do to the Redis sink: refusals, full memory, failover, cuts, late bytes."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis as Client

from relay.errors import InvalidConfig, PermissionMissing, SinkUnavailable
from relay.sink import Status
from relay.sinks.redis import RedisOptions, RedisSink
from relay.sinks.redis.connection import Connection, ConnectionLost
from relay.sinks.redis.options import Address
from relay.testing.delivery import assert_confirmed, ids, statuses
from relay.testing.messages import make_message, make_messages
from tests.servers.missing import skip_if_missing
from tests.servers.redis import Redis, Valkey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from relay.types import Message
    from tests.conftest import MakeProxy

DEADLINE_SECONDS = 1.0


@pytest.fixture(params=[Valkey, Redis], ids=["valkey", "redis"])
def server(request: pytest.FixtureRequest) -> Iterator[Valkey]:
    """A server of its own for one test, that it may fill up, freeze and configure."""
    with skip_if_missing(), request.param(persistent=False) as server:
        yield server


@pytest_asyncio.fixture
async def client(server: Valkey) -> AsyncIterator[Any]:
    """Another client of the same server; `Any`, because redis-py types each command as "awaitable or not"."""
    async with Client(host=server.host, port=server.port, decode_responses=True) as client:
        yield client


@asynccontextmanager
async def opened(url: str, **options: object) -> AsyncIterator[RedisSink]:
    """An open sink."""
    values = {"url": url, "publish_timeout_seconds": DEADLINE_SECONDS, **options}
    sink = RedisSink("events", RedisOptions.model_validate(values))
    await sink.open()
    try:
        yield sink
    finally:
        await sink.close()


async def entry_ids(client: Any, stream: str) -> list[str]:
    """Event ids in a stream, in order."""
    return [fields["id"] for _entry, fields in await client.xrange(stream)]


# --- what an entry looks like --------------------------------------------------------------------


async def test_an_entry_has_exactly_the_documented_fields(server: Valkey, client: Any) -> None:
    """Text of the headers as it is; a NULL column has no field."""
    full = make_message("s", key="k", payload=b'{"a": 1}', headers='{"n": 1.50,  "x": null}', created_at=1)
    bare = make_message("s", key=None, payload=None, headers=None, created_at=-1)
    async with opened(server.url) as sink:
        assert_confirmed(await sink.publish([full, bare]), 2)
    assert [fields for _entry, fields in await client.xrange("s")] == [
        {
            "id": full.id,
            "key": "k",
            "payload": '{"a": 1}',
            "headers": '{"n": 1.50,  "x": null}',
            "created_at": "1970-01-01T00:00:00.000001Z",
        },
        {"id": bare.id, "created_at": "1969-12-31T23:59:59.999999Z"},
    ]


async def test_a_stream_is_never_trimmed_unless_it_is_asked_for(server: Valkey, client: Any) -> None:
    """`maxlen` is off by default, and approximate when it is on (FIELD.md E7)."""
    batch = make_messages("all", 1_000)
    async with opened(server.url) as sink:
        assert_confirmed(await sink.publish(batch), 1_000)
    assert await client.xlen("all") == 1_000
    async with opened(server.url, maxlen=100) as sink:
        assert_confirmed(await sink.publish(make_messages("trimmed", 1_000)), 1_000)
    assert 100 <= await client.xlen("trimmed") < 300


async def test_database_and_client_name_of_the_options_are_used(server: Valkey, client: Any) -> None:
    """`/3` in the URL selects database 3, and CLIENT LIST shows who we are."""
    message = make_message("s")
    async with opened(f"redis://{server.host}:{server.port}/3", client_name="shop") as sink:
        assert_confirmed(await sink.publish([message]), 1)
        assert "shop" in [entry["name"] for entry in await client.client_list()]
    assert await client.xlen("s") == 0
    await client.select(3)
    assert await client.xlen("s") == 1


async def test_a_unix_socket_is_an_address_too(tmp_path: Path) -> None:
    """`unix:///path`."""
    path = tmp_path / "valkey.sock"
    with Valkey(persistent=False, settings={"unixsocket": path}):
        async with opened(f"unix://{path}") as sink:
            assert_confirmed(await sink.publish(make_messages("s", 3)), 3)


# --- one bad thing among many (FIELD.md E3) --------------------------------------------------------


async def test_of_a_hundred_streams_two_fail_and_98_are_settled(server: Valkey, client: Any) -> None:
    """A wrong type and a denied key each fail alone, and only the denied one asks for an operator."""
    await client.acl_setuser("app", enabled=True, passwords=["+p"], keys=["ok:*"], categories=["+@all"])
    await client.set("ok:17", "a string")
    batch = [make_message("denied" if n == 42 else f"ok:{n}", key=f"k{n}") for n in range(100)]
    async with opened(f"redis://app:p@{server.host}:{server.port}") as sink:
        outcomes = await sink.publish(batch)
        again = await sink.publish([batch[0]])
    assert statuses(outcomes).count(Status.CONFIRMED) == 98
    assert outcomes[17].reason.startswith("WRONGTYPE")
    assert outcomes[42].reason.startswith("NOPERM")
    assert [outcomes[n].misconfigured for n in (17, 42)] == [False, True]
    assert not any(outcome.sink_down for outcome in outcomes)
    assert_confirmed(again, 1)


async def test_a_group_of_many_fails_whole_on_a_wrong_type(server: Valkey, client: Any) -> None:
    """Several messages to a stream of the wrong type: each key's first fails, its others are deferred."""
    await client.set("bad", "a string")
    async with opened(server.url) as sink:
        outcomes = await sink.publish(make_messages("bad", 6, keys=("a", "b", None)))
    assert statuses(outcomes[:3]) == [Status.UNAVAILABLE] * 3
    assert statuses(outcomes[3:]) == [Status.DEFERRED, Status.DEFERRED, Status.UNAVAILABLE]


@pytest.mark.parametrize("may_ask", [True, False], ids=["limit known", "limit unknown"])
async def test_a_payload_over_the_servers_own_limit_hurts_only_its_key(
    server: Valkey, client: Any, *, may_ask: bool
) -> None:
    """`proto-max-bulk-len`: rejected if it is known; else its attempts are counted, and it is no outage (A2)."""
    await client.config_set("proto-max-bulk-len", 1024 * 1024)
    await client.acl_setuser(
        "app", enabled=True, passwords=["+p"], keys=["*"], categories=["+@all"], commands=[] if may_ask else ["-config"]
    )
    batch = [make_message("s", key=f"k{n % 4}") for n in range(12)]
    batch[5].payload = b"x" * 5_000_000
    async with opened(f"redis://app:p@{server.host}:{server.port}") as sink:
        outcomes = await sink.publish(batch)
    assert outcomes[5].status is Status.REJECTED if may_ask else outcomes[5].status is not Status.CONFIRMED
    assert not outcomes[5].sink_down
    assert outcomes[9].status is Status.DEFERRED
    assert statuses(outcomes).count(Status.CONFIRMED) == 10
    assert sorted(await entry_ids(client, "s")) == sorted(ids(m for m in batch if m not in (batch[5], batch[9])))


async def test_a_batch_over_the_servers_query_buffer_is_delivered(server: Valkey, client: Any) -> None:
    """`client-query-buffer-limit` ends connections without a word; what passes everywhere is sent at a time."""
    await client.config_set("client-query-buffer-limit", 1024 * 1024)
    batch = make_messages("s", 60, payload=b"x" * 100_000)
    async with opened(server.url) as sink:
        assert_confirmed(await sink.publish(batch), 60)
    assert await entry_ids(client, "s") == ids(batch)


async def test_a_message_that_ends_every_connection_hurts_only_its_key(server: Valkey, client: Any) -> None:
    """The server says nothing, but it is there when it is asked again: so it is this message's own failure."""
    await client.config_set("client-query-buffer-limit", 1024 * 1024)
    batch = [make_message("s", key=key) for key in ("a", "b", "b", "c")]
    batch[1].payload = b"x" * 5_000_000
    async with opened(server.url) as sink:
        outcomes = await sink.publish(batch)
    assert statuses(outcomes) == [Status.CONFIRMED, Status.UNAVAILABLE, Status.DEFERRED, Status.CONFIRMED]
    assert not outcomes[1].sink_down
    assert "too large" in outcomes[1].reason
    assert await entry_ids(client, "s") == ids([batch[0], batch[3]])


async def test_a_large_message_is_no_scapegoat_for_an_outage(server: Valkey, proxy: MakeProxy) -> None:
    """The connection ends while it is sent, and there is no other: then nobody's attempts are counted."""
    front = await proxy(server.host, server.port)
    async with opened(f"redis://{front.host}:{front.port}") as sink:
        assert_confirmed(await sink.publish([make_message("warm")]), 1)
        front.delay(0.1)
        sent = front.bytes_to_server
        task = asyncio.create_task(sink.publish([make_message("s", payload=b"x" * 5_000_000)]))
        await front.wait_until(lambda: front.bytes_to_server > sent)
        front.cut()
        [outcome] = await task
    assert (outcome.status, outcome.sink_down) == (Status.UNAVAILABLE, True)


# --- the whole server refuses (FIELD.md E4, E5) ---------------------------------------------------


async def test_out_of_memory_lets_in_all_of_a_streams_batch_or_nothing(server: Valkey, client: Any) -> None:
    """Without a transaction entry 3 would get in and entry 2 not (PROTOCOLS.md 21)."""
    used = (await client.info("memory"))["used_memory"]
    await client.config_set("maxmemory-policy", "noeviction")
    await client.config_set("maxmemory", used + 3_000_000)
    published: list[Message] = []
    async with opened(server.url) as sink:
        while True:
            batch = make_messages("s", 10, keys=("a", "b"), payload=b"x" * 20_000)
            outcomes = await sink.publish(batch)
            if outcomes[0].status is not Status.CONFIRMED:
                break
            published += batch
        assert outcomes[0].reason.startswith("OOM")
        assert outcomes[0].sink_down
        assert Status.CONFIRMED not in statuses(outcomes)
        assert await entry_ids(client, "s") == ids(published)
        await client.config_set("maxmemory", used // 2)
        with pytest.raises(SinkUnavailable, match="OOM"):
            await sink.ping()
        await client.config_set("maxmemory", 0)
        assert_confirmed(await sink.publish(batch), 10)
        assert await entry_ids(client, "s") == ids([*published, *batch])


async def test_a_replica_is_left_for_the_new_primary(server: Valkey, proxy: MakeProxy) -> None:
    """After READONLY the next attempt connects anew, and the same address leads to the promoted server."""
    message = make_message("s")
    with Valkey(persistent=False) as promoted:
        front = await proxy(server.host, server.port)
        async with (
            Client(host=server.host, port=server.port) as old,
            Client(host=promoted.host, port=promoted.port, decode_responses=True) as new,
            opened(f"redis://{front.host}:{front.port}") as sink,
        ):
            assert_confirmed(await sink.publish([make_message("s")]), 1)
            await old.replicaof(promoted.host, promoted.port)
            front.target = (promoted.host, promoted.port)
            [outcome] = await sink.publish([message])
            assert outcome.reason.startswith(("READONLY", "MASTERDOWN"))
            assert outcome.sink_down
            assert_confirmed(await sink.publish([message]), 1)
            assert await entry_ids(new, "s") == [message.id]


async def test_ping_notices_a_replica(server: Valkey, client: Any) -> None:
    """A server that answers PING but takes no writes is not ready."""
    async with opened(server.url) as sink:
        await sink.ping()
        await client.replicaof("127.0.0.1", 1)
        with pytest.raises(SinkUnavailable, match=r"READONLY|MASTERDOWN"):
            await sink.ping()
        await client.replicaof("NO", "ONE")
        await sink.ping()
    assert await client.dbsize() == 0


async def test_a_server_that_cannot_save_is_an_outage(tmp_path: Path) -> None:
    """MISCONF: nobody's attempts are counted for a full disk."""
    with Valkey(persistent=False, settings={"save": "3600 1000000", "dbfilename": "taken.rdb"}) as server:
        (server.folder / "taken.rdb" / "x").mkdir(parents=True)  # the snapshot cannot be renamed over it
        async with Client(host=server.host, port=server.port) as client, opened(server.url) as sink:
            assert_confirmed(await sink.publish([make_message("s")]), 1)
            await client.bgsave()
            while (await client.info("persistence"))["rdb_bgsave_in_progress"]:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
            [outcome] = await sink.publish([make_message("s")])
    assert outcome.reason.startswith("MISCONF")
    assert (outcome.sink_down, outcome.misconfigured) == (True, False)


# --- permissions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("denied", ["xadd", "multi", "exec"])
async def test_a_missing_command_permission_is_an_operators_task(server: Valkey, client: Any, denied: str) -> None:
    """Nothing goes through half: without MULTI a batch would lose its all-or-nothing."""
    await client.acl_setuser(
        "app", enabled=True, passwords=["+p"], keys=["*"], categories=["+@all"], commands=[f"-{denied}"]
    )
    async with opened(f"redis://app:p@{server.host}:{server.port}") as sink:
        outcomes = await sink.publish(make_messages("s", 3))
        with pytest.raises(PermissionMissing, match=denied) as caught:
            await sink.ping()
    assert (outcomes[0].status, outcomes[0].sink_down, outcomes[0].misconfigured) == (Status.UNAVAILABLE, True, True)
    assert await client.xlen("s") == 0
    assert "ACL" in caught.value.hint


async def test_the_least_permissions_are_enough(server: Valkey, client: Any) -> None:
    """Without CLIENT and CONFIG it works: those only make it better."""
    await client.acl_setuser(
        "app", enabled=True, passwords=["+p"], keys=["s*"], commands=["+ping", "+xadd", "+multi", "+exec"]
    )
    async with opened(f"redis://app:p@{server.host}:{server.port}") as sink:
        await sink.ping()
        assert await sink.advice() == []
        assert_confirmed(await sink.publish(make_messages("s", 3)), 3)


async def test_advice_names_a_policy_that_evicts_streams(server: Valkey, client: Any) -> None:
    """FIELD.md E5: `allkeys-lru` deletes streams that nobody has read."""
    async with opened(server.url) as sink:
        assert await sink.advice() == []
        await client.config_set("maxmemory-policy", "allkeys-lru")
        [advice] = await sink.advice()
    assert "allkeys-lru" in advice


# --- cuts, and bytes that come too late -----------------------------------------------------------


async def test_a_restart_between_two_batches_costs_nothing(server: Valkey, client: Any) -> None:
    """A connection that ended while it was idle is replaced before anything is sent on it."""
    async with opened(server.url) as sink:
        assert_confirmed(await sink.publish(make_messages("s", 3)), 3)
        await asyncio.to_thread(server.kill9)
        await asyncio.to_thread(server.start)
        assert_confirmed(await sink.publish(make_messages("s", 3)), 3)


async def test_a_batch_that_was_given_up_is_not_carried_out_later(
    server: Valkey, client: Any, proxy: MakeProxy
) -> None:
    """The whole batch was on its way when it was given up; it arrives after its repeat, and does nothing."""
    front = await proxy(server.host, server.port)
    batch = make_messages("s", 6)
    async with opened(f"redis://{front.host}:{front.port}") as sink:
        assert_confirmed(await sink.publish([make_message("warm")]), 1)
        links = set(front._links)
        front.delay(DEADLINE_SECONDS + 0.5)
        outcomes = await sink.publish(batch)
        assert Status.CONFIRMED not in statuses(outcomes)
        assert outcomes[0].reason.endswith("no answer within 1 s: unknown")
        await front.heal()
        assert_confirmed(await sink.publish(batch), 6)
        await front.wait_until(lambda: not links & front._links)  # the late bytes have gone on to the server
        assert_confirmed(await sink.publish([make_message("warm")]), 1)
    assert await entry_ids(client, "s") == ids(batch)


async def test_a_frozen_server_carries_out_nothing_after_the_repeat(server: Valkey, client: Any) -> None:
    """SIGSTOP for longer than the deadline: the old bytes run before the repeat or never."""
    batch, last = make_messages("s", 6, keys=("k",)), make_message("s", key="k")
    async with opened(server.url, client_name="relay") as sink:
        assert_confirmed(await sink.publish([make_message("warm")]), 1)
        server.freeze()
        assert Status.CONFIRMED not in statuses(await sink.publish(batch))
        server.thaw()
        assert_confirmed(await sink.publish(batch), 6)
        assert_confirmed(await sink.publish([last]), 1)
        assert [entry["name"] for entry in await client.client_list()].count("relay") == 1
    received = await entry_ids(client, "s")
    assert received in (ids([*batch, last]), ids([*batch, *batch, last]))


async def test_groups_that_were_answered_before_the_cut_are_confirmed(
    server: Valkey, client: Any, proxy: MakeProxy
) -> None:
    """A repeat is only what is really unknown (FIELD.md E1)."""
    await client.set("bad", "a string")
    front = await proxy(server.host, server.port)
    first, second, third = make_message("s1", key="a"), make_message("bad", key="b"), make_message("s3", key="b")
    async with opened(f"redis://{front.host}:{front.port}") as sink:
        assert_confirmed(await sink.publish([make_message("warm")]), 1)
        outcomes = await sink.publish([first, second, third])
        assert statuses(outcomes) == [Status.CONFIRMED, Status.UNAVAILABLE, Status.DEFERRED]


async def test_a_link_that_is_slower_than_the_deadline_makes_progress(
    server: Valkey, client: Any, proxy: MakeProxy
) -> None:
    """A batch takes longer than the deadline in all, and is confirmed, because it moves (FIELD.md F10)."""
    front = await proxy(server.host, server.port)
    batch = make_messages("s", 200, keys=("a", "b"), payload=b"x" * 10_000)
    async with opened(f"redis://{front.host}:{front.port}", publish_timeout_seconds=0.5) as sink:
        front.throttle(1_000_000)
        rest, attempts = batch, 0
        while rest:
            attempts += 1
            outcomes = await sink.publish(rest)
            rest = [m for m, outcome in zip(rest, outcomes, strict=True) if outcome.status is not Status.CONFIRMED]
        assert attempts <= 3
    received = await entry_ids(client, "s")
    assert list(dict.fromkeys(received)) == ids(batch)


async def test_connections_are_bounded_by_concurrency(server: Valkey, client: Any) -> None:
    """However many callers there are."""
    before = (await client.info("stats"))["total_connections_received"]
    async with opened(server.url, concurrency=2) as sink:
        outcomes = await asyncio.gather(*(sink.publish(make_messages(f"s{n}", 50)) for n in range(10)))
        for each in outcomes:
            assert_confirmed(each, 50)
        assert (await client.info("stats"))["total_connections_received"] - before == 2


async def test_close_ends_a_publish_that_is_still_connecting(server: Valkey, proxy: MakeProxy) -> None:
    """It has nothing to abort yet, and must not make SIGTERM wait for its own deadline."""
    front = await proxy(server.host, server.port)
    front.swallow_replies()
    async with opened(f"redis://{front.host}:{front.port}", publish_timeout_seconds=60) as sink:
        task = asyncio.create_task(sink.publish([make_message("s")]))
        await front.wait_until(lambda: front.connections == 1)
        await sink.close()
        [outcome] = await asyncio.wait_for(task, 1)
        assert outcome.sink_down
        [outcome] = await sink.publish([make_message("s")])
        assert "closed" in outcome.reason


async def test_handshakes_without_an_answer_leave_no_connections(server: Valkey, proxy: MakeProxy) -> None:
    """Each failed attempt closes its socket (FIELD.md C1)."""
    front = await proxy(server.host, server.port)
    front.swallow_replies()
    async with opened(f"redis://{front.host}:{front.port}", connect_timeout_seconds=0.02) as sink:
        for _ in range(20):
            [outcome] = await sink.publish([make_message("s")])
            assert "no answer in time" in outcome.reason
        await asyncio.wait_for(front.wait_until(lambda: front.open_connections == 0), 5)


def bytes_before_reset(reader: socket.socket) -> int:
    """How much a peer can read until the connection is reset; an orderly end fails the test."""
    received = 0
    try:
        while chunk := reader.recv(65_536):
            received += len(chunk)
    except ConnectionResetError:
        return received
    pytest.fail(f"an orderly end after {received} bytes")


@pytest.mark.parametrize("size", [200_000, 20_000_000], ids=["in the kernel's buffer", "in our buffer as well"])
async def test_an_abort_drops_what_has_not_been_sent(size: int) -> None:
    """The reader gets a reset and not the rest: bytes that were given up are not delivered late."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        host, port = listener.getsockname()
        connection = Connection(Address(host, port, None, 0, tls=False))
        await asyncio.get_running_loop().create_connection(lambda: connection, host, port)
        reader, _ = listener.accept()
        with reader:
            task = asyncio.create_task(connection.exchange(b"x" * size, 1))
            await asyncio.sleep(0)
            connection.abort()
            with pytest.raises(ConnectionLost):
                await task
            assert bytes_before_reset(reader) < size / 2


# --- TLS ------------------------------------------------------------------------------------------


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed certificate for 127.0.0.1, which is its own authority."""
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *name, *files]
    subprocess.run(command, check=True, capture_output=True)
    return tmp_path / "cert.pem"


async def test_tls_with_a_named_authority(certificate: Path, unused_tcp_port: int) -> None:
    """`rediss://` verifies the server; without its authority it is not spoken to."""
    settings = {
        "tls-port": unused_tcp_port,
        "tls-cert-file": certificate,
        "tls-key-file": certificate.with_name("key.pem"),
        "tls-ca-cert-file": certificate,
        "tls-auth-clients": "no",
    }
    with skip_if_missing(), Redis(persistent=False, settings=settings) as server:
        url = f"rediss://{server.host}:{unused_tcp_port}"
        async with opened(url, tls_ca_file=certificate) as sink:
            assert_confirmed(await sink.publish(make_messages("s", 100)), 100)
        async with opened(url) as sink:
            [outcome] = await sink.publish([make_message("s")])
    assert outcome.sink_down
    assert "certificate verify failed" in outcome.reason.lower()


async def test_an_unreadable_certificate_file_is_a_config_error(tmp_path: Path) -> None:
    """Said at start, with the file's name."""
    for file in (tmp_path / "missing.pem", tmp_path / "empty.pem"):
        (tmp_path / "empty.pem").touch()
        options = {"url": "rediss://127.0.0.1:1", "tls_ca_file": file}
        with pytest.raises(InvalidConfig, match=file.name):
            await RedisSink("events", RedisOptions.model_validate(options)).open()


# --- memory ---------------------------------------------------------------------------------------


def test_the_redis_sink_imports_no_other_brokers_client() -> None:
    """A relay that uses Redis does not pay for aiokafka, aio-pika or redis-py."""
    script = (
        "import json, sys; from relay.config import SinkSection; from relay.sinks import registry;"
        "registry.create('r', SinkSection(type='redis', url='redis://h'));"
        "print(json.dumps([m for m in ('aiokafka', 'aio_pika', 'aiormq', 'redis') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == []
