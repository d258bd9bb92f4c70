"""What the HTTP server answers: `/livez`, `/readyz`, `/metrics`, `/status`.

Probes read memory only. `/metrics` and `/status` may ask the database first, with a time limit: while it is
down they answer with what they know.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import orjson
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from relay import __version__
from relay.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from relay.telemetry.health import Health
    from relay.telemetry.metrics import Metrics

__all__ = ["create_app"]

log = get_logger("relay.http")

DATABASE_SECONDS: Final = 3.0
"""What a scrape waits for the database; Prometheus itself gives up after 10 s by default."""


def create_app(
    *,
    pod: str,
    health: Health,
    metrics: Metrics,
    refresh: Callable[[], Awaitable[None]] | None = None,
    cluster: Callable[[], Awaitable[Any]] | None = None,
) -> Starlette:
    """The application of one pod.

    `refresh` brings gauges that come from the database up to date before a scrape; `cluster` returns what
    `relay status` shows, as dataclasses. Both may raise or hang.
    """
    answers = _Answers(pod, health, metrics, refresh, cluster)
    routes = {
        "/livez": answers.livez,
        "/readyz": answers.readyz,
        "/metrics": answers.metrics,
        "/status": answers.status,
    }
    return Starlette(routes=[Route(path, endpoint) for path, endpoint in routes.items()])


class _Answers:
    def __init__(
        self,
        pod: str,
        health: Health,
        metrics: Metrics,
        refresh: Callable[[], Awaitable[None]] | None,
        cluster: Callable[[], Awaitable[Any]] | None,
    ) -> None:
        self._pod, self._health, self._metrics = pod, health, metrics
        self._refresh, self._cluster = refresh, cluster

    async def livez(self, _request: Request) -> Response:
        return _probe(self._health.not_live_because())

    async def readyz(self, _request: Request) -> Response:
        return _probe(self._health.not_ready_because())

    async def metrics(self, request: Request) -> Response:
        if self._refresh is not None:
            await _in_time(self._refresh, "metrics")
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._metrics.registry), headers={"content-type": content_type})

    async def status(self, _request: Request) -> Response:
        document = {
            "pod": self._pod,
            "version": __version__,
            "not_live_because": self._health.not_live_because(),
            "not_ready_because": self._health.not_ready_because(),
            "sinks": self._health.sinks,
            "lanes_owned": _value(self._metrics, "relay_lanes_owned"),
            "in_flight_events": _value(self._metrics, "relay_in_flight_events"),
            "asleep": bool(_value(self._metrics, "relay_asleep")),
            # None: the database did not answer in time.
            "cluster": await _in_time(self._cluster, "status") if self._cluster is not None else None,
        }
        return Response(orjson.dumps(document), media_type="application/json")


def _probe(problems: tuple[str, ...]) -> Response:
    if not problems:
        return PlainTextResponse("ok\n")
    return PlainTextResponse("\n".join(problems) + "\n", status_code=503)


async def _in_time(ask: Callable[[], Awaitable[Any]], what: str) -> Any:
    try:
        async with asyncio.timeout(DATABASE_SECONDS):
            return await ask()
    except Exception as error:  # noqa: BLE001  # whatever is wrong with the database, the answer must come
        log.debug("no answer from the database", page=what, error=error)
        return None


def _value(metrics: Metrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(name)
