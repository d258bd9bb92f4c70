"""What an operator gets for a mistake: an exit code, one clear line with the next step, and no traceback."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import pytest

from relay.demo.processes import free_port
from tests.acceptance.consumers import redis_consumer
from tests.acceptance.judges import left_behind
from tests.acceptance.pods import eventually, relay_command, settings_of
from tests.acceptance.writers import insert

if TYPE_CHECKING:
    from pathlib import Path

    from tests.acceptance.pods import Pods
    from tests.outbox import Outbox, OutboxFactory
    from tests.servers.redis import Valkey

NULL_SINK = {"main": {"type": "null"}}
REFUSED = "postgresql://relay:secret%40word@127.0.0.1:{port}/shop"

MISTAKES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "a near miss in a section": ({"database": {"dns": "x"}}, "run", ["[database]", "dns", "did you mean `dsn`"]),
    "an unknown section": ({"datbase": {"dsn": "x"}}, "run", ["datbase", "database"]),
    "an unknown kind of sink": ({"sinks": {"main": {"type": "reddis"}}}, "run", ["reddis", "redis"]),
    "an option that the sink does not have": (
        {"sinks": {"main": {"type": "redis", "ulr": "redis://h/0"}}}, "run", ["sinks.main", "url"],
    ),
    "a route to a sink that is not there": (
        {"routes": [{"topic": "*", "sinks": ["mian"]}]}, "run", ["mian", "main"],
    ),
    "a password with bare characters": (
        {"database": {"dsn": "postgresql://relay:a/b@h/d"}}, "run", ["[database] dsn", "%2F"],
    ),
}  # fmt: skip


def assert_one_clear_line(printed: str, texts: list[str]) -> None:
    """Names the object and the next step; shows neither a traceback nor a secret."""
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, printed
    assert "Traceback" not in printed
    for text in texts:
        assert text in printed, (text, printed)


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_a_mistake_in_the_settings_ends_with_code_2_and_names_the_setting(tmp_path: Path, mistake: str) -> None:
    """Before anything is connected."""
    wrong, command, texts = MISTAKES[mistake]
    settings = {"database": {"dsn": "postgresql://h/d"}, "sinks": NULL_SINK, **wrong}
    done = await asyncio.to_thread(relay_command, tmp_path, command, settings=settings)
    assert done.returncode == 2, done
    assert_one_clear_line(done.stderr, texts)


async def test_a_missing_dsn_is_named(tmp_path: Path) -> None:
    """With the variable and the key that would set it."""
    done = await asyncio.to_thread(relay_command, tmp_path, "run", settings={"sinks": NULL_SINK})
    assert done.returncode == 2
    assert_one_clear_line(done.stderr, ["RELAY_DATABASE__DSN", "[database] dsn"])


async def test_check_says_that_the_database_cannot_be_reached(tmp_path: Path) -> None:
    """Exit 1, the address, and no password."""
    settings = {"database": {"dsn": REFUSED.format(port=free_port())}, "sinks": NULL_SINK}
    done = await asyncio.to_thread(relay_command, tmp_path, "check", settings=settings)
    assert done.returncode == 1, done
    printed = done.stdout + done.stderr
    assert "database" in printed
    assert "fail" in printed
    assert "Traceback" not in printed
    assert "secret" not in printed


async def test_a_wrong_password_stops_the_relay_with_a_hint(
    outbox: Outbox, pods: Pods, tmp_path: Path, unique: str
) -> None:
    """Exit 3: waiting would not help. Neither password nor traceback is printed."""
    hba = outbox.server.data / "pg_hba.conf"
    outbox.execute(f"CREATE ROLE {unique} LOGIN PASSWORD 'right'")
    before = hba.read_text()
    hba.write_text(f"host all {unique} 127.0.0.1/32 scram-sha-256\n{before}")
    outbox.execute("SELECT pg_reload_conf()")
    try:
        dsn = outbox.server.dsn(outbox.name, unique, "wr0ng-secret")
        pod = await pods.launch(settings_of(outbox, NULL_SINK, database={"dsn": dsn}))
        assert await pod.exit_code() == 3
        assert_one_clear_line(pod.printed, [unique, "hint: ", "password"])
        assert "wr0ng-secret" not in pod.printed
    finally:
        hba.write_text(before)
        outbox.execute("SELECT pg_reload_conf()")
        outbox.execute(f"DROP ROLE {unique}")


async def test_a_database_without_the_tables_stops_the_relay_with_the_command(
    outbox_factory: OutboxFactory, pods: Pods
) -> None:
    """Exit 3 and `relay migrate`."""
    pod = await pods.launch(settings_of(outbox_factory(migrated=False), NULL_SINK))
    assert await pod.exit_code() == 3
    assert_one_clear_line(pod.printed, ["hint: ", "relay migrate"])


async def test_an_outbox_made_with_other_options_stops_the_relay(outbox: Outbox, pods: Pods) -> None:
    """The payload's type is fixed when the table is made: exit 3, both types and the setting named."""
    pod = await pods.launch(settings_of(outbox, NULL_SINK, database={"payload": "bytea"}))
    assert await pod.exit_code() == 3
    assert_one_clear_line(pod.printed, ["json", "bytea", "database.payload"])


