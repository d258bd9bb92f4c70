"""The pure parts of the Redis sink: bytes, rounds, replies, and the table of errors."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import hiredis
import pytest
from hiredis import Reader, ReplyError
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from relay.sink import CONFIRMED, DEFERRED, Outcome, Status, rejected, unavailable
from relay.sinks.redis.attempt import Attempt
from relay.sinks.redis.encoding import command, xadd, xadd_start
from relay.sinks.redis.errors import judge
from relay.sinks.redis.options import Address, RedisOptions
from relay.sinks.redis.pace import Pace
from relay.sinks.redis.replies import all_confirmed, read_group, reply_count
from relay.sinks.redis.request import ROUND_BYTES_MAX, build
from relay.sinks.redis.rounds import defer, next_round
from relay.testing.messages import make_message
from relay.timestamps import rfc3339

pack_command: Any = hiredis.pack_command  # its stub says that commands have one word

# --- encoding -------------------------------------------------------------------------------------

text = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    stream=text,
    maxlen=st.none() | st.integers(1, 10**9),
    key=st.none() | text,
    payload=st.none() | st.binary(),
    headers=st.none() | text,
    created_at=st.integers(-(10**17), 10**17),
)
def test_an_xadd_is_what_hiredis_would_pack(
    stream: str, maxlen: int | None, key: str | None, payload: bytes | None, headers: str | None, created_at: int
) -> None:
    """Written by hand for speed, so it is compared with the library's, byte for byte."""
    message = make_message(stream, key=key, payload=payload, headers=headers, created_at=created_at)
    words: list[str | bytes] = ["XADD", stream, *([] if maxlen is None else ["MAXLEN", "~", str(maxlen)]), "*"]
    words += ["id", message.id]
    words += [] if key is None else ["key", key]
    words += [] if payload is None else ["payload", payload]
    words += [] if headers is None else ["headers", headers]
    words += ["created_at", rfc3339(created_at)]
    assert xadd(xadd_start(stream, maxlen), message) == pack_command(tuple(words))


@given(st.lists(text | st.binary() | st.integers(), min_size=1))
def test_any_command_is_what_hiredis_would_pack(words: list[str | bytes | int]) -> None:
    """Lengths count bytes, not characters."""
    assert command(*words) == pack_command(tuple(words))


# --- rounds ---------------------------------------------------------------------------------------

routed = st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.sampled_from(["s", "t", "u"])), max_size=30)


@given(routed)
def test_rounds_send_everything_once_and_no_key_overtakes_itself(shape: list[tuple[str | None, str]]) -> None:
    """Over all rounds each key's messages go in batch order, and within a round to one stream only."""
    batch = [make_message(stream, key=key) for key, stream in shape]
    pending, sent = list(range(len(batch))), []
    while pending:
        groups = next_round(batch, pending)
        streams_of_key = defaultdict(set)
        for stream, group in groups.items():
            assert group == sorted(group)
            for index in group:
                assert batch[index].destination == stream
                streams_of_key[batch[index].key].add(stream)
        assert all(len(streams) == 1 for key, streams in streams_of_key.items() if key is not None)
        now = [index for group in groups.values() for index in group]
        assert now
        sent += now
        pending = [index for index in pending if index not in now]
    assert sorted(sent) == list(range(len(batch)))
    for key in ("a", "b", "c"):
        order = [index for index in sent if batch[index].key == key]
        assert order == sorted(order)


def test_a_key_that_comes_back_to_its_first_stream_waits_as_well() -> None:
    """A → s, a → t, a → s: the third must not join the first."""
    batch = [make_message(stream, key="a") for stream in ("s", "t", "s")]
    assert next_round(batch, [0, 1, 2]) == {"s": [0]}


def test_followers_of_a_failure_are_deferred() -> None:
    """Only those of its key; messages without a key follow nobody."""
    batch = [make_message("s", key=key) for key in ("a", "b", None, "a", "b", None)]
    failure = unavailable("busy")
    outcomes = [failure, CONFIRMED, failure, failure, CONFIRMED, CONFIRMED]
    assert defer(batch, outcomes) == [failure, CONFIRMED, failure, DEFERRED, CONFIRMED, CONFIRMED]


def test_a_rejection_behind_a_failure_is_deferred() -> None:
    """A dead letter must not be decided while an earlier event of its key is still to come."""
    batch = [make_message("s", key="a"), make_message("s", key="a")]
    assert defer(batch, [unavailable("busy"), rejected("large")]) == [unavailable("busy"), DEFERRED]


