"""What a deployment must not let out whatever it looks like: the secrets that its own processes hold. Pure."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import quote, unquote, urlsplit

_NAMED = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|PGPASS|TOKEN|CREDENTIAL|API_?KEY|(ACCESS|PRIVATE|SIGNING|ENCRYPTION)_?KEY|_KEY$",
    re.IGNORECASE,
)
_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/]*:[^\s]+@", re.IGNORECASE)
SHORTEST = 8
"""The fewest characters of a secret: shorter ones, such as RabbitMQ's ``guest``, are parts of ordinary text."""
SHORTEST_WORD = 16
"""The same for one of letters or of digits alone: ``postgres`` is a word, and ``10000000`` a limit."""


def own_secrets(environ: Mapping[str, str], *urls: str) -> dict[str, str]:
    """The secrets of an environment, each with its kind: what is named like one, and the passwords in URLs.

    Each is there in every form that it may be met in: as it is, inside JSON, and quoted for a URL.
    """
    secrets: dict[str, str] = {}
    for name, value in environ.items():
        found = [password for password in _passwords(value) if _is_one(password)]
        if not found and _NAMED.search(name) and _is_one(value) and not os.path.exists(value):
            found = [value.strip()]
        for secret in found:
            secrets |= dict.fromkeys(_forms(secret), name)
    for url in urls:
        for password in filter(_is_one, _passwords(url)):
            for form in _forms(password):
                secrets.setdefault(form, "password")
    return secrets


def _passwords(value: str) -> Iterator[str]:
    if not _URL.match(value):
        return
    try:
        password = urlsplit(value).password
    except ValueError:
        return
    if password:
        yield unquote(password)


def _is_one(value: str) -> bool:
    value = value.strip()
    plain = value.isalpha() or value.isdecimal()
    return len(value) >= (SHORTEST_WORD if plain else SHORTEST)


def _forms(secret: str) -> set[str]:
    return {
        secret,
        quote(secret, safe=""),
        quote(secret),
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
    }
