"""Addresses that may be shown: URLs and libpq strings without their passwords (FIELD.md F9).

The one place for it. Whatever names a server in a log line, an error or a status goes through `redact`.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["redact"]

# User information reaches to the *last* @ before the path: people paste passwords with a raw `@` or `:` in them,
# and parsing properly would stop at the first one and print the rest. Even a raw `/` or `?` in a password must not
# end the secret early, so everything up to the last @ of the whole word goes. The lookbehind keeps it linear: without
# it a word of a million letters is searched a million times.
_USERINFO: Final = re.compile(r"(?<![A-Za-z0-9+.-])(?P<scheme>[A-Za-z0-9+.-]+://)(?P<userinfo>[^\s'\"<>]*)@")
_SECRET_PARAMETER: Final = re.compile(
    r"(?P<name>\b\w*(?:password|passwd|passphrase|secret|token)\w*\s*=\s*)(?P<value>'(?:[^'\\]|\\.)*'|[^\s&;'\"<>]+)",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """`text` with the password of each URL, and each `...password=...`, replaced by `***`.

    The user's name stays, because "which role" is what an operator needs. Accepts any text (a URL, a
    libpq keyword string, an error message of a library) and never raises.
    """
    return _SECRET_PARAMETER.sub(r"\g<name>***", _USERINFO.sub(_hide_password, text))


def _hide_password(match: re.Match[str]) -> str:
    user, colon, _password = match["userinfo"].partition(":")
    if not colon:
        return match[0]
    return f"{match['scheme']}{user}:***@"
