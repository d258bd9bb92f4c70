"""The settings: every default has its unit in its name and its reason beside it.

Validated once at start (`relay.config.loading`), frozen, passed down explicitly. A sink's own
options are validated by the sink (`relay.sinks`), because only it knows them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "Config",
    "Database",
    "Http",
    "Leases",
    "Logging",
    "Pipeline",
    "Polling",
    "Retry",
    "Route",
    "SinkSection",
    "Source",
]


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")  # noqa: TRY004  # pydantic reports ValueError only
    return value


def _is_postgresql_url(dsn: SecretStr) -> SecretStr:
    """Refuse what the driver would misread, without showing it: the text holds a password."""
    text = dsn.get_secret_value()
    scheme, separator, _ = text.partition("://")
    if not separator or scheme not in {"postgresql", "postgres"}:
        raise ValueError("must be a URL that starts with postgresql://")
    try:
        url = urlsplit(text)
    except ValueError:
        raise ValueError("is not a valid URL; [ ] / ? # % in a password are written as %XX") from None
    ports = (host.rpartition("]")[2].partition(":")[2] for host in url.netloc.rpartition("@")[2].split(","))
    if "@" in url.path + url.fragment or any(port and not port.isdecimal() for port in ports):
        raise ValueError("special characters in user or password must be percent-encoded: / is %2F, ? is %3F, # is %23")
    return dsn


_PORT_MAX = 65_535

Count = Annotated[int, BeforeValidator(_no_boolean)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_no_boolean)]
Dsn = Annotated[SecretStr, AfterValidator(_is_postgresql_url)]


class Section(BaseModel):
    """Base of all sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class Database(Section):
    """Where the outbox is, and how it was made."""

    dsn: Dsn = Field(description="libpq URL of the primary; may point at a PgBouncer in transaction mode")
    direct_dsn: Dsn | None = Field(
        None,
        description="libpq URL that reaches PostgreSQL itself, for LISTEN and session locks; "
        "needed only if `dsn` goes through a transaction pooler (without it the relay polls and never sleeps)",
    )
    schema_: str = Field("public", alias="schema", min_length=1, max_length=63, description="schema of the tables")
    table: str = Field(
        "outbox",
        min_length=1,
        max_length=40,
        description="name of the outbox table; the relay's own tables are named after it. "
        "40 characters at most, so that the longest name derived from it still fits an identifier",
    )
    payload: Literal["json", "jsonb", "text", "bytea"] = Field(
        "json", description="type of the payload column; `json` keeps the text exactly and accepts \\u0000"
    )
    partitioned: bool = Field(
        default=False, description="partition the outbox by `stored_at`; fixed when it is created"
    )
    partition_range: Literal["day", "week"] = Field(
        "week", description="what one partition spans; may be changed, the next partitions follow"
    )
    partitions_ahead_days: Count = Field(
        56, ge=1, le=400, description="partitions exist for so long ahead: what a stopped relay costs producers nothing"
    )
    notify: bool = Field(
        default=True,
        description="create the trigger that wakes a sleeping relay. Turn it off for producers that use "
        "PREPARE TRANSACTION, which PostgreSQL refuses after a NOTIFY; the relay then polls",
    )
    connect_timeout_seconds: Seconds = Field(10.0, description="of one attempt; attempts repeat with backoff")
    statement_timeout_seconds: Seconds = Field(
        60.0, description="of one statement of the relay; a stuck one is cancelled and tried again"
    )

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, populate_by_name=True)


class Polling(Section):
    """Reading the outbox by lanes."""

    settle: Literal["delete", "keep"] = Field(
        "delete", description="what happens to a delivered row: `delete` it, or `keep` it with `published_at` set"
    )
    poll_interval_seconds: Seconds = Field(
        0.001, description="between reads while events flow; latency against idle queries"
    )
    poll_interval_max_seconds: Seconds = Field(
        0.05, description="that the interval grows to while nothing arrives and the cluster is awake"
    )
    fallback_interval_seconds: Seconds = Field(
        5.0, description="between reads while asleep, jittered by half: what a lost notification costs at most"
    )
    read_events_max: Count = Field(
        2_000, ge=1, description="rows of one read; 2,000 is where a read's cost is amortised"
    )
    sweep_interval_seconds: Seconds = Field(
        60.0, description="between full reads that ignore the floor: the net below PROTOCOLS.md rule 8"
    )


class Source(Section):
    """How events are read."""

    mode: Literal["polling"] = Field("polling", description="`polling`: NOTIFY wake-up and reads by lane")
    polling: Polling = Polling()


