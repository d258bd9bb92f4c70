"""What a file, variables and flags make together, and the one clear line that each mistake gets."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

from relay.config import Config, Database, Loaded, load, read
from relay.config.shown import settings
from relay.errors import InvalidConfig

SMALLEST = """
[database]
dsn = "postgresql://relay:pg-secret@db:5432/shop"

[sinks.main]
type = "redis"
url = "redis://:redis-secret@broker:6379/0"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(folder: Path, text: str = SMALLEST, flags: dict[str, str] | None = None, **environ: str) -> Loaded:
    file = folder / "relay.toml"
    file.write_text(text, "utf-8")
    return read(file, environ, flags)


def refused(folder: Path, text: str = SMALLEST, flags: dict[str, str] | None = None, **environ: str) -> str:
    with pytest.raises(InvalidConfig) as caught:
        loaded(folder, text, flags, **environ)
    assert caught.value.hint
    everything = "".join(traceback.format_exception(caught.value))
    assert "pg-secret" not in everything
    assert "redis-secret" not in everything
    assert "Qx7" not in everything
    return str(caught.value)


# --- where settings come from ----------------------------------------------------------------------


def test_a_dsn_and_a_sink_are_enough(folder: Path) -> None:
    config = loaded(folder).config
    assert config.database.dsn.get_secret_value() == "postgresql://relay:pg-secret@db:5432/shop"
    assert config.sinks["main"].type == "redis"
    assert config.sinks["main"].options == {"url": "redis://:redis-secret@broker:6379/0"}
    assert config.routes == ()


def test_the_environment_alone_is_enough(folder: Path) -> None:
    config = load(
        None,
        {
            "RELAY_DATABASE__DSN": "postgresql://db/shop",
            "RELAY_SINKS__MAIN__TYPE": "redis",
            "RELAY_SINKS__MAIN__URL": "redis://broker",
        },
    )
    assert config.sinks["main"].options == {"url": "redis://broker"}


def test_the_file_is_found_in_the_folder_or_by_its_variable(folder: Path) -> None:
    (folder / "relay.toml").write_text(SMALLEST, "utf-8")
    assert read(None, {}).file == Path("relay.toml")
    other = folder / "other.toml"
    other.write_text(SMALLEST, "utf-8")
    assert read(None, {"RELAY_CONFIG": str(other)}).file == other
    assert read(folder / "relay.toml", {"RELAY_CONFIG": str(other)}).file == folder / "relay.toml"


def test_flags_win_over_the_environment_over_the_file(folder: Path) -> None:
    text = SMALLEST + '[source.polling]\nsettle = "delete"\nread_events_max = 1\n[retry]\nattempts_max = 1\n'
    both = loaded(
        folder,
        text,
        {"source.polling.settle": "keep"},
        RELAY_SOURCE__POLLING__SETTLE="delete",
        RELAY_RETRY__ATTEMPTS_MAX="7",
    )
    assert both.config.source.polling.settle == "keep"
    assert both.config.retry.attempts_max == 7
    assert both.config.source.polling.read_events_max == 1
    assert both.origins["source", "polling", "settle"] == "flag source.polling.settle"
    assert both.origins["retry", "attempts_max"] == "RELAY_RETRY__ATTEMPTS_MAX"
    assert both.origins["source", "polling", "read_events_max"] == "relay.toml"


def test_a_secret_file_gives_the_value_without_its_line_break(folder: Path) -> None:
    dsn, password = folder / "dsn", folder / "password"
    dsn.write_text("postgresql://u:from-file@db/x\n", "utf-8")
    password.write_text(" with spaces \r\n", "utf-8")
    config = loaded(folder, RELAY_DATABASE__DSN_FILE=str(dsn), RELAY_SINKS__MAIN__PASSWORD_FILE=str(password)).config
    assert config.database.dsn.get_secret_value() == "postgresql://u:from-file@db/x"
    assert config.sinks["main"].options["password"] == " with spaces "


