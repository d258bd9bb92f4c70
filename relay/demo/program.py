"""The demo from start to end: prepares the stage, lets the story happen, counts, and leaves nothing behind.

SIGINT, SIGTERM and SIGHUP cancel it wherever it is; with `--keep` the first one closes the shop instead and
lets it count. Everything that was started is ended on every way out.
"""

from __future__ import annotations

import asyncio
import io
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from relay.demo import story
from relay.demo.consumer import Consumer
from relay.demo.processes import ServerFailed
from relay.demo.report import Report
from relay.demo.scene import Scene
from relay.demo.screen import Screen
from relay.demo.shop import TILLS, TOPIC, Shop
from relay.demo.stage import PODS, Stage

if TYPE_CHECKING:
    from collections.abc import Awaitable

__all__ = ["run"]

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ORDERS_PER_SECOND: Final = 300.0
_ORDERS_PER_SECOND_KEPT: Final = 30.0
"""After the story, with `--keep`: something to look at that does not warm the room."""
_LOG_LINES: Final = 5
_ADDRESSES: Final = """
  database  {owner}
  as shop   {shop}
  broker    {broker}  stream {topic}
  relay     {pod}/status  /metrics

  try, in another terminal:
    {relay} status --watch --config {config}
    psql {shop} \\
      -c "INSERT INTO outbox (topic, key, payload) VALUES ('hello', 'me', '1')"
"""


def run(*, keep: bool, seconds: float) -> int:
    """The demo; returns its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where there is no Unicode, ? stands for ✓
    try:
        with ExitStack() as stack:
            stage = Stage()
            stack.callback(stage.close)
            stack.callback(_ignore_signals)  # runs before the cleaning, which is short and must not be cut
            with asyncio.Runner() as runner:
                return runner.run(_Demo(stage, keep=keep, seconds=seconds).run())
    except ServerFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class _Demo:
    def __init__(self, stage: Stage, *, keep: bool, seconds: float) -> None:
        self._stage, self._keep, self._seconds = stage, keep, seconds
        self._console = Console(highlight=False)
        self._screen = Screen(self._console)
        self._close_shop = asyncio.Event()
        self._shop_is_kept = False
        self._ended_by: signal.Signals | None = None

    async def run(self) -> int:
        """Perform, and be ended by a signal at any moment."""
        performance = asyncio.create_task(self._perform(), name="demo")
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number, performance)
        try:
            return await performance
        except asyncio.CancelledError:
            if self._ended_by is None:
                raise
            self._console.print(f"ended by {self._ended_by.name} before anything was counted; cleaning up")
            self._stage.hurry()
            return 128 + self._ended_by

    def _on_signal(self, number: signal.Signals, performance: asyncio.Task[int]) -> None:
        if number is signal.SIGINT and self._shop_is_kept and not self._close_shop.is_set():
            self._close_shop.set()
        else:
            self._ended_by = number
            performance.cancel()

    async def _perform(self) -> int:
        await self._prepare()
        if self._keep:
            self._print_addresses()
        report = await self._show(Scene(self._stage, seconds=self._seconds, keep=self._keep))
        self._console.print(report.render())
        if not report.problems:
            return 0
        self._print_logs()
        return 1

    # -- before ----------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        stage = self._stage
        postgres, broker = stage.postgres, stage.broker
        await self._step(f"PostgreSQL 18 on {postgres.host}:{postgres.port}", stage.start_database())
        await self._step("the shop's tables, the outbox, and two roles that may do little", stage.migrate())
        await self._step(f"Valkey, the broker, on {broker.host}:{broker.port}", stage.start_broker())
        pods = asyncio.gather(*(stage.start_pod() for _ in range(PODS)))
        await self._step(f"relay pods: {PODS}, each a `relay run` of its own", pods)

    async def _step(self, text: str, work: Awaitable[object]) -> None:
        began = time.monotonic()
        await work
        self._screen.step(text, began)

    def _print_addresses(self) -> None:
        stage = self._stage
        pod = stage.pods[-1]  # the other one will be killed
        program = Path(sys.argv[0])
        relay = _shown(program) if program.name == "relay" else f"{sys.executable} -m relay"
        self._console.print(
            _ADDRESSES.format(
                owner=stage.owner_dsn,
                shop=stage.shop_dsn,
                broker=stage.broker.url,
                topic=TOPIC,
                pod=f"http://{pod.host}:{pod.port}",
                relay=relay,
                config=pod.config,
            ),
            markup=False,
            soft_wrap=True,
        )

    # -- the show --------------------------------------------------------------------------------

    async def _show(self, scene: Scene) -> Report:
        consumer = Consumer(self._stage.broker.url, TOPIC, scene.tally.arrive)
        shop = Shop(self._stage.shop_dsn, scene.tally, orders_per_second=_ORDERS_PER_SECOND)
        try:
            async with asyncio.TaskGroup() as group:
                scene.open()
                scene.note(f"the shop opens with {TILLS} tills")
                selling = group.create_task(shop.run(), name="shop")
                company = [
                    group.create_task(consumer.run(), name="consumer"),
                    group.create_task(scene.watch(), name="watch"),
                    group.create_task(self._screen.show(scene), name="screen"),
                ]
                await self._sell(scene, shop)
                await selling
                await story.drain(scene)
                await self._stage.stop_pods()
                scene.note("the relay was told to stop, and has settled everything")
                for task in company:
                    task.cancel()
            await consumer.read_to_end()
        finally:
            await consumer.close()
        return Report(scene, frozenset(await scene.truth()))

    async def _sell(self, scene: Scene, shop: Shop) -> None:
        await story.play(scene)
        if self._keep:
            self._shop_is_kept = scene.is_told = True
            shop.orders_per_second = _ORDERS_PER_SECOND_KEPT
            scene.note("the story is told; the shop stays open, at an easier pace")
            await self._close_shop.wait()
        shop.close()
        scene.note("the shop closes")

    def _print_logs(self) -> None:
        for pod in self._stage.pods:
            lines = pod.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
            self._console.print(f"\nlast lines of {pod.label}'s log:", *lines, sep="\n  ", markup=False, soft_wrap=True)


def _shown(program: Path) -> Path:
    """Short where possible: relative to where we are."""
    return program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program