async def test_a_port_that_is_taken_is_named(outbox: Outbox, pods: Pods) -> None:
    """It ends instead of running without probes."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        address = "{}:{}".format(*taken.getsockname())
        pod = await pods.launch(settings_of(outbox, NULL_SINK, http={"bind": address}))
        assert await pod.exit_code() in {1, 2, 3}
        assert_one_clear_line(pod.printed, [address, "http"])


async def test_a_topic_that_no_route_takes_becomes_a_dead_letter_and_goes_where_a_later_route_sends_it(
    outbox: Outbox, pods: Pods, valkey: Valkey, unique: str, tmp_path: Path
) -> None:
    """Kind `unrouted`, never silence; `retry` sends it once there is a route."""
    settings = settings_of(
        outbox, {"main": {"type": "redis", "url": valkey.url}}, routes=[{"topic": f"{unique}.known", "sinks": ["main"]}]
    )
    pod = await pods.start(settings)
    async with redis_consumer(valkey.url, [f"{unique}.known", f"{unique}.other"]) as consumer:
        other, known = await insert(outbox, [(f"{unique}.other", "k", "{}"), (f"{unique}.known", "k", "{}")])
        await consumer.wait_for([known])

        async def buried() -> bool:
            return left_behind(outbox) == {"unsettled": 0, "parked": 0, "dead letters": 1}

        await eventually("the dead letter", buried)
        assert outbox.execute("SELECT id::text, kind FROM {dead_letter}") == [(other, "unrouted")]
        assert await pod.stopped() == 0
        settings["routes"] = [{"topic": "*", "sinks": ["main"]}]
        pod = await pods.start(settings)
        retried = await asyncio.to_thread(
            relay_command, tmp_path, "dead-letters", "retry", "--kind", "unrouted", settings=settings
        )
        assert retried.returncode == 0, retried.stderr
        await consumer.wait_for([other])
        assert await pod.stopped() == 0


async def test_unrouted_stop_ends_the_relay_and_names_the_topic(outbox: Outbox, pods: Pods, unique: str) -> None:
    """A person has to add a route; the event stays where it is."""
    routes = [{"topic": "known", "sinks": ["main"]}]
    pod = await pods.start(settings_of(outbox, NULL_SINK, routes=routes, unrouted="stop"))
    await insert(outbox, [(f"{unique}.other", "k", "{}")])
    assert await pod.exit_code() == 3
    assert_one_clear_line(pod.printed, [f"{unique}.other", "hint: "])
    assert left_behind(outbox) == {"unsettled": 1, "parked": 0, "dead letters": 0}
