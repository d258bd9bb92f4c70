"""Which keys of which lanes may not flow directly to a sink now (PROTOCOLS.md rules 3 and 5).

A key is held while it has parked rows, or waits behind a dead letter. Three states:

- HELD: new events of the key are parked behind its rows;
- CLOSING: all of its rows are on their way to the sink. New events wait in memory until the
  confirmation and the deletion of the rows are committed, so that a key with steady traffic leaves
  the table at all;
- free: not in the table, events flow.

After an outage there may be more held keys than memory wants to list: then the lane is held as a
whole and only the keys known to be free are listed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from relay.types import Lease, Message

__all__ = ["HoldState", "Holds", "LaneHolds"]


class HoldState(Enum):
    """State of a key that is not simply free."""

    HELD = "held"
    CLOSING = "closing"
    FREE = "free"


@dataclass(slots=True)
class LaneHolds:
    """Holds of one sink in one lane. `waiting` has the events of CLOSING keys, in order."""

    whole: bool = False
    keys: dict[str, HoldState] = field(default_factory=dict)
    waiting: dict[str, list[Message]] = field(default_factory=dict)

    def state(self, key: str | None) -> HoldState:
        """State of a key; an event without a key waits for nobody, but is parked while the lane is."""
        if key is None:
            return HoldState.HELD if self.whole else HoldState.FREE
        return self.keys.get(key) or (HoldState.HELD if self.whole else HoldState.FREE)


class Holds:
    """Holds of one sink in all lanes of this pod."""

    def __init__(self) -> None:
        self._lanes: dict[Lease, LaneHolds] = {}

    def __bool__(self) -> bool:
        """False while every key of every lane is free: the fast path of a worker."""
        return bool(self._lanes)

    def state(self, message: Message) -> HoldState:
        """State of the message's key."""
        lane = self._lanes.get(message.lease) if message.lease else None
        return lane.state(message.key) if lane else HoldState.FREE

    def hold(self, lease: Lease, key: str | None) -> None:
        """Park what comes for this key from now on; None: for every key of the lane.

        Nothing for a lane that is lost: its events are dropped, and nobody would free its keys.
        """
        if lease.lost:
            return
        lane = self._lanes.setdefault(lease, LaneHolds())
        if key is None:
            lane.whole = True
            lane.keys = {name: state for name, state in lane.keys.items() if state is not HoldState.FREE}
        else:
            lane.keys[key] = HoldState.HELD

    def close(self, lease: Lease, key: str) -> None:
        """All rows of the key are on their way: let new events wait. Nothing for a lane that is lost."""
        if lease.lost:
            return
        self._lanes.setdefault(lease, LaneHolds()).keys[key] = HoldState.CLOSING

    def wait(self, message: Message) -> None:
        """Keep an event of a CLOSING key."""
        assert message.lease is not None
        assert message.key is not None
        self._lanes[message.lease].waiting.setdefault(message.key, []).append(message)

    def reopen(self, lease: Lease, key: str, *, held: bool) -> list[Message]:
        """The key's rows are through (or, `held`, some are left). Returns what waited, in order."""
        if (lane := self._lanes.get(lease)) is None:
            return []
        waiting = lane.waiting.pop(key, [])
        if held:
            lane.keys[key] = HoldState.HELD
        elif lane.whole:
            lane.keys[key] = HoldState.FREE
        else:
            lane.keys.pop(key, None)
            self._prune(lease, lane)
        return waiting

    def list_keys(self, lease: Lease, keys: Iterable[str]) -> None:
        """From now on only these keys of the lane are held, instead of all."""
        if (lane := self._lanes.get(lease)) is None:
            return
        closing = {key: state for key, state in lane.keys.items() if state is HoldState.CLOSING}
        lane.whole = False
        lane.keys = dict.fromkeys(keys, HoldState.HELD) | closing
        self._prune(lease, lane)

    def whole(self) -> list[Lease]:
        """Lanes that are held as a whole."""
        return [lease for lease, lane in self._lanes.items() if lane.whole]

    def forget(self, lease: Lease) -> list[Message]:
        """The lane is not ours any more. Returns what waited."""
        lane = self._lanes.pop(lease, None)
        return [message for waiting in lane.waiting.values() for message in waiting] if lane else []

    def _prune(self, lease: Lease, lane: LaneHolds) -> None:
        if not lane.keys and not lane.whole:
            del self._lanes[lease]
