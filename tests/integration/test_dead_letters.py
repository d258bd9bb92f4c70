"""Retry and discard keep the order of keys, whatever waits behind a dead letter."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from relay.cli.app import run
from relay.stores.dead_letters import DeadLetter, Selection, discard, find, retry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.outbox import Outbox

EVERYTHING = Selection()


@pytest.fixture
async def connection(outbox: Outbox) -> AsyncIterator[Any]:
    """As the relay's role, like an operator's command."""
    made = await asyncpg.connect(outbox.relay_dsn)
    yield made
    await made.close()


class Table:
    """Rows as pods would have written them; numbers and sequence numbers are equal, to be readable."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox

    def bury(
        self, number: int, key: str | None = "k", *, sink: str = "main", holds: bool = False, **more: str
    ) -> uuid.UUID:
        identity = uuid.uuid4()
        values = {
            "topic": "'t'",
            "kind": "'rejected'",
            "reason": "'too large'",
            "payload": "'{}'",
            "headers": "NULL",
        } | more
        self.outbox.execute(
            "INSERT INTO {dead_letter} (number, seq, id, created_at, stored_at, lane, sink, key, attempts, holds,"
            f" {', '.join(values)}) VALUES ({number}, {number}, '{identity}', 'infinity', now(), 7, '{sink}',"
            f" {'NULL' if key is None else repr(key)}, 12, {holds}, {', '.join(values.values())})"
        )
        return identity

    def park(self, number: int, key: str | None = "k", *, sink: str = "main", retry_at: str = "NULL") -> None:
        self.outbox.execute(
            "INSERT INTO {parked} (number, seq, id, created_at, stored_at, lane, sink, topic, key, retry_at)"
            f" VALUES ({number}, {number}, gen_random_uuid(), now(), now(), 7, '{sink}', 't',"
            f" {'NULL' if key is None else repr(key)}, {retry_at})"
        )

    def parked(self) -> list[tuple[Any, ...]]:
        """(number, sink, key, what it does) in order: due, later, or waits."""
        return self.outbox.execute(
            "SELECT number, sink, key, CASE WHEN retry_at <= now() THEN 'due' WHEN retry_at > now() THEN 'later'"
            " ELSE 'waits' END FROM {parked} ORDER BY number"
        )

    def dead(self) -> list[int]:
        return [number for (number,) in self.outbox.execute("SELECT number FROM {dead_letter} ORDER BY number")]


@pytest.fixture
def table(outbox: Outbox) -> Table:
    return Table(outbox)


async def retried(
    connection: Any,
    outbox: Outbox,
    selection: Selection = EVERYTHING,
    limit: int | None = None,
    **routes: Sequence[str],
) -> list[int]:
    chunks = retry(connection, outbox.names, selection, lambda topic: routes.get(topic, ()), limit=limit)
    return [letter.number async for letters in chunks for letter in letters]


async def discarded(connection: Any, outbox: Outbox, selection: Selection = EVERYTHING) -> list[int]:
    return [letter.number async for letters in discard(connection, outbox.names, selection) for letter in letters]


# --- retry -------------------------------------------------------------------------------------------


async def test_a_retried_event_goes_before_what_waits_behind_it(connection: Any, outbox: Outbox, table: Table) -> None:
    """`hold`: 3 died, 4 and 5 wait; after the retry the key has one head, and it is 3."""
    table.bury(3, holds=True)
    table.park(4)
    table.park(5)
    assert await retried(connection, outbox) == [3]
    assert table.parked() == [(3, "main", "k", "due"), (4, "main", "k", "waits"), (5, "main", "k", "waits")]
    assert table.dead() == []


async def test_a_retried_event_keeps_itself_and_loses_its_attempts(
    connection: Any, outbox: Outbox, table: Table
) -> None:
    """Also what Python cannot hold: created_at is infinity."""
    identity = table.bury(3, payload=r"'\x00ff'", headers="""'{"a": "1"}'""")
    before = outbox.execute(
        "SELECT seq, id, topic, key, payload, headers, created_at::text, stored_at, lane FROM {dead_letter}"
    )
    await retried(connection, outbox)
    after = outbox.execute(
        "SELECT seq, id, topic, key, payload, headers, created_at::text, stored_at, lane FROM {parked}"
    )
    assert after == before
    assert after[0][1] == identity
    assert outbox.execute("SELECT attempts, last_error FROM {parked}") == [(0, "too large")]


async def test_several_of_one_key_come_back_in_order_with_one_head(
    connection: Any, outbox: Outbox, table: Table
) -> None:
    """FIELD.md F6: a replay that loses the order."""
    for number in (5, 3, 4):
        table.bury(number)
    table.bury(6, "other")
    assert await retried(connection, outbox) == [3, 4, 5, 6]
    assert table.parked() == [
        (3, "main", "k", "due"),
        (4, "main", "k", "waits"),
        (5, "main", "k", "waits"),
        (6, "main", "other", "due"),
    ]


