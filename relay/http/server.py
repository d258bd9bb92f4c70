"""The HTTP server inside the relay's own event loop: it takes no signals and ends when it is told to."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final

import uvicorn

from relay.errors import InvalidConfig
from relay.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from starlette.applications import Starlette

__all__ = ["serving"]

log = get_logger("relay.http")

_BACKLOG: Final = 128
_STOP_SECONDS: Final = 2.0
_CONNECTIONS_MAX: Final = 100  # probes and scrapers; more is an accident that should not cost memory


class _Server(uvicorn.Server):
    """The server without its signal handlers and without its clock.

    SIGTERM means drain, and that is the service's business. uvicorn's own loop wakes ten times a second to
    look whether it should exit and to write a Date header.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self._told.wait()

    def stop(self) -> None:
        """End the loop; what is being answered gets a second."""
        self.should_exit = True
        self._told.set()


@asynccontextmanager
async def serving(app: Starlette, address: tuple[str, int]) -> AsyncIterator[tuple[str, int]]:
    """Answer requests while the block runs; yields host and port, the port chosen by the system when it was 0.

    Raises InvalidConfig if the address cannot be bound.
    """
    bound = _bind(*address)
    server = _Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,  # nobody would keep it up to date
            limit_concurrency=_CONNECTIONS_MAX,
            timeout_graceful_shutdown=1,
        )
    )
    task = asyncio.create_task(server.serve([bound]), name="http")
    try:
        host, port = bound.getsockname()[:2]
        log.info("http server listens", host=host, port=port)
        yield host, port
    finally:
        server.stop()
        await _ended(task, server)
        bound.close()


async def _ended(task: asyncio.Task[None], server: uvicorn.Server) -> None:
    done, _ = await asyncio.wait([task], timeout=_STOP_SECONDS)
    if not done:
        server.force_exit = True
        task.cancel()
        await asyncio.wait([task])
    elif not task.cancelled() and (error := task.exception()) is not None:
        log.error("http server failed", error=error)


def _bind(host: str, port: int) -> socket.socket:
    where = f"{host}:{port}"
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidConfig(
            f"http.bind: {where} is no address of this machine: {error.strerror}", hint=_HINT
        ) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(target)
        bound.listen(_BACKLOG)  # now, so that a probe that comes early waits instead of being refused
        bound.setblocking(False)  # noqa: FBT003  # its only form
    except OSError as error:
        bound.close()
        raise InvalidConfig(f"http.bind: cannot listen at {where}: {error.strerror}", hint=_HINT) from error
    return bound


_HINT: Final = (
    'Set http.bind (RELAY_HTTP__BIND) to a free address and port, or to "off". '
    "Two relays on one machine need two ports."
)
