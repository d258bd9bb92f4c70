"""One pod: the only place that joins concrete parts. Starts them in order, and ends them in order.

Start: HTTP first, so that the pod is live while it waits for the database; then the schema is checked, and
everything runs in one task group: a loop that dies ends the pod, loudly. Stop (promise 7): read
nothing more, let what is in flight settle, hand the lanes over, close, all inside `grace_seconds`; a second
signal ends it at once.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import secrets
import signal
import socket
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from relay import __version__
from relay.database.names import Names
from relay.database.pool import Pool, connect
from relay.errors import InvalidConfig, PermissionMissing, RelayError, SinkUnavailable, SourceUnavailable, StopError
from relay.http import create_app, serving
from relay.maintenance import views
from relay.maintenance.gauges import ClusterGauges
from relay.maintenance.partitions import keep_ahead
from relay.migrate import require_current
from relay.pipeline import Pipeline, Stores
from relay.retry import Backoff
from relay.sinks import registry
from relay.sources.polling.bell import PostgresBell
from relay.sources.polling.outbox import PostgresOutbox
from relay.sources.polling.ownership import Ownership
from relay.sources.polling.source import PollingSource
from relay.stores.leases import PostgresLeases
from relay.stores.outbox_rows import PostgresSettler
from relay.stores.parking import PostgresParking
from relay.telemetry.health import Health
from relay.telemetry.logs import get_logger
from relay.telemetry.looplag import watch_loop_lag
from relay.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from relay.config import Config
    from relay.pipeline.circuit import Circuit
    from relay.sink import Sink

__all__ = ["Service", "run"]

_log = get_logger("relay.service")

_APPLICATION: Final = "outbox-relay"
_PING_UP_SECONDS: Final = 15.0
_PING_DOWN_SECONDS: Final = 2.0
_OWNERSHIP: Final = "ownership"
_OWNERSHIP_SILENCE_SECONDS: Final = 150.0
"""Two statement timeouts: a database that hangs is no reason to restart, a loop that never comes back is."""
_CLOSE_SECONDS: Final = 3.0
_HAND_OVER_SHARE: Final = 0.75
"""Of the grace period, for what is in flight; the rest is for giving the lanes back and closing."""
_LEAVE_SHARE: Final = 0.85
"""Of the grace period, until the lanes are given back: a database that says nothing must not hold up a stop."""
_GOODBYE_SHARE: Final = 0.1


def run(config: Config) -> int:
    """Run until SIGTERM or SIGINT. 0 after a clean stop, 1 after a second signal; raises StopError."""
    # What was imported lives for ever, and events die young without cycles: the collector need not look so often.
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    with asyncio.Runner(loop_factory=_new_loop()) as runner:
        return runner.run(_until_signalled(Service(config)))


def _new_loop() -> Any:
    try:
        import uvloop  # noqa: PLC0415  # optional: PyPy and some platforms have none
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _until_signalled(service: Service) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(service.run(), name="service")
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            _log.info("stopping: finishing what is in flight", grace_seconds=service.grace_seconds)
            service.stop()
        else:
            _log.warning("second signal: ending at once")
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await task
    except asyncio.CancelledError:
        return 1
    except BaseExceptionGroup as group:
        raise _cause(group) from group
    return 0


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that an operator should see: a StopError if there is one."""
    stop, rest = group.split(StopError)
    first = (stop or rest or group).exceptions[0]
    return _cause(first) if isinstance(first, BaseExceptionGroup) else first


