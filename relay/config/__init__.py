"""`relay.toml` and its environment variables as one frozen, typed model for each section."""

from relay.config.loading import Loaded, load, read
from relay.config.models import (
    Config,
    Database,
    Http,
    Leases,
    Logging,
    Pipeline,
    Polling,
    Retry,
    Route,
    SinkSection,
    Source,
)

__all__ = [
    "Config",
    "Database",
    "Http",
    "Leases",
    "Loaded",
    "Logging",
    "Pipeline",
    "Polling",
    "Retry",
    "Route",
    "SinkSection",
    "Source",
    "load",
    "read",
]