async def test_an_older_row_of_the_key_stays_its_head_with_its_backoff(
    connection: Any, outbox: Outbox, table: Table
) -> None:
    table.park(2, retry_at="now() + interval '1 min'")
    table.bury(3)
    await retried(connection, outbox)
    assert table.parked() == [(2, "main", "k", "later"), (3, "main", "k", "waits")]


async def test_a_newer_head_steps_back(connection: Any, outbox: Outbox, table: Table) -> None:
    """Without it the key would have two heads, and 4 could be first."""
    table.park(4, retry_at="now()")
    table.bury(3)
    await retried(connection, outbox)
    assert table.parked() == [(3, "main", "k", "due"), (4, "main", "k", "waits")]


async def test_an_earlier_dead_letter_goes_on_holding_the_key(connection: Any, outbox: Outbox, table: Table) -> None:
    table.bury(3, holds=True)
    later = table.bury(4)
    table.park(5)
    assert await retried(connection, outbox, Selection(ids=(later,))) == [4]
    assert table.parked() == [(4, "main", "k", "waits"), (5, "main", "k", "waits")]
    await discarded(connection, outbox)
    assert table.parked() == [(4, "main", "k", "due"), (5, "main", "k", "waits")]


async def test_events_without_a_key_are_due_each(connection: Any, outbox: Outbox, table: Table) -> None:
    table.bury(3, None)
    table.bury(4, None)
    await retried(connection, outbox)
    assert table.parked() == [(3, "main", None, "due"), (4, "main", None, "due")]


async def test_other_sinks_and_keys_are_left_alone(connection: Any, outbox: Outbox, table: Table) -> None:
    table.bury(3)
    table.park(4, "other", retry_at="now() + interval '1 min'")
    table.park(5, sink="audit")
    await retried(connection, outbox)
    assert table.parked() == [(3, "main", "k", "due"), (4, "main", "other", "later"), (5, "audit", "k", "waits")]


async def test_an_event_that_is_parked_already_is_not_sent_twice(connection: Any, outbox: Outbox, table: Table) -> None:
    """A pod that had lost the lane parked it, its owner buried it."""
    table.bury(3)
    outbox.execute(
        "INSERT INTO {parked} (number, seq, id, created_at, stored_at, lane, sink, topic, key)"
        " VALUES (9, 3, gen_random_uuid(), now(), now(), 7, 'main', 't', 'k')"
    )
    assert await retried(connection, outbox) == [3]
    assert table.parked() == [(9, "main", "k", "due")]


async def test_an_unrouted_event_goes_where_the_routes_send_it_now(
    connection: Any, outbox: Outbox, table: Table
) -> None:
    table.bury(3, sink="", kind="'unrouted'")
    table.bury(4, sink="", kind="'unrouted'", topic="'lost'")
    assert await retried(connection, outbox, t=["main", "audit"]) == [3]
    by_sink = {sink: (number, does) for number, sink, _key, does in table.parked()}
    assert by_sink["main"] == (3, "due")
    assert by_sink["audit"][1] == "due"
    assert len(by_sink) == 2
    assert table.dead() == [4]


async def test_a_selection_takes_what_it_names(connection: Any, outbox: Outbox, table: Table) -> None:
    table.bury(3, "a")
    table.bury(4, "b", topic="'x'")
    table.bury(5, "c", sink="audit")
    last = table.bury(6, "d", kind="'attempts'")
    numbers = [
        [letter.number for letter in await find(connection, outbox.names, selection, limit=10)]
        for selection in (
            EVERYTHING,
            Selection(key="a"),
            Selection(topic="x"),
            Selection(sink="audit"),
            Selection(kind="attempts"),
            Selection(ids=(last,)),
            Selection(sink="main", key="c"),
        )
    ]
    assert numbers == [[3, 4, 5, 6], [3], [4], [5], [6], [6], []]
    assert await retried(connection, outbox, limit=2) == [3, 4]
    assert table.dead() == [5, 6]