def test_a_sinks_own_file_option_stays_a_path(folder: Path) -> None:
    """`ssl_ca_file` is an option of the sink, not a secret called `ssl_ca`."""
    config = loaded(folder, RELAY_SINKS__MAIN__SSL_CA_FILE="/etc/ca.pem").config
    assert config.sinks["main"].options["ssl_ca_file"] == "/etc/ca.pem"


def test_a_variable_finds_the_files_own_spelling_of_a_sink(folder: Path) -> None:
    text = SMALLEST.replace("sinks.main", "sinks.Main-Broker")
    config = loaded(folder, text, RELAY_SINKS__MAIN_BROKER__URL="redis://other").config
    assert config.sinks["Main-Broker"].options["url"] == "redis://other"
    assert list(config.sinks) == ["Main-Broker"]


def test_a_list_for_a_sink_is_given_as_json_and_a_password_stays_text(folder: Path) -> None:
    config = loaded(folder, RELAY_SINKS__MAIN__SERVERS='["a:1", "b:2"]', RELAY_SINKS__MAIN__PASSWORD="[not json").config
    assert config.sinks["main"].options["servers"] == ["a:1", "b:2"]
    assert config.sinks["main"].options["password"] == "[not json"


def test_an_empty_variable_counts_as_not_set(folder: Path) -> None:
    assert loaded(folder, RELAY_DATABASE__DSN="", RELAY_LEASES__POD="").config.leases.pod is None


def test_service_links_of_kubernetes_are_not_ours(folder: Path) -> None:
    """A Service called relay puts these into every pod of its namespace."""
    loaded(
        folder,
        RELAY_SERVICE_HOST="10.0.0.1",
        RELAY_SERVICE_PORT="9464",
        RELAY_SERVICE_PORT_METRICS="9464",
        RELAY_PORT="tcp://10.0.0.1:9464",
        RELAY_PORT_9464_TCP="tcp://10.0.0.1:9464",
        RELAY_PORT_9464_TCP_ADDR="10.0.0.1",
        RELAY_METRICS_PORT_9464_TCP_PROTO="tcp",
        RELAY_METRICS_SERVICE_HOST="10.0.0.2",
    )


