"""`relay migrate`: the schema of the outbox, made and kept up to date from plain numbered SQL files.

Keeps promise 5 of the design: migrating never locks producers out. Files: `migrations/`, how they are
read: docs/schema.md.
"""

from __future__ import annotations

from relay.migrate.files import Migration, load
from relay.migrate.runner import Applied, Check, check, plan, require_current, run

__all__ = ["Applied", "Check", "Migration", "check", "load", "plan", "require_current", "run"]
