"""What the fleet's logs say that asks for a look: errors and tracebacks, by kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ERROR = re.compile(r"\b(ERROR|CRITICAL)\b")
CHANGES = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8}-[0-9a-f-]{27}|\d[\d:,.\- ]*")
"""Ids, times, ports: what would make each line a kind of its own."""
WIDTH = 150


def complaints(folder: Path) -> dict[str, int]:
    """How often each kind of error and traceback was logged; a traceback is known by its last line."""
    found: Counter[str] = Counter()
    for log in sorted(folder.glob("*.log")):
        with open(log, errors="replace") as lines:
            found.update(f"{log.stem.rstrip('0123456789')}: {kind}" for kind in _kinds(lines))
    return dict(found.most_common())


def _kinds(lines: Iterable[str]) -> Iterator[str]:
    within = False
    for line in lines:
        text = CHANGES.sub("#", line.rstrip())[:WIDTH]
        if line.startswith("Traceback (most recent call last)"):
            within = True
        elif within and text and not line[0].isspace():
            within = False
            yield f"traceback: {text}"
        if ERROR.search(line):
            yield text