class Pipeline(Section):
    """Bounds of what is in flight in one pod."""

    events_max: Count = Field(10_000, ge=1, description="events in flight; five full reads keep every stage busy")
    bytes_max: Count = Field(
        32 * 1024 * 1024, ge=1024, description="bytes in flight; one event larger than this still passes, alone"
    )
    batch_events_max: Count = Field(2_000, ge=1, description="events of one batch to a sink")
    batch_bytes_max: Count = Field(4 * 1024 * 1024, ge=1024, description="bytes of one batch to a sink")
    grace_seconds: Seconds = Field(
        20.0, description="from SIGTERM to exit at most; below Kubernetes' 30 s so that the lanes are handed over"
    )
    park_outage_after_seconds: Seconds = Field(
        10.0, description="with several sinks: a sink that is down for longer parks its deliveries, so the others flow"
    )


class Retry(Section):
    """An event that fails by itself: exponential backoff with jitter, then a dead letter."""

    base_seconds: Seconds = Field(0.5, description="delay before the first retry; doubles each time")
    cap_seconds: Seconds = Field(60.0, description="longest delay between two attempts")
    attempts_max: Count = Field(
        12, ge=1, description="attempts, counted once for the cluster, before the dead letter (about 6 minutes)"
    )
    outage_cap_seconds: Seconds = Field(
        2.0, description="longest pause between probes of a sink that is down; recovery is noticed within it"
    )


class Leases(Section):
    """Ownership of lanes among the pods."""

    pod: str | None = Field(
        None, max_length=200, description="name of this pod; default: host name, process id and a random part"
    )
    ttl_seconds: Seconds = Field(15.0, description="after which a silent pod's lanes are free for others")
    margin_seconds: Seconds = Field(
        3.0, description="by which a pod stops before its time is over: clock drift and pauses"
    )

    @model_validator(mode="after")
    def _margin_below_ttl(self) -> Self:
        if self.margin_seconds * 2 >= self.ttl_seconds:
            raise ValueError("margin_seconds must be less than half of ttl_seconds")
        return self


class SinkSection(BaseModel):
    """One `[sinks.<name>]` section. Everything but `type` belongs to the sink's own options."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: str = Field(description="`kafka`, `rabbitmq`, `redis`, `memory`, `null`, or a name from an installed package")

    @property
    def options(self) -> dict[str, Any]:
        """The sink's own options, not validated yet."""
        return dict(self.model_extra or {})

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Names of the options only: nobody knows yet which of the values are secrets."""
        yield "type", self.type
        yield "options", sorted(self.options)


class Route(Section):
    """Which sinks an event goes to. The first route whose `topic` matches wins."""

    topic: str = Field("*", min_length=1, description="glob over the topic: `*`, `?`, `[abc]`; case matters")
    sinks: tuple[str, ...] = Field(min_length=1, description="names of sinks; the event is settled after the last one")
    destination: str = Field(
        "{topic}", min_length=1, description="Kafka topic, routing key or stream; may use `{topic}` and `{key}`"
    )
    format: Literal["raw"] = Field("raw", description="`raw`: payload as stored, the rest in headers")
    on_dead_letter: Literal["continue", "hold"] = Field(
        "continue",
        description="what later events of a dead letter's key do: `continue`, or `hold` until it is retried or discarded",
    )


class Http(Section):
    """Health, metrics and status."""

    bind: str | None = Field(
        "127.0.0.1:9464",
        description="address and port of the HTTP server, `0.0.0.0:9464` or `[::]:9464` for all addresses; "
        "`off` turns it off",
    )

    @field_validator("bind")
    @classmethod
    def _bind_is_an_address(cls, bind: str | None) -> str | None:
        if bind is None or bind == "off":
            return None
        host, _, port = bind.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if not host or (":" in host and not bracketed) or not port.isdecimal() or int(port) > _PORT_MAX:
            raise ValueError("must be an address and a port, like 0.0.0.0:9464 or [::]:9464, or off")
        return bind

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port to listen at, or None: no server."""
        if self.bind is None:
            return None
        host, _, port = self.bind.rpartition(":")
        return host.strip("[]"), int(port)


class Logging(Section):
    """What is written to standard error."""

    format: Literal["auto", "json", "text"] = Field("auto", description="`auto`: text on a terminal, JSON elsewhere")
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="nothing per event at info")


class Config(Section):
    """The whole file."""

    database: Database
    source: Source = Source()
    pipeline: Pipeline = Pipeline()
    retry: Retry = Retry()
    leases: Leases = Leases()
    sinks: dict[str, SinkSection] = Field(default_factory=dict)
    routes: tuple[Route, ...] = Field((), description="none: everything goes to the only sink")
    unrouted: Literal["dead_letter", "stop"] = Field(
        "dead_letter", description="what becomes of an event whose topic no route takes; never silence"
    )
    http: Http = Http()
    logging: Logging = Logging()

    @property
    def routing(self) -> tuple[Route, ...]:
        """The routes in force: without any in the file, everything goes to the only sink."""
        return self.routes or tuple(Route(sinks=(name,)) for name in self.sinks)[:1]
