"""Health, metrics and status over HTTP."""

from relay.http.app import create_app
from relay.http.server import serving

__all__ = ["create_app", "serving"]