async def test_more_than_one_transaction_keeps_the_order(
    connection: Any, outbox: Outbox, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.stores.dead_letters._CHUNK", 2)
    for number in range(1, 6):
        table.bury(number)
    assert await retried(connection, outbox) == [1, 2, 3, 4, 5]
    assert [row[3] for row in table.parked()] == ["due", "waits", "waits", "waits", "waits"]


async def test_what_dies_again_meanwhile_does_not_come_round_for_ever(
    connection: Any, outbox: Outbox, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.stores.dead_letters._CHUNK", 1)
    table.bury(1)
    numbers = []
    async for letters in retry(connection, outbox.names, EVERYTHING, lambda _: ()):
        numbers += [letter.number for letter in letters]
        table.bury(letters[0].number + 1)  # a pod gives up the next one at once
        assert len(numbers) < 5
    assert numbers == [1]


async def test_a_pod_that_decides_at_the_same_time_is_waited_for(connection: Any, outbox: Outbox, table: Table) -> None:
    """A pod holds the lane FOR SHARE while it parks; the retry may not slip in between (PROTOCOLS.md 2)."""
    table.bury(3)
    pod = await asyncpg.connect(outbox.relay_dsn)
    async with asyncio.timeout(20):
        transaction = pod.transaction()
        await transaction.start()
        await pod.execute(outbox.names.format("SELECT FROM {lease} WHERE lane = 7 FOR SHARE"))
        retrying = asyncio.create_task(retried(connection, outbox))
        blocked = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        while outbox.execute(blocked) != [(1,)]:
            assert not retrying.done()
            await asyncio.sleep(0.01)
        assert table.parked() == []
        await transaction.commit()
        assert await retrying == [3]
    await pod.close()


# --- discard -----------------------------------------------------------------------------------------


async def test_discarding_a_holder_lets_its_key_go_on(connection: Any, outbox: Outbox, table: Table) -> None:
    """Without a new head, 4 and 5 would wait for ever."""
    table.bury(3, holds=True)
    table.park(4)
    table.park(5)
    assert await discarded(connection, outbox) == [3]
    assert table.parked() == [(4, "main", "k", "due"), (5, "main", "k", "waits")]


async def test_discarding_one_of_two_holders_keeps_the_key_held(connection: Any, outbox: Outbox, table: Table) -> None:
    table.bury(3, holds=True)
    table.bury(4, holds=True)
    table.park(5)
    await discarded(connection, outbox, Selection(ids=(await numbered(connection, outbox, 4),)))
    assert table.parked() == [(5, "main", "k", "waits")]
    await discarded(connection, outbox)
    assert table.parked() == [(5, "main", "k", "due")]


async def numbered(connection: Any, outbox: Outbox, number: int) -> uuid.UUID:
    letters: list[DeadLetter] = await find(connection, outbox.names, EVERYTHING, limit=100)
    return next(letter.id for letter in letters if letter.number == number)


# --- the commands --------------------------------------------------------------------------------------


@pytest.fixture
def command(outbox: Outbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RELAY_DATABASE__DSN", outbox.relay_dsn)
    monkeypatch.setenv("RELAY_SINKS__MAIN__TYPE", "null")

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(("dead-letters", *arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_list_and_show_tell_what_it_is_and_what_it_holds(command: Any, table: Table) -> None:
    identity = table.bury(
        3, holds=True, payload="""'{"ä": 1}'""", reason=r"E'too\x1b[31m large'", headers="""'{"h": "1"}'"""
    )
    code, out, err = command("list")
    assert (code, err) == (0, "1 dead letters\n")
    assert f"{identity}  main  t  key=k  rejected  attempts=12  holds its key  too\\x1b[31m large" in out
    code, out, _ = command("show", "--id", str(identity))
    assert code == 0
    for expected in ("created_at  infinity", 'headers     {"h": "1"}', '{"ä": 1}', "later events of its key wait"):
        assert expected in out
    document = json.loads(command("show", "--json")[1])["dead_letters"][0]
    assert (document["payload"], document["holds"], document["number"]) == ('{"ä": 1}', True, 3)
    assert command("show", "--id", str(uuid.uuid4()))[0] == 1


def test_a_payload_that_is_no_text_is_shown_in_hexadecimal(command: Any, table: Table) -> None:
    table.bury(3, payload=r"'\xff00fe'")
    table.bury(4, payload="NULL")
    out = command("show")[1]
    assert "ff 00fe" in out
    assert "NULL, a tombstone" in out
    both = json.loads(command("show", "--json")[1])["dead_letters"]
    assert [(one["payload"], one["payload_hex"], one["payload_bytes"]) for one in both] == [
        (None, "ff00fe", 3),
        (None, None, None),
    ]


def test_retry_and_discard_say_what_they_released(command: Any, table: Table) -> None:
    first, second = table.bury(3, holds=True), table.bury(4, "z")
    code, out, err = command("retry", "--id", str(first))
    assert (code, err) == (0, "1 retried\n")
    assert "it held key 'k': its key goes on after it" in out
    assert json.loads(command("discard", "--yes", "--all", "--json")[1])["discarded"][0]["id"] == str(second)
    assert command("retry", "--all")[::2] == (1, "no such dead letter\n")


def test_nothing_is_done_without_a_choice_or_a_yes(command: Any, table: Table) -> None:
    table.bury(3)
    assert command("retry")[0] == 2
    assert command("discard", "--yes")[0] == 2
    code, _, err = command("discard", "--all")
    assert code == 2
    assert "say --yes" in err
    assert table.dead() == [3]


def test_retry_names_topics_that_still_have_no_route(command: Any, table: Table, tmp_path: Any) -> None:
    (tmp_path / "relay.toml").write_text("[[routes]]\ntopic = 'x'\nsinks = ['main']\n", "utf-8")
    table.bury(3, sink="", kind="'unrouted'")
    code, _, err = command("retry", "--sink", "")
    assert code == 1
    assert "no route takes topic 't'" in err
    assert table.dead() == [3]