# --- mistakes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("added", "line"),
    [
        ('[source.polling]\nsetle = "keep"', "unknown key `[source.polling] setle`, did you mean `settle`?"),
        ('[pipeline]\nsettle = "keep"', "unknown key `[pipeline] settle`, did you mean `[source.polling] settle`?"),
        ("[retries]\nattempts_max = 1", "unknown key `retries`, did you mean `retry`?"),
        ("[zzz]", "unknown key `zzz`"),
        ('[source.polling]\nsettle = "remove"', "[source.polling] settle: must be 'delete' or 'keep', not 'remove'"),
        ("[retry]\nattempts_max = 0", "[retry] attempts_max: must be greater than or equal to 1, not 0"),
        ("[retry]\nattempts_max = true", "[retry] attempts_max: must be a number, not true or false"),
        ("[retry]\nbase_seconds = inf", "[retry] base_seconds: must be a finite number, not inf"),
        ("[leases]\nttl_seconds = 5", "[leases]: margin_seconds must be less than half of ttl_seconds"),
        ("[http]\nbind = '9464'", "[http] bind: must be an address and a port, like 0.0.0.0:9464 or [::]:9464, or off"),
        (
            "[http]\nbind = 'h:99999'",
            "[http] bind: must be an address and a port, like 0.0.0.0:9464 or [::]:9464, or off",
        ),
        ("[[routes]]\nsinks = ['mian']", "[[routes]] #1 sinks: there is no [sinks.mian], did you mean `main`?"),
        ("[[routes]]\nsinks = 'main'", "[[routes]] #1 sinks: must be a list, like [\"main\"], not 'main'"),
        ("[[routes]]\nsink = ['main']\nsinks = ['main']", "unknown key `[[routes]] #1 sink`, did you mean `sinks`?"),
        ("[[routes]]\nsinks = ['main', 'main']", "[[routes]] #1 sinks: names a sink twice"),
        (
            "[[routes]]\nsinks = ['main']\ndestination = 'x.{tpic}'",
            "[[routes]] #1 destination: {tpic} is unknown; `{topic}` and `{key}` are known",
        ),
        (
            '[sinks.audit]\ntype = "null"',
            "there are 2 sinks (main, audit) and no [[routes]]: say which topics go to which sink",
        ),
        (
            "[source.polling]\npoll_interval_seconds = 1",
            "[source.polling] poll_interval_seconds: must not be above poll_interval_max_seconds",
        ),
    ],
)
def test_a_mistake_in_the_file_gets_one_line(folder: Path, added: str, line: str) -> None:
    assert refused(folder, f"{SMALLEST}\n{added}\n") == line


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        (
            {"RELAY_DATABASE__SHEMA": "x"},
            "unknown environment variable RELAY_DATABASE__SHEMA, did you mean `RELAY_DATABASE__SCHEMA`?",
        ),
        ({"RELAY_DSN": "x"}, "unknown environment variable RELAY_DSN, did you mean `RELAY_DATABASE__DSN`?"),
        (
            {"RELAY_ROUTES__0__TOPIC": "x"},
            "RELAY_ROUTES__0__TOPIC: routes are given in the file, not in the environment",
        ),
        (
            {"RELAY_SINKS__MAIN": "x"},
            "RELAY_SINKS__MAIN: a sink's variable is RELAY_SINKS__<NAME>__<OPTION>, for example RELAY_SINKS__MAIN__URL",
        ),
        (
            {"RELAY_RETRY__ATTEMPTS_MAX": "many"},
            "RELAY_RETRY__ATTEMPTS_MAX: must be a valid integer, unable to parse string as an integer, not 'many'",
        ),
        (
            {"RELAY_DATABASE__DSN": "mysql://u:other-secret@h"},
            "RELAY_DATABASE__DSN: must be a URL that starts with postgresql://",
        ),
        (
            {"RELAY_DATABASE__DSN_FILE": "/nowhere/dsn"},
            "RELAY_DATABASE__DSN_FILE: cannot read the secret file /nowhere/dsn: No such file or directory",
        ),
        (
            {"RELAY_DATABASE__DSN_FILE": "/x", "RELAY_DATABASE__DSN": "postgresql://h/d"},
            "RELAY_DATABASE__DSN_FILE and RELAY_DATABASE__DSN are both set; keep one",
        ),
    ],
)
def test_a_mistake_in_a_variable_names_the_variable(folder: Path, environ: dict[str, str], line: str) -> None:
    message = refused(folder, SMALLEST, None, **environ)
    assert message == line
    assert "other-secret" not in message


def test_an_unknown_flag_is_refused(folder: Path) -> None:
    line = "flag source.polling.setle: there is no such setting, did you mean `source.polling.settle`?"
    assert refused(folder, flags={"source.polling.setle": "keep"}) == line


def test_several_mistakes_are_listed_together(folder: Path) -> None:
    message = refused(folder, f"unruted = 1\n{SMALLEST}\n[retry]\nattempts_max = 0\n", RELAY_X="1")
    assert message.splitlines()[0] == "3 settings are wrong:"
    assert len(message.splitlines()) == 4


def test_an_empty_start_says_how_to_give_dsn_and_sink(folder: Path) -> None:
    with pytest.raises(InvalidConfig) as caught:
        read(None, {})
    assert "RELAY_DATABASE__DSN" in str(caught.value)
    assert "[sinks.main]" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"[database\n", "relay.toml is not valid TOML: Expected ']' at the end of a table declaration"),
        (b"[database]\ndsn = pg-secret\n", "relay.toml is not valid TOML: Invalid value (at line 2, column 7)"),
        (b"\xff\xfe", "relay.toml is not UTF-8"),
    ],
)
def test_a_file_that_is_no_toml(folder: Path, content: bytes, line: str) -> None:
    file = folder / "relay.toml"
    file.write_bytes(content)
    with pytest.raises(InvalidConfig) as caught:
        read(Path("relay.toml"), {})
    assert str(caught.value).startswith(line)


