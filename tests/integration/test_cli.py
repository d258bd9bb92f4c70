"""The commands against a real database: what an operator sees, and what the shell gets."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import redis

from relay.cli.app import run
from relay.cli.pings import ping_all
from relay.config import SinkSection
from tests.outbox import RELAY

if TYPE_CHECKING:
    from tests.outbox import Outbox, OutboxFactory
    from tests.servers.pgbouncer import PgBouncer
    from tests.servers.postgres import Postgres
    from tests.servers.redis import Valkey


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Relay = Callable[..., Result]


@pytest.fixture
def relay(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Relay:
    """Runs one command line with these variables and no others of ours."""

    def call(*arguments: str, **environ: str) -> Result:
        for name in [name for name in os.environ if name.startswith("RELAY_") and not name.startswith("RELAY_TEST_")]:
            monkeypatch.delenv(name)
        for name, value in environ.items():
            monkeypatch.setenv(f"RELAY_{name}", value)
        capsys.readouterr()
        code = run(arguments)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    monkeypatch.chdir(tmp_path)
    return call


NULL_SINK = {"SINKS__MAIN__TYPE": "null"}


def environ(outbox: Outbox, dsn: str | None = None, **more: str) -> dict[str, str]:
    return {"DATABASE__DSN": dsn or outbox.relay_dsn, **NULL_SINK, **more}


def insert(outbox: Outbox, rows: Sequence[tuple[str, str | None, str]]) -> None:
    with psycopg.connect(outbox.app_dsn) as connection:
        connection.cursor().executemany("INSERT INTO outbox (topic, key, payload) VALUES (%s, %s, %s)", rows)


# --- migrate -----------------------------------------------------------------------------------------


def test_migrate_needs_only_a_dsn_and_says_what_it_did(relay: Relay, outbox_factory: OutboxFactory) -> None:
    empty = outbox_factory(migrated=False)
    dsn = {"DATABASE__DSN": empty.owner_dsn}
    assert relay("migrate", "--check", **dsn).code == 1
    assert "behind: 0000_migrations" in relay("migrate", "--check", **dsn).out
    planned = relay("migrate", "--dry-run", **dsn)
    assert planned.code == 0
    assert "CREATE TABLE" in planned.out
    assert relay("migrate", "--check", **dsn).code == 1
    done = relay("migrate", **dsn)
    assert (done.code, done.err) == (0, "")
    assert "applied 0001_outbox" in done.out
    assert relay("migrate", **dsn).out == "Nothing to do: the tables are up to date.\n"
    assert relay("migrate", "--json", **dsn).json == {"applied": []}
    assert relay("migrate", "--check", "--json", **dsn).json["state"] == "current"
    assert relay("migrate", "--check", **dsn).code == 0


def test_migrate_prints_the_roles(relay: Relay) -> None:
    printed = relay("migrate", "--roles", "app=shop", "--roles", "relay=outbox relay", DATABASE__DSN="postgresql://h/d")
    assert printed.code == 0
    assert 'TO "shop"' in printed.out
    assert 'TO "outbox relay"' in printed.out
    assert relay("migrate", "--roles", "shop", DATABASE__DSN="postgresql://h/d").code == 2


def test_a_role_without_rights_is_told_what_to_do(relay: Relay, outbox_factory: OutboxFactory) -> None:
    empty = outbox_factory(migrated=False)
    refused = relay("migrate", DATABASE__DSN=empty.app_dsn)
    assert refused.code == 3
    assert refused.err.startswith("error: ")
    assert "\nhint: " in refused.err
    assert "Traceback" not in refused.err


# --- errors of the database --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [("migrate",), ("status", "--no-ping"), ("dead-letters", "list"), ("run", "--dry-run")]
)
def test_an_unreachable_database_names_host_and_port(relay: Relay, command: tuple[str, ...]) -> None:
    refused = relay(*command, DATABASE__DSN="postgresql://relay:geheim@127.0.0.1:1/shop", **NULL_SINK)
    assert refused.code == 1
    assert refused.err.startswith("error: cannot reach PostgreSQL at 127.0.0.1:1/shop: ")
    assert "Check that it runs" in refused.err
    assert "geheim" not in refused.err
    assert "Traceback" not in refused.err


def test_a_database_that_does_not_exist_is_a_mistake_in_the_settings(relay: Relay, postgres: Postgres) -> None:
    refused = relay("status", DATABASE__DSN=postgres.dsn("nowhere"))
    assert refused.code == 2
    assert 'database "nowhere" does not exist' in refused.err
    assert "hint: Create the database" in refused.err


def test_tables_that_are_not_there_lead_to_migrate(relay: Relay, outbox_factory: OutboxFactory) -> None:
    refused = relay("status", "--no-ping", "--interval", "0.2", DATABASE__DSN=outbox_factory(migrated=False).owner_dsn)
    assert refused.code == 3
    assert "hint: Run `relay migrate`" in refused.err


# --- status --------------------------------------------------------------------------------------------


def test_status_shows_backlog_sinks_and_pods(relay: Relay, outbox: Outbox) -> None:
    insert(outbox, [("orders", f"k{n}", "{}") for n in range(1234)] + [("mails", None, "{}")])
    outbox.execute(
        "INSERT INTO {member} (pod, expires_at, version) VALUES ('pod-a', now() + interval '1 min', '0.1.0'),"
        " ('pod-b', now() - interval '1 min', '0.1.0')"
    )
    outbox.execute("UPDATE {lease} SET owner = CASE WHEN lane < 40 THEN 'pod-a' WHEN lane < 60 THEN 'pod-b' END")
    park(outbox, "main", 1)
    park(outbox, "renamed", 2)
    bury(outbox, "main", key="k1", holds=True)
    shown = relay("status", "--interval", "0.2", **environ(outbox))
    assert (shown.code, shown.err) == (0, "")
    for expected in (
        r"public\.outbox .*settle = delete",
        r"orders +1,234",
        r"mails +1 ",
        r"main +null +up, \d+ ms +1 +[\d.]+ s +1 \(1 hold\)",
        r"renamed .*not\s+configured",
        r"pod-a +40 +█{10} ",
        r"pod-b \(gone\) +20 +█{5} ",
        r"no owner +4 +█ ",
    ):
        assert re.search(expected, shown.out), (expected, shown.out)


def test_status_as_json_has_the_same_figures(relay: Relay, outbox: Outbox) -> None:
    insert(outbox, [("orders", "k", "{}")] * 3)
    document = relay("status", "--json", "--interval", "0.2", **environ(outbox)).json
    assert document["backlog"]["events"] == 3
    assert document["backlog"]["at_least"] is False
    assert document["backlog"]["topics"][0]["topic"] == "orders"
    assert 0 <= document["backlog"]["oldest_age_seconds"] < 60
    assert document["sinks"][0]["name"] == "main"
    assert document["sinks"][0]["up"] is True
    assert document["pods"] == [
        {"pod": None, "version": None, "started_at": None, "alive": False, "lanes": list(range(64))}
    ]
    assert outbox.app_dsn not in json.dumps(document)


def test_status_says_when_it_stopped_counting(relay: Relay, outbox: Outbox) -> None:
    with psycopg.connect(outbox.app_dsn) as connection:
        connection.execute("INSERT INTO outbox (topic, payload) SELECT 'bulk', '1' FROM generate_series(1, 30000)")
    backlog = relay("status", "--json", "--no-ping", "--interval", "0.2", **environ(outbox)).json["backlog"]
    assert backlog["at_least"] is True
    assert backlog["events"] == 64 * 200
    assert backlog["events_max"] == 30_000
    assert "12,800 to 30,000" in relay("status", "--no-ping", "--interval", "0.2", **environ(outbox)).out


def test_status_cannot_be_made_to_write_terminal_commands(relay: Relay, outbox: Outbox) -> None:
    insert(outbox, [("evil\x1b]0;owned\x07topic", "k", "{}")])
    shown = relay("status", "--no-ping", "--interval", "0.2", **environ(outbox))
    assert "\x1b]0" not in shown.out
    assert "evil" in shown.out


# --- check ---------------------------------------------------------------------------------------------


def finding(result: Result, name: str) -> dict[str, str]:
    found: list[dict[str, str]] = [one for one in result.json["findings"] if one["name"] == name]
    assert len(found) == 1, result.json
    return found[0]


def test_check_of_a_healthy_outbox_is_all_ok(relay: Relay, outbox: Outbox, valkey: Valkey) -> None:
    redis = {"SINKS__MAIN__TYPE": "redis", "SINKS__MAIN__URL": valkey.url}
    looked = relay("check", "--json", DATABASE__DSN=outbox.relay_dsn, **redis)
    assert {one["state"] for one in looked.json["findings"]} == {"ok"}, looked.json
    assert looked.code == 0
    assert [one["name"] for one in looked.json["findings"]] == [
        *("settings", "database", "schema", "rights", "sequence", "trigger", "pods", "listen", "sink main")
    ]
    text = relay("check", DATABASE__DSN=outbox.relay_dsn, **redis)
    assert re.search(r"^ok +rights +test_relay may do", text.out, re.MULTILINE)


def test_check_names_each_missing_right_and_the_grant(relay: Relay, outbox: Outbox) -> None:
    role = f"r{uuid.uuid4().hex[:8]}"
    outbox.server.execute(f"CREATE ROLE {role} LOGIN")
    try:
        outbox.execute(f"GRANT SELECT ON {{migration}}, {{lease}}, {{outbox}} TO {role}")
        looked = relay("check", "--json", **environ(outbox, outbox.server.dsn(outbox.name, role)))
        rights = finding(looked, "rights")
        assert looked.code == 1
        assert rights["state"] == "fail"
        assert "DELETE on outbox" in rights["text"]
        assert "UPDATE (published_at) on outbox" in rights["text"]
        assert "USAGE on sequence outbox_parked_number_seq" in rights["text"]
        assert "SELECT on outbox," not in rights["text"]
        assert f"relay migrate --roles relay={role}" in rights["hint"]
    finally:
        outbox.execute(f"DROP OWNED BY {role}")
        outbox.server.execute(f"DROP ROLE {role}")


def test_check_before_migrate_says_migrate(relay: Relay, outbox_factory: OutboxFactory) -> None:
    looked = relay("check", "--json", **environ(outbox_factory(migrated=False), None))
    assert looked.code == 1
    assert finding(looked, "schema")["hint"] == "Run `relay migrate`."


def test_check_finds_a_cached_sequence(relay: Relay, outbox: Outbox) -> None:
    """PROTOCOLS.md 8: with CACHE 10 a later transaction takes a lower number."""
    outbox.execute("ALTER SEQUENCE {outbox_seq} CACHE 10")
    sequence = finding(relay("check", "--json", **environ(outbox)), "sequence")
    assert sequence["state"] == "fail"
    assert "CACHE 1;" in sequence["hint"]


def test_check_finds_a_trigger_that_contradicts_the_settings(relay: Relay, outbox: Outbox) -> None:
    assert finding(relay("check", "--json", **environ(outbox, DATABASE__NOTIFY="false")), "schema")["state"] == "fail"
    outbox.execute("DROP TRIGGER {wake_trigger} ON {outbox}")
    assert finding(relay("check", "--json", **environ(outbox)), "trigger")["state"] == "warn"


def test_check_notices_a_transaction_pooler(relay: Relay, outbox: Outbox, pgbouncer: PgBouncer) -> None:
    """FIELD.md B8: LISTEN through PgBouncer in transaction mode hears nothing."""
    dsn = f"postgresql://{RELAY}@{pgbouncer.host}:{pgbouncer.port}/{outbox.name}"
    listen = finding(relay("check", "--json", **environ(outbox, dsn)), "listen")
    assert listen["state"] == "warn"
    assert "transaction pooler" in listen["text"]
    assert "database.direct_dsn" in listen["hint"]
    both = relay("check", "--json", **environ(outbox, dsn, DATABASE__DIRECT_DSN=outbox.relay_dsn))
    assert finding(both, "listen")["state"] == "ok"


def test_check_names_what_was_left_behind(relay: Relay, outbox: Outbox) -> None:
    park(outbox, "renamed", 1)
    bury(outbox, "main", key="k", holds=True)
    looked = relay("check", "--json", **environ(outbox))
    assert "sink 'renamed', which is not configured" in finding(looked, "parked")["text"]
    assert finding(looked, "dead letters")["text"] == "1 dead letters, 1 of them hold their keys"


def test_check_shows_a_broker_that_is_down_and_wrong_options(relay: Relay, outbox: Outbox) -> None:
    redis = {"SINKS__MAIN__TYPE": "redis", "SINKS__MAIN__URL": "redis://:geheim@127.0.0.1:1"}
    looked = relay("check", "--json", DATABASE__DSN=outbox.relay_dsn, **redis)
    assert looked.code == 1
    assert finding(looked, "sink main")["state"] == "fail"
    assert "geheim" not in looked.out
    wrong = relay("check", "--json", DATABASE__DSN=outbox.relay_dsn, SINKS__MAIN__TYPE="reddis")
    assert "did you mean 'redis'" in finding(wrong, "sink main")["text"]


def test_check_goes_on_to_the_sinks_when_the_database_is_down(relay: Relay) -> None:
    looked = relay("check", "--json", DATABASE__DSN="postgresql://127.0.0.1:1/x", **NULL_SINK)
    assert looked.code == 1
    assert "cannot reach PostgreSQL at 127.0.0.1:1" in finding(looked, "database")["text"]
    assert finding(looked, "sink main")["state"] == "ok"


# --- run --dry-run -----------------------------------------------------------------------------------


def test_a_dry_run_shows_where_events_would_go_and_touches_nothing(relay: Relay, outbox: Outbox, tmp_path: Any) -> None:
    (tmp_path / "relay.toml").write_text(
        f"""
        [database]
        dsn = "{outbox.relay_dsn}"
        [sinks.main]
        type = "null"
        [[routes]]
        topic = "order.*"
        sinks = ["main"]
        destination = "shop.{{topic}}.{{key}}"
        """,
        "utf-8",
    )
    insert(outbox, [("order.made", "k1", "{}"), ("mail", None, "{}")])
    shown = relay("run", "--dry-run")
    assert shown.code == 0
    assert "order.made  key=k1  2 B  -> main: shop.order.made.k1" in shown.out
    assert "mail  key=-  2 B  -> dead letter: no route takes it" in shown.out
    assert relay("run", "--dry-run", "--json").json["events"][0]["targets"] == [["main", "shop.order.made.k1"]]
    assert outbox.execute("SELECT count(*) FROM {outbox}") == [(2,)]
    assert outbox.execute("SELECT count(*) FROM {lease} WHERE owner IS NOT NULL") == [(0,)]


# --- rows that a pod would have written --------------------------------------------------------------


def park(outbox: Outbox, sink: str, seq: int) -> None:
    outbox.execute(
        "INSERT INTO {parked} (seq, id, created_at, stored_at, lane, sink, topic, retry_at)"
        f" VALUES ({seq}, gen_random_uuid(), now(), now(), 0, '{sink}', 't', now())"
    )


def bury(outbox: Outbox, sink: str, *, key: str, holds: bool) -> None:
    outbox.execute(
        "INSERT INTO {dead_letter} (seq, id, created_at, stored_at, lane, sink, topic, key, kind, reason, holds)"
        f" VALUES (99, gen_random_uuid(), now(), now(), 0, '{sink}', 't', '{key}', 'rejected', 'too large', {holds})"
    )


async def test_check_warns_about_a_broker_that_may_evict_events(valkey: Valkey) -> None:
    """A Redis that evicts keys under memory pressure takes messages now and drops streams later."""
    client = redis.Redis.from_url(valkey.url)
    before = str(client.config_get("maxmemory-policy")["maxmemory-policy"])
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        (ping,) = await ping_all({"main": SinkSection.model_validate({"type": "redis", "url": valkey.url})})
    finally:
        client.config_set("maxmemory-policy", before)
        client.close()
    assert ping.up
    assert any("allkeys-lru" in sentence for sentence in ping.advice)
