"""Finding secrets in a text: those of the deployment by their exact value, all others by MongoDB's Kingfisher.

Kingfisher is kept up (hundreds of rules for the formats of providers), gives exact spans, takes whole private keys,
leaves UUIDs, hashes and base64 alone, and scans without the GIL. Of detect-secrets, the other one in wide use, some
matches are but a part of the secret (``ghp``, the first line of a private key), and the rest of it would go out.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, cast

from chaz.entries import safe_text
from chaz.errors import ConfigurationError
from chaz.runtime.ownsecrets import SHORTEST

if TYPE_CHECKING:
    from kingfisher_sdk import Scanner

PACKAGE = "kingfisher_sdk"
# Kingfisher also finds what is no secret by itself (a client's id, a host), to be reported beside one.
_SECRET_BY_ITSELF = re.compile("secret|token|passphrase")
_loading = threading.Lock()


class Found(NamedTuple):
    """A secret, by its place in the text's UTF-8."""

    start: int
    end: int
    kind: str


class Scanned(NamedTuple):
    """A text without its secrets, and their kinds; none, where it is as it was."""

    text: str
    kinds: tuple[str, ...]


class SecretScanner:
    """Finds secrets; safe to use from any thread."""

    def __init__(self, own: Mapping[str, str]) -> None:
        if importlib.util.find_spec(PACKAGE) is None:
            raise ConfigurationError(
                "there is no secret scanner: install it with pip install kingfisher-secret-scanner, or set "
                "CHAZ_SECRETS=off to let tool outputs and arguments leave as they are"
            )
        self._own = {secret.encode(): kind for secret, kind in own.items()}

    def load(self) -> None:
        """Load the rules, once per process: about a second, and some more the first time on a machine."""
        _kingfisher()

    def scan(self, text: str) -> Scanned:
        """The text with ``[redacted: <kind>]`` in the place of each secret; it has no lone surrogates."""
        data = text.encode()
        found = sorted([*self._own_in(data), *_foreign_in(data)])
        if not found:
            return Scanned(text, ())
        kept: list[bytes] = []
        at = 0
        for secret in _merged(found):
            kept += [data[at : secret.start], f"[redacted: {secret.kind}]".encode()]
            at = secret.end
        kept.append(data[at:])
        return Scanned(b"".join(kept).decode(errors="replace"), tuple(dict.fromkeys(each.kind for each in found)))

    def scan_json(self, text: str) -> Scanned:
        """The same for a JSON text, where an escape may hide a secret: its strings are scanned decoded, too."""
        kinds: list[str] = []
        if "\\" in text:
            # Whatever is no JSON, or nested too deep for Python, is scanned as it is.
            with suppress(ValueError, RecursionError):
                clean = self._clean(json.loads(text), kinds)
                text = json.dumps(clean) if kinds else text
        scanned = self.scan(text)
        return Scanned(scanned.text, tuple(dict.fromkeys([*kinds, *scanned.kinds])))

    def _clean(self, value: object, kinds: list[str]) -> object:
        match value:
            case str():
                scanned = self.scan(safe_text(value, len(value)))
                kinds += scanned.kinds
                return scanned.text
            case list():
                return [self._clean(item, kinds) for item in cast("list[object]", value)]
            case dict():
                items = cast("dict[str, object]", value).items()
                return {str(self._clean(name, kinds)): self._clean(item, kinds) for name, item in items}
            case _:
                return value

    def _own_in(self, data: bytes) -> Iterator[Found]:
        for secret, kind in self._own.items():
            yield from _everywhere(secret, kind, data)


def _foreign_in(data: bytes) -> Iterator[Found]:
    for finding in _kingfisher().scan(data):
        kind = _kind(finding.rule_id)
        if finding.visible or _SECRET_BY_ITSELF.search(kind):
            yield Found(finding.location["start_offset"], finding.location["end_offset"], kind)
            # Where it stands a second time, nothing near it may tell what it is.
            if len(secret := finding.secret.encode()) >= SHORTEST:
                yield from _everywhere(secret, kind, data)


def _everywhere(secret: bytes, kind: str, data: bytes) -> Iterator[Found]:
    start = data.find(secret)
    while start >= 0:
        yield Found(start, start + len(secret), kind)
        start = data.find(secret, start + len(secret))


def _kind(rule: str) -> str:
    """A rule's name in a word: ``github-pat`` for ``betterleaks.github-pat``."""
    return re.sub(r"^\w+\.|\.\d+$", "", rule.rpartition("/")[2])


def _merged(found: list[Found]) -> list[Found]:
    """Those that overlap as one, named like the first."""
    merged: list[Found] = []
    for each in found:
        if merged and each.start < merged[-1].end:
            merged[-1] = merged[-1]._replace(end=max(merged[-1].end, each.end))
        else:
            merged.append(each)
    return merged


def _kingfisher() -> Scanner:
    with _loading:
        return _load()


@functools.cache
def _load() -> Scanner:
    # Where it is not installed, a worker that is told to scan nothing runs all the same.
    from kingfisher_sdk import Rules, Scanner

    return Scanner(Rules(), redact=False)