def test_a_round_is_bounded_and_a_large_message_travels_alone() -> None:
    """So every server takes it, and it is known which message ended a connection."""
    sizes = [400_000, 400_000, 400_000, 3_000_000, 10, 10]
    attempt = Attempt([make_message("s", payload=b"x" * size) for size in sizes])
    rounds = []
    while pending := attempt.pending():
        request = build(attempt, pending, maxlen=None, value_bytes_max=10**9, round_bytes=ROUND_BYTES_MAX)
        rounds.append(request.groups)
        assert (request.large_message is not None) == (len(request.data) > ROUND_BYTES_MAX)
        for index in request.groups[0]:
            attempt.record(index, CONFIRMED)
    assert rounds == [[[0, 1]], [[2]], [[3]], [[4, 5]]]


def test_the_pace_follows_the_link_down_and_up() -> None:
    """A second's worth, between 8 KiB and 1 MiB; a small round that was quick proves nothing about large ones."""
    pace = Pace(deadline_seconds=10)
    assert pace.round_bytes == ROUND_BYTES_MAX
    pace.answered(ROUND_BYTES_MAX, 4.0)
    assert pace.round_bytes == ROUND_BYTES_MAX // 4
    pace.answered(100, 0.001)
    assert pace.round_bytes == ROUND_BYTES_MAX // 4
    for _ in range(9):
        pace.timed_out()
    assert pace.round_bytes == 8 * 1024
    for _ in range(20):
        pace.answered(pace.round_bytes, 0.1)
    assert pace.round_bytes == ROUND_BYTES_MAX


def test_several_streams_share_the_room_of_a_round() -> None:
    """A stream that finds no room waits; the first message of a round always goes."""
    attempt = Attempt([make_message(stream, key=None, payload=b"x" * 300) for stream in ("s", "t", "u")])
    rounds = []
    while pending := attempt.pending():
        groups = build(attempt, pending, maxlen=None, value_bytes_max=10**9, round_bytes=1_000).groups
        rounds.append(groups)
        for [index] in groups:
            attempt.record(index, CONFIRMED)
    assert rounds == [[[0], [1]], [[2]]]


def test_each_stream_of_a_round_is_one_transaction() -> None:
    """So that it fails whole (PROTOCOLS.md 21); one command alone needs none."""
    attempt = Attempt([make_message(stream, key=None) for stream in ("s", "t", "s")])
    request = build(attempt, [0, 1, 2], maxlen=None, value_bytes_max=10**9, round_bytes=ROUND_BYTES_MAX)
    assert request.groups == [[0, 2], [1]]
    words = [match.decode() for match in re.findall(rb"\r\n(MULTI|XADD|EXEC)\r\n", request.data)]
    assert words == ["MULTI", "XADD", "XADD", "EXEC", "XADD"]
    assert request.replies == 5


@pytest.mark.parametrize("broken", ["destination", "key"])
def test_text_that_is_not_unicode_is_rejected_alone(broken: str) -> None:
    """It cannot come from PostgreSQL, but from a route's template or a test."""
    bad, good = make_message("s", key="a"), make_message("s", key="b")
    setattr(bad, broken, "\ud800")
    attempt = Attempt([bad, good])
    build(attempt, [0, 1], maxlen=None, value_bytes_max=10**9, round_bytes=ROUND_BYTES_MAX)
    assert [outcome.status for outcome in attempt.outcomes(CONFIRMED)] == [Status.REJECTED, Status.CONFIRMED]


@pytest.mark.parametrize("part", ["payload", "headers", "key"])
def test_each_part_has_the_limit(part: str) -> None:
    """The reason names the part and its size, never its content."""
    message = make_message("s")
    setattr(message, part, b"x" * 200 if part == "payload" else "x" * 200)
    attempt = Attempt([message])
    build(attempt, [0], maxlen=None, value_bytes_max=100, round_bytes=ROUND_BYTES_MAX)
    assert attempt.outcomes(CONFIRMED) == [rejected(f"{part} of 200 bytes is over the limit of 100")]


# --- replies --------------------------------------------------------------------------------------


def parse(wire: bytes) -> list[Any]:
    """Replies as the connection sees them."""
    reader = Reader()
    reader.feed(wire)
    replies = []
    while (reply := reader.gets()) is not False:
        replies.append(reply)
    return replies


def outcomes_of(messages: int, wire: bytes) -> list[Outcome]:
    """Outcomes of one group."""
    replies = parse(wire)
    assert len(replies) == reply_count(messages)
    outcomes = [verdict.outcome for verdict in read_group(messages, replies)]
    assert all_confirmed(messages, replies) == (outcomes == [CONFIRMED] * messages)
    return outcomes


