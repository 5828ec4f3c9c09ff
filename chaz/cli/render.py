"""Entries as lines for people; coloured only on a terminal."""

from __future__ import annotations

import json
import re
import shutil
from typing import cast

from chaz.entries import Entry
from chaz.outcomes import Spent

_COLOURS = {
    "directive": "1;36",
    "message": "1;32",
    "summary": "35",
    "tool_call": "33",
    "tool_result": "33",
    "ack": "2",
    "note": "35",
    "approval_request": "1;33",
    "approval_decision": "1;33",
    "error": "1;31",
}


# Control characters, and those that turn the direction of writing.
_OBEYED = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

STATE_COLOURS = {"succeeded": "32", "failed": "31", "cancelled": "35", "running": "36", "parked": "33"}
"""Of a run's state."""


def coloured(text: str, colour: str, *, on: bool) -> str:
    """The text in an ANSI colour, if ``on``."""
    return f"\033[{colour}m{text}\033[0m" if on and colour else text


def entry_line(entry: Entry, *, colour: bool = False, width: int | None = None) -> str:
    """An entry as one line: its place, time, who, and what."""
    place = "inbox" if entry.position is None else f"{entry.position}" + (f".{entry.seq}" if entry.seq else "")
    time = entry.created_at.astimezone().strftime("%H:%M:%S.%f")[:-3]
    line = f"{place:>7}  {time}  {what(entry)}"
    if width:
        line = clipped(line, width)
    return coloured(line, _COLOURS.get(entry.type, ""), on=colour)


def one_line(text: str) -> str:
    """A text of anybody's in a line, without what a terminal would obey, or shows in another order."""
    return _OBEYED.sub("\N{REPLACEMENT CHARACTER}", " ".join(text.split()))


def several_lines(text: str) -> str:
    """A text of anybody's with its own lines, without what a terminal would obey."""
    return "\n".join(_OBEYED.sub("\N{REPLACEMENT CHARACTER}", line.expandtabs(4)) for line in text.splitlines())


def what(entry: Entry) -> str:
    """Who did what, in a line. Senders and tools have names of anybody's, too: a model calls what it likes."""
    return one_line(_what(entry))


def _what(entry: Entry) -> str:
    text = one_line(entry.content)
    match entry.type:
        case "message" | "directive":
            to = f" → {entry.recipient}" if entry.recipient else ""
            return f"{entry.sender}{to}: {text}"
        case "tool_call":
            return f"{entry.sender} calls {entry.metadata.get('tool')}({_arguments(text)})"
        case "tool_result":
            outcome = entry.metadata.get("outcome")
            return f"{entry.metadata.get('tool')} {'=' if outcome == 'ok' else outcome} {text}"
        case "ack":
            return f"{entry.sender} is at work (attempt {entry.metadata.get('attempt')})"
        case "approval_request":
            return f"{entry.sender} asks: {text}"
        case "approval_decision":
            decision = str(entry.metadata.get("decision", "")).replace("_", " ")
            return f"{entry.sender}: {decision}" + (f": {text}" if text else "")
        case _:
            return f"{entry.type}: {text}"


def _arguments(text: str) -> str:
    """A call's JSON arguments as Python would write them; as they are where they are no JSON object."""
    try:
        arguments: object = json.loads(text)
    except ValueError:
        return text
    if not isinstance(arguments, dict):
        return text
    named = cast("dict[str, object]", arguments)
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in named.items())


def tokens_text(spent: Spent) -> str:
    """The tokens, of prompts and completions; empty where there are none."""
    return str(spent.prompt + spent.completion or "")


def cost_text(spent: Spent) -> str:
    """The cost, to four figures; where the price of some calls is not known: ``unknown``, or what it is at least."""
    if spent.cost is not None:
        return f"{spent.cost:.4g}" if spent.cost else ""
    return f"≥ {spent.known_cost:.4g}" if spent.known_cost else "unknown"


def whole_cost_text(spent: Spent) -> str:
    """The same, with how many calls are not in it: ``≥ 0.12, 3 calls unknown``."""
    calls = "call" if spent.unpriced_calls == 1 else "calls"
    return cost_text(spent) + (
        f", {spent.unpriced_calls} {calls} unknown" if spent.cost is None and spent.known_cost else ""
    )


def seconds_text(seconds: float) -> str:
    """A span of time for people."""
    if seconds < 60:
        return f"{max(seconds, 0):.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def clipped(line: str, width: int) -> str:
    """The line, cut to ``width`` with a mark."""
    return line if len(line) <= width else line[: width - 1] + "…"


def terminal_width() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size((120, 24)).columns