def test_a_named_file_has_to_exist(folder: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"cannot read gone\.toml: No such file or directory"):
        read(Path("gone.toml"), {})


@pytest.mark.parametrize("password", ["p@ss", "p:ss", "p/ss", "p#ss", "p%40ss", "p?ss", "p[ss"])
def test_a_dsn_with_a_raw_special_character_is_understood_or_refused_unseen(folder: Path, password: str) -> None:
    """FIELD.md F9: never half of a password as host name, never in the message."""
    text = SMALLEST.replace("pg-secret", f"Qx7{password}")
    if password in {"p@ss", "p:ss", "p%40ss"}:
        assert "Qx7" not in repr(loaded(folder, text))
    else:
        message = refused(folder, text)
        assert "percent-encoded" in message or "%XX" in message
        assert "Qx7" not in message


# --- warnings ----------------------------------------------------------------------------------------


def test_routes_that_are_never_reached_are_warned_about(folder: Path) -> None:
    routes = "".join(f"[[routes]]\ntopic = '{topic}'\nsinks = ['main']\n" for topic in ("a.*", "a.b", "b", "*", "b"))
    assert loaded(folder, SMALLEST + routes).warnings == (
        "[[routes]] #2 (topic = 'a.b') is never reached: #1 (topic = 'a.*') matches first",
        "[[routes]] #5 (topic = 'b') is never reached: #3 (topic = 'b') matches first",
    )


def test_a_sink_without_a_route_and_a_sink_that_discards_are_warned_about(folder: Path) -> None:
    text = SMALLEST + '[sinks.bin]\ntype = "null"\n[[routes]]\nsinks = ["bin"]\n'
    assert loaded(folder, text).warnings == (
        "[sinks.main] is used by no route: nothing is sent to it",
        '[sinks.bin] type = "null" throws events away: settled, and delivered to nobody',
    )


# --- secrets -----------------------------------------------------------------------------------------


def test_no_secret_in_repr(folder: Path) -> None:
    everything = repr(loaded(folder)) + str(loaded(folder).config)
    assert "pg-secret" not in everything
    assert "redis-secret" not in everything


def test_settings_are_shown_without_secrets_and_with_their_origin(folder: Path) -> None:
    both = loaded(folder, RELAY_SINKS__MAIN__PASSWORD="another-secret", RELAY_RETRY__ATTEMPTS_MAX="3")
    shown = {setting.name: setting for setting in settings(both)}
    assert shown["database.dsn"].value == "postgresql://relay:***@db:5432/shop"
    assert shown["sinks.main.url"].value == "redis://:***@broker:6379/0"
    assert shown["sinks.main.password"].value == "***"
    assert shown["sinks.main.password"].origin == "RELAY_SINKS__MAIN__PASSWORD"
    assert (shown["retry.attempts_max"].value, shown["retry.attempts_max"].origin) == (3, "RELAY_RETRY__ATTEMPTS_MAX")
    assert (shown["retry.cap_seconds"].value, shown["retry.cap_seconds"].origin) == (60.0, "default")
    assert shown["database.schema"].value == "public"
    assert "secret" not in repr(shown)


def test_settings_are_frozen(folder: Path) -> None:
    config: Any = loaded(folder).config
    with pytest.raises(ValueError, match="frozen"):
        config.unrouted = "stop"


def test_a_model_can_be_made_in_code() -> None:
    config = Config.model_validate({"database": {"dsn": "postgresql://h/d"}, "http": {"bind": "off"}})
    assert isinstance(config.database, Database)
    assert config.http.address is None


@pytest.mark.parametrize(
    ("bind", "address"), [("0.0.0.0:80", ("0.0.0.0", 80)), ("[::1]:0", ("::1", 0)), ("relay:9464", ("relay", 9464))]
)
def test_an_address_has_host_and_port(bind: str, address: tuple[str, int]) -> None:
    config = Config.model_validate({"database": {"dsn": "postgresql://h/d"}, "http": {"bind": bind}})
    assert config.http.address == address