QUEUED = b"+QUEUED\r\n"


def test_ids_confirm() -> None:
    """One for each message, whether in a transaction or alone."""
    assert outcomes_of(1, b"$3\r\n1-1\r\n") == [CONFIRMED]
    assert outcomes_of(2, b"+OK\r\n" + QUEUED * 2 + b"*2\r\n$3\r\n1-1\r\n$3\r\n1-2\r\n") == [CONFIRMED] * 2


@pytest.mark.parametrize(
    "last", [b"*1\r\n$3\r\n1-1\r\n", b"*3\r\n$3\r\n1-1\r\n$3\r\n1-2\r\n$3\r\n1-3\r\n", b"*-1\r\n", b":2\r\n"]
)
def test_fewer_or_other_ids_than_messages_confirm_nothing(last: bytes) -> None:
    """Ids are counted: what is not proved is unknown."""
    outcomes = outcomes_of(2, b"+OK\r\n" + QUEUED * 2 + last)
    assert [outcome.status for outcome in outcomes] == [Status.UNAVAILABLE] * 2


@pytest.mark.parametrize("reply", [b"$-1\r\n", b":1\r\n", b"*0\r\n"])
def test_a_reply_that_is_no_id_confirms_nothing(reply: bytes) -> None:
    """Nil is what XADD says when it added nothing."""
    assert outcomes_of(1, reply)[0].status is Status.UNAVAILABLE


def test_a_refusal_while_queueing_fails_the_whole_group_with_its_cause() -> None:
    """EXECABORT tells nothing; the queued error does."""
    wire = (
        b"+OK\r\n"
        + QUEUED
        + b"-OOM command not allowed\r\n-EXECABORT Transaction discarded because of previous errors.\r\n"
    )
    assert outcomes_of(2, wire) == [unavailable("OOM command not allowed", sink_down=True)] * 2


def test_a_refusal_of_exec_itself_fails_the_whole_group_with_its_cause() -> None:
    """Memory can run full between the last XADD and EXEC."""
    wire = b"+OK\r\n" + QUEUED * 2 + b"-EXECABORT Transaction discarded because of: OOM no memory\r\n"
    assert [outcome.sink_down for outcome in outcomes_of(2, wire)] == [True, True]


def test_items_of_exec_fail_one_by_one() -> None:
    """redis-py would raise the first and forget the others (FIELD.md E3)."""
    wire = b"+OK\r\n" + QUEUED * 3 + b"*3\r\n$3\r\n1-1\r\n-WRONGTYPE x\r\n$3\r\n1-2\r\n"
    assert outcomes_of(3, wire) == [CONFIRMED, unavailable("WRONGTYPE x"), CONFIRMED]


def test_without_a_transaction_each_reply_counts() -> None:
    """MULTI was refused while the server loaded, then it was done: each XADD ran by itself."""
    wire = b"-LOADING x\r\n-LOADING x\r\n$3\r\n1-1\r\n-ERR EXEC without MULTI\r\n"
    assert outcomes_of(2, wire) == [unavailable("LOADING x", sink_down=True), CONFIRMED]


def test_groups_whose_replies_are_complete_count_after_a_cut() -> None:
    """The rest is unknown."""
    attempt = Attempt([make_message(f"s{n}", key=f"k{n}") for n in range(5)])
    replies = parse(b"$3\r\n1-1\r\n+OK\r\n" + QUEUED * 2 + b"*2\r\n$3\r\n1-1\r\n$3\r\n1-2\r\n+OK\r\n" + QUEUED)
    attempt.read([[0], [1, 2], [3, 4]], replies)
    unknown = unavailable("cut", sink_down=True)
    assert attempt.outcomes(unknown) == [CONFIRMED] * 3 + [unknown] * 2


# --- errors ---------------------------------------------------------------------------------------

DOWN, DOWN_OPERATOR, OWN, OWN_OPERATOR = (True, False), (True, True), (False, False), (False, True)


