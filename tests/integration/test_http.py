"""The HTTP server of a pod: what probes and scrapers get, and that it leaves signals and ports alone."""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import TYPE_CHECKING

import orjson
import psycopg
import pytest

from relay.database.names import Names
from relay.errors import InvalidConfig
from relay.http import create_app, serving
from relay.http.app import DATABASE_SECONDS
from relay.maintenance import views
from relay.maintenance.gauges import ClusterGauges
from relay.telemetry.health import Health
from relay.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.outbox import Outbox

LOOPBACK = ("127.0.0.1", 0)


async def get(address: tuple[str, int], path: str) -> tuple[int, str, str]:
    """Status, content type and body."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: relay\r\nConnection: close\r\n\r\n".encode())
    answer = (await asyncio.wait_for(reader.read(), 10)).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:])
    return int(head.split()[1]), headers["content-type"], body


@pytest.fixture
def health() -> Health:
    return Health(("main",))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(["main"])


@pytest.fixture
async def pod(health: Health, metrics: Metrics) -> AsyncIterator[tuple[str, int]]:
    async with serving(create_app(pod="pod-1", health=health, metrics=metrics), LOOPBACK) as address:
        yield address


async def test_a_broker_that_is_down_at_the_start_is_live_and_not_ready(pod: tuple[str, int], health: Health) -> None:
    """FIELD.md F7: a restart would not bring the broker back."""
    health.source_connected()
    health.sink_down("main", "connection refused: redis://:secret@broker")
    assert (await get(pod, "/livez"))[::2] == (200, "ok\n")
    status, _, body = await get(pod, "/readyz")
    assert (status, body) == (503, "sink main: connection refused: redis://:***@broker\n")
    health.sink_up("main")
    assert (await get(pod, "/readyz"))[::2] == (200, "ok\n")


async def test_a_dead_loop_fails_liveness(pod: tuple[str, int], health: Health) -> None:
    with pytest.raises(ValueError, match="bug"), health.running("reader", 10):
        raise ValueError("bug")
    status, _, body = await get(pod, "/livez")
    assert (status, body) == (503, "loop reader died: ValueError: bug\n")


async def test_metrics_are_prometheus_text(pod: tuple[str, int], metrics: Metrics) -> None:
    metrics.sink("main").delivered.inc(7)
    status, content_type, body = await get(pod, "/metrics")
    assert status == 200
    assert content_type.startswith("text/plain; version=")
    assert 'relay_delivered_total{sink="main"} 7.0' in body


async def test_status_is_json_about_this_pod(pod: tuple[str, int], health: Health, metrics: Metrics) -> None:
    metrics.lanes_owned.set(64)
    health.sink_up("main")
    document = orjson.loads((await get(pod, "/status"))[2])
    assert document["pod"] == "pod-1"
    assert document["lanes_owned"] == 64
    assert document["sinks"] == {"main": {"up": True, "misconfigured": False, "reason": ""}}
    assert document["not_ready_because"] == ["source: not connected yet"]


async def test_an_unknown_page_is_not_found(pod: tuple[str, int]) -> None:
    assert (await get(pod, "/admin"))[0] == 404


async def test_a_database_that_fails_or_hangs_does_not_take_the_pages_away(
    health: Health, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.http.app.DATABASE_SECONDS", 0.05)
    assert DATABASE_SECONDS > 0.05

    async def hang() -> None:
        await asyncio.Event().wait()

    async def fail() -> None:
        raise ConnectionError("gone")

    app = create_app(pod="pod-1", health=health, metrics=metrics, refresh=fail, cluster=hang)
    async with serving(app, LOOPBACK) as address:
        assert (await get(address, "/metrics"))[0] == 200
        assert orjson.loads((await get(address, "/status"))[2])["cluster"] is None


async def test_a_taken_port_is_named(pod: tuple[str, int], health: Health, metrics: Metrics) -> None:
    with pytest.raises(InvalidConfig, match=rf"http.bind: cannot listen at 127.0.0.1:{pod[1]}") as caught:
        async with serving(create_app(pod="pod-2", health=health, metrics=metrics), pod):
            raise AssertionError
    assert "RELAY_HTTP__BIND" in caught.value.hint


async def test_a_foreign_address_is_named(health: Health, metrics: Metrics) -> None:
    with pytest.raises(InvalidConfig, match=r"http.bind: cannot listen at 192.0.2.1:0"):
        async with serving(create_app(pod="pod-2", health=health, metrics=metrics), ("192.0.2.1", 0)):
            raise AssertionError


async def test_signals_stay_with_the_service(health: Health, metrics: Metrics) -> None:
    """Alone, uvicorn would take SIGTERM and end at once, without a drain."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    async with serving(create_app(pod="pod-1", health=health, metrics=metrics), LOOPBACK) as address:
        assert (await get(address, "/livez"))[0] == 200
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


async def test_the_port_is_free_after_the_end_although_a_client_hangs_on(health: Health, metrics: Metrics) -> None:
    app = create_app(pod="pod-1", health=health, metrics=metrics)
    async with serving(app, LOOPBACK) as address:
        _reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /livez HTTP/1.1\r\n")  # never finished
        assert (await get(address, "/livez"))[0] == 200
    writer.close()
    with socket.socket() as probe:
        assert probe.connect_ex(address) != 0
    async with serving(app, address) as again:
        assert again == address


async def test_gauges_of_the_cluster_are_fresh_at_a_scrape(outbox: Outbox, health: Health, metrics: Metrics) -> None:
    import asyncpg  # noqa: PLC0415  # only this test needs it

    with psycopg.connect(outbox.app_dsn) as connection:
        connection.execute("INSERT INTO outbox (topic, payload) SELECT 'orders', '1' FROM generate_series(1, 5)")
    outbox.execute(
        "INSERT INTO {parked} (seq, id, created_at, stored_at, lane, sink, topic)"
        " SELECT n, gen_random_uuid(), now(), now(), 0, s, 't' FROM generate_series(1, 3) n, (VALUES ('main'), ('gone')) v (s)"
    )
    async with asyncpg.create_pool(outbox.relay_dsn, min_size=0, max_size=1) as pool:
        gauges = ClusterGauges(pool.acquire, outbox.names, metrics, ["main"])

        async def cluster() -> object:
            async with pool.acquire() as lent:
                return await views.overview(lent, Names())

        app = create_app(pod="pod-1", health=health, metrics=metrics, refresh=gauges.refresh, cluster=cluster)
        async with serving(app, LOOPBACK) as address:
            body = (await get(address, "/metrics"))[2]
            document = orjson.loads((await get(address, "/status"))[2])
    assert 'relay_backlog_events{topic="orders"} 5.0' in body
    assert 'relay_parked_events{sink="main"} 3.0' in body
    assert 'relay_parked_events{sink="other"} 3.0' in body
    assert document["cluster"]["backlog"]["events"] == 5
    assert [count["sink"] for count in document["cluster"]["parked"]] == ["gone", "main"]
