"""One record batch: stamped, sent, and sent again until its fate is known or patience is over.

An answer that is lost is asked for again with the same bytes and the same sequence numbers, which the broker
drops if it has them (PROTOCOLS.md 19). How long that goes on is short: the other messages of the worker wait.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Final

from relay.sink import CONFIRMED, Outcome, rejected, unavailable
from relay.sinks.kafka.answers import Step, Verdict, after_connection_failure, after_produce
from relay.sinks.kafka.cluster import Lost, Unreachable
from relay.sinks.kafka.wire import Answer

if TYPE_CHECKING:
    from relay.sinks.kafka.cluster import Cluster
    from relay.sinks.kafka.records import Piece
    from relay.sinks.kafka.topics import Partition

__all__ = ["Attempt", "Reply"]

_PATIENCE_SECONDS: Final = 5.0  # a leader election takes less; longer would hold up the other partitions' messages
_WITHOUT_LEADER: Final = Answer(5)  # LEADER_NOT_AVAILABLE
_PAUSES: Final = (0.0, 0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True, slots=True)
class Reply:
    """The fate of one piece: `step` is CONFIRM, SPLIT, RETIME or FAIL, and `outcome` what to report."""

    step: Step
    outcome: Outcome = CONFIRMED
    faults: tuple[tuple[int, str | None], ...] = ()
    name: str = ""


_CONFIRMED: Final = Reply(Step.CONFIRM)


class _Patience:
    """How long a piece is tried again, at least once, and the pauses in between."""

    def __init__(self, seconds: float) -> None:
        self._until = monotonic() + seconds
        self._pauses = 0

    def is_over(self) -> bool:
        return self._pauses > 0 and monotonic() >= self._until

    async def pause(self) -> None:
        self._pauses += 1
        await asyncio.sleep(_PAUSES[min(self._pauses, len(_PAUSES)) - 1])


class Attempt:
    """Sends one piece of one partition, again and again if need be."""

    def __init__(self, cluster: Cluster, partition: Partition, request_bytes_max: int) -> None:
        self.confirmed = False
        self._cluster = cluster
        self._request_bytes_max = request_bytes_max
        self._partition = partition
        # A partition that was given up stays so until it answers: no further batch waits for it.
        self._patience = _Patience(0.0 if partition.in_trouble else _PATIENCE_SECONDS)

    async def send(self, piece: Piece) -> Reply | None:
        """The fate of the piece, or None: begin again with new sequence numbers. Raises Unreachable."""
        data = await self._stamped(piece)
        if len(data) > self._request_bytes_max:
            reason = f"{len(data)} bytes are more than max_request_size = {self._request_bytes_max}"
            return Reply(Step.SPLIT, rejected(reason), name="MESSAGE_TOO_LARGE")
        resent = False
        while True:
            try:
                answer = await self._produce(data)
            except Lost as lost:
                reply = await self._after_loss(lost)
            else:
                verdict = after_produce(answer.code, resent=resent)
                if verdict.step in {Step.NEW_EPOCH, Step.NEW_PRODUCER} and not self._patience.is_over():
                    await self._begin_again(verdict.step)
                    return None
                reply = await self._after_answer(answer, verdict, len(piece))
            if reply is not None:
                return reply
            resent = True

    async def _stamped(self, piece: Piece) -> bytearray:
        partition = self._partition
        if partition.producer_id is None:
            partition.begin(await self._cluster.producer_id(partition.used_up))
        assert partition.producer_id is not None
        return piece.build(partition.producer_id, partition.epoch, partition.sequence)

    async def _produce(self, data: bytearray) -> Answer:
        node = self._cluster.node(self._partition.leader)
        if node is None:
            return _WITHOUT_LEADER
        return await node.produce(self._partition, data)

    async def _begin_again(self, step: Step) -> None:
        if step is Step.NEW_PRODUCER:
            self._partition.begin_producer()
        else:
            self._partition.begin_epoch()
        await self._patience.pause()

    async def _after_answer(self, answer: Answer, verdict: Verdict, records: int) -> Reply | None:
        match verdict.step:
            case Step.CONFIRM:
                self.confirmed = True
                self._partition.in_trouble = False
                self._partition.advance(records)
                return _CONFIRMED
            case Step.SPLIT | Step.RETIME:
                return Reply(verdict.step, verdict.outcome(str(self._partition)), answer.faults, verdict.name)
            case Step.RETRY if not self._patience.is_over():
                return await self._try_again()
            case _:
                self._partition.in_trouble = True
                return Reply(Step.FAIL, verdict.outcome(str(self._partition)))

    async def _after_loss(self, lost: Lost) -> Reply | None:
        down = after_connection_failure(lost.cause)
        if self._cluster.is_down() and (isinstance(lost.cause, TimeoutError) or down.misconfigured):
            return Reply(Step.FAIL, down)  # silence was waited for long enough, and a refusal does not change
        if not self._patience.is_over():
            return await self._try_again()
        if self._cluster.is_down():
            return Reply(Step.FAIL, down)
        self._partition.in_trouble = True
        reason = f"{self._partition}: its leader cannot be reached: {down.reason}"
        return Reply(Step.FAIL, unavailable(reason, misconfigured=True))

    async def _try_again(self) -> Reply | None:
        """Pause, and find out where the leader is by now; a reply if the topic is gone."""
        await self._patience.pause()
        topic = self._partition.topic
        try:
            await self._cluster.look_up([topic.name])
        except Unreachable as unreachable:
            if unreachable.cut and not self._patience.is_over():
                return None
            raise
        return Reply(Step.FAIL, topic.failure) if topic.failure is not None else None