@pytest.mark.parametrize(
    ("reply", "meaning", "reconnect"),
    [
        ("LOADING Redis is loading the dataset in memory", DOWN, True),
        ("READONLY You can't write against a read only replica.", DOWN, True),
        ("MASTERDOWN Link with MASTER is down", DOWN, True),
        ("CLUSTERDOWN Hash slot not served", DOWN, True),
        ("MISCONF Redis is configured to save RDB snapshots", DOWN, False),
        ("OOM command not allowed when used memory > 'maxmemory'.", DOWN, False),
        ("EXECABORT Transaction discarded because of: OOM command not allowed", DOWN, False),
        ("BUSY Redis is busy running a script.", DOWN, False),
        ("TRYAGAIN Multiple keys request during rehashing of slot", DOWN, False),
        ("NOREPLICAS Not enough good replicas to write.", DOWN, False),
        ("ERR max number of clients reached", DOWN, True),
        ("NOAUTH Authentication required.", DOWN_OPERATOR, True),
        ("WRONGPASS invalid username-password pair or user is disabled.", DOWN_OPERATOR, True),
        ("ERR invalid password", DOWN_OPERATOR, True),
        ("ERR AUTH <password> called without any password configured for the default user.", DOWN_OPERATOR, True),
        ("ERR DB index is out of range", DOWN_OPERATOR, True),
        ("DENIED Redis is running in protected mode", DOWN_OPERATOR, True),
        ("NOPERM User app has no permissions to run the 'xadd' command", DOWN_OPERATOR, False),
        ("NOPERM this user has no permissions to run the 'xadd' command or its subcommand", DOWN_OPERATOR, False),
        ("NOPERM No permissions to access a key", OWN_OPERATOR, False),
        ("NOPERM this user has no permissions to access one of the keys used as arguments", OWN_OPERATOR, False),
        ("MOVED 3999 127.0.0.1:6381", OWN_OPERATOR, False),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", OWN, False),
        ("ERR The stream has exhausted the last possible ID, unable to add more items", OWN, False),
        ("SOMETHING new", OWN, False),
        ("", OWN, False),
    ],
)
def test_what_an_error_means(reply: str, meaning: tuple[bool, bool], reconnect: bool) -> None:
    """The one table: the whole sink or this message; an operator or time; stay or connect again."""
    verdict = judge(reply)
    outcome = verdict.outcome
    assert outcome.status is Status.UNAVAILABLE
    assert ((outcome.sink_down, outcome.misconfigured), verdict.reconnect) == (meaning, reconnect)


@pytest.mark.parametrize(
    "reply",
    [
        "ERR Protocol error: invalid bulk length",
        "ERR Elements are too large to be stored",
        "ERR string exceeds maximum allowed size (proto-max-bulk-len)",
    ],
)
def test_what_is_too_large_is_rejected(reply: str) -> None:
    """Trying again would never help."""
    assert judge(reply).outcome.status is Status.REJECTED


def test_an_unknown_command_is_told_without_its_arguments() -> None:
    """The server repeats them in its reply, and one is the payload."""
    outcome = judge("ERR unknown command 'XADD', with args beginning with: 's' '*' 'payload' 'secret'").outcome
    assert (outcome.sink_down, outcome.misconfigured) == (True, True)
    assert "secret" not in outcome.reason


def test_hiredis_gives_errors_inside_arrays_as_objects() -> None:
    """What `read_group` relies on."""
    [[first, second]] = parse(b"*2\r\n-WRONGTYPE x\r\n$1\r\na\r\n")
    assert isinstance(first, ReplyError)
    assert second == b"a"


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://h", Address("h", 6379, None, 0, tls=False)),
        ("redis://u:p%40%3A%25@h:1/2", Address("h", 1, None, 2, tls=False, username="u", password="p@:%")),
        ("rediss://:p@[::1]:7/", Address("::1", 7, None, 0, tls=True, password="p")),
        ("redis://h?db=4", Address("h", 6379, None, 4, tls=False)),
        (
            "unix://u:p@/run/redis.sock?db=3",
            Address("", 6379, "/run/redis.sock", 3, tls=False, username="u", password="p"),
        ),
    ],
)
def test_a_url_is_an_address(url: str, address: Address) -> None:
    """And its text shows no user and no password."""
    assert Address.parse(url) == address
    assert "p@" not in f"{address} {address!r}"
    assert "password" not in repr(address)


@pytest.mark.parametrize(
    "url", ["h:6379", "http://h", "redis://", "redis://h:no", "redis://h/x", "redis://h?ssl=1", "redis://[x"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    """At start, not at the first event."""
    with pytest.raises(ValidationError):
        RedisOptions.model_validate({"url": url})


def test_a_password_of_its_own_wins_over_the_urls() -> None:
    """It may come from a file, where the URL cannot."""
    options = RedisOptions.model_validate({"url": "redis://a:b@h", "username": "c", "password": "d"})
    assert (options.address.username, options.address.password) == ("c", "d")
    assert "'d'" not in repr(options)
    assert "a:b" not in repr(options)