class Service:
    """Everything of one pod. `sinks` replaces the configured ones (tests)."""

    def __init__(self, config: Config, sinks: Mapping[str, Sink] | None = None) -> None:
        self._config = config
        self.pod = config.leases.pod or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.grace_seconds = config.pipeline.grace_seconds
        self.sinks = dict(sinks or {name: registry.create(name, section) for name, section in config.sinks.items()})
        if not self.sinks:
            raise InvalidConfig("no sink is configured", hint="add a [sinks.<name>] section with its type")
        self.metrics = Metrics(self.sinks)
        self.health = Health(tuple(self.sinks))
        self.address: tuple[str, int] | None = None
        """Where the HTTP server listens, once it does."""
        self._names = Names.from_config(config.database)
        self._pool = Pool(config.database, _APPLICATION)
        self._stop = asyncio.Event()
        self._down: set[str] = set()
        self._backoff = Backoff(0.2, 5.0, random.Random())  # noqa: S311  # jitter
        self._gauges = ClusterGauges(self._pool.transaction, self._names, self.metrics, self.sinks)

    def stop(self) -> None:
        """Stop in good order; `run` returns when that is done."""
        self._stop.set()

    async def run(self) -> None:
        """Run until `stop`. Raises StopError (alone or in a group) when it cannot go on without a person."""
        async with AsyncExitStack() as stack:
            for sink in self.sinks.values():
                await sink.open()
                stack.push_async_callback(_closed, sink.close())
            if address := self._config.http.address:
                app = create_app(
                    pod=self.pod, health=self.health, metrics=self.metrics,
                    refresh=self._gauges.refresh, cluster=self._overview,
                )  # fmt: skip
                self.address = await stack.enter_async_context(serving(app, address))
            _log.info(
                "relay starts", version=__version__, pod=self.pod, outbox=self._names.outbox, sinks=list(self.sinks)
            )
            async with asyncio.TaskGroup() as group:
                watchers = [
                    group.create_task(watch_loop_lag(self.metrics, self.health), name="loop lag"),
                    *(group.create_task(self._watch(name), name=f"watch {name}") for name in self.sinks),
                ]
                if await self._connected():
                    stack.push_async_callback(_closed, self._pool.close())
                    await self._work()
                for task in watchers:
                    task.cancel()
        _log.info("relay has stopped")

    async def _connected(self) -> bool:
        """Connect and check the schema, for as long as it takes. False: told to stop first."""
        failures = 0
        while not self._stop.is_set():
            try:
                if not await self._unless_stopped(self._open_database()):
                    return False
            except SourceUnavailable as error:
                failures += 1
                self.health.source_lost(str(error))
                if failures == 1:
                    _log.warning("database unavailable, waiting for it", error=str(error))
                await self._stopped_within(self._backoff.delay(failures))
            else:
                return True
        return False

    async def _open_database(self) -> None:
        await self._pool.open()
        await require_current(self._config.database)

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """True when the work is done; False when told to stop first: a silent database must not hold up a stop."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
            return task.done()
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()

    async def _work(self) -> None:
        config, pool, names = self._config, self._pool, self._names
        direct = config.database.notify and (not pool.pooled or config.database.direct_dsn is not None)
        if pool.pooled and not direct:
            _log.warning(
                "database.dsn goes through a transaction pooler: polling without sleep and wake-up",
                hint="set database.direct_dsn to an address of PostgreSQL itself",
            )
        bell = PostgresBell(config.database, names, self.pod, direct=direct, application=_APPLICATION)
        settler = PostgresSettler(pool, names, config.source.polling.settle, partitioned=config.database.partitioned)
        parking = PostgresParking(pool, names, self.pod, self.sinks, settler)
        leases = PostgresLeases(pool, names, self.pod, lambda: bell.session_key, __version__)
        outbox = PostgresOutbox(pool, names, config.database)
        source = PollingSource(outbox, bell, config.source.polling, self.metrics)
        pipeline = Pipeline(
            config, self.sinks, Stores(parking, settler), source, self.metrics, on_sink=self._sink_changed
        )
        source.attach(pipeline)
        ownership = Ownership(self.pod, leases, source, pipeline, config.leases, self.metrics)
        source.on_foreign_server = ownership.look
        source.on_connection = self._source_changed
        bell.on_session = ownership.renew
        ownership.on_beat = lambda: self.health.beat(_OWNERSHIP)
        loops: dict[str, Coroutine[Any, Any, None]] = {
            "bell": bell.run(),
            "pipeline": pipeline.run(),
            "source": source.run(),
            "ownership": self._alive(ownership.run()),
            "budget": self._show_budget(pipeline),
        }
        if config.database.partitioned:
            loops["partitions"] = keep_ahead(
                pool.transaction,
                names,
                step=config.database.partition_range,
                ahead=timedelta(days=config.database.partitions_ahead_days),
            )
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(work, name=name) for name, work in loops.items()]
                await self._stop.wait()
                await self._drain(source, ownership)
                for task in tasks:
                    task.cancel()
        finally:
            await self._say_goodbye(leases)
            await bell.close()

    async def _drain(self, source: PollingSource, ownership: Ownership) -> None:
        self.health.drain()
        source.stop()
        try:
            async with asyncio.timeout(self.grace_seconds * _LEAVE_SHARE):
                await ownership.leave(self.grace_seconds * _HAND_OVER_SHARE)
        except (SourceUnavailable, TimeoutError) as error:
            _log.warning("lanes could not be handed over, they are free after the ttl", error=repr(error))

    async def _say_goodbye(self, leases: PostgresLeases) -> None:
        """Also after a failure: other pods should not have to wait for the ttl."""
        try:
            async with asyncio.timeout(min(_CLOSE_SECONDS, self.grace_seconds * _GOODBYE_SHARE)):
                await leases.leave()
        except (RelayError, TimeoutError):
            pass

    async def _alive(self, work: Coroutine[Any, Any, None]) -> None:
        with self.health.running(_OWNERSHIP, _OWNERSHIP_SILENCE_SECONDS):
            await work

    # -- states ----------------------------------------------------------------------------------

    async def _watch(self, name: str) -> None:
        """Ask an idle sink from time to time, so that readiness is right without traffic."""
        while True:
            try:
                await self.sinks[name].ping()
            except SinkUnavailable as error:
                self.health.sink_down(name, str(error))
            except (PermissionMissing, InvalidConfig) as error:
                self.health.sink_down(name, str(error), misconfigured=True)
            else:
                if name not in self._down:  # it answers a ping and takes nothing: publishing decides
                    self.health.sink_up(name)
            state = self.health.sinks[name]
            self.metrics.sink(name).up.set(state.up)
            self.metrics.sink(name).misconfigured.set(state.misconfigured)
            await asyncio.sleep(_PING_UP_SECONDS if state.up else _PING_DOWN_SECONDS)

    def _sink_changed(self, name: str, circuit: Circuit) -> None:
        if circuit.is_open:
            self._down.add(name)
            self.health.sink_down(name, circuit.reason, misconfigured=circuit.misconfigured)
        else:
            self._down.discard(name)
            self.health.sink_up(name)

    def _source_changed(self, problem: str | None) -> None:
        if problem is None:
            self.health.source_connected()
        else:
            self.health.source_lost(problem)

    async def _show_budget(self, pipeline: Pipeline) -> None:
        while True:
            self.metrics.in_flight_events.set(pipeline.budget.events)
            self.metrics.in_flight_bytes.set(pipeline.budget.bytes)
            await asyncio.sleep(1.0)

    async def _overview(self) -> views.Overview:
        """What the whole cluster looks like, read on a connection of its own: nobody asks often."""
        database = self._config.database
        connection = await connect(database.dsn.get_secret_value(), database, application=_APPLICATION, cache=0)
        try:
            async with connection.transaction():
                return await views.overview(connection, self._names)
        finally:
            await connection.close(timeout=_CLOSE_SECONDS)

    async def _stopped_within(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            pass


async def _closed(closing: Coroutine[Any, Any, None]) -> None:
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await closing
    except TimeoutError:
        _log.warning("closing took too long")
