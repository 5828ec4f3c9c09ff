"""What the soak's producer asks for: scripts with tools, children, and several messages to one session."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

CHATS = 30
TALKS = 60


@dataclass(frozen=True)
class Job:
    """One entry to send: a directive, or a message where no agent is named."""

    session: str
    agent: str | None
    text: str


def job(draw: random.Random, number: int) -> Iterator[Job]:
    """The next entries to send."""
    kind = draw.random()
    if kind < 0.25:
        chat = f"chat {draw.randrange(CHATS)}"
        yield Job(chat, "solo", _script(_turns(draw, f"{number}", 1)))
        for n in range(draw.randint(2, 5)):
            yield Job(chat, None, _script(_turns(draw, f"{number} {n}", 1)))
    elif kind < 0.5:
        yield Job(f"family {number}", "parent", _parent(draw, f"{number}", depth=draw.choice((1, 1, 2))))
    elif kind < 0.7:
        yield Job(f"talk {draw.randrange(TALKS)}", "solo", _script(_turns(draw, f"{number}", 2)))
    else:
        yield Job(f"alone {number}", "solo", _script(_turns(draw, f"{number}", draw.randint(1, 4))))


def _parent(draw: random.Random, name: str, *, depth: int) -> str:
    spawns: list[dict[str, Any]] = []
    for n in range(draw.randint(1, 3)):
        told = (
            _parent(draw, f"{name}.{n}", depth=depth - 1)
            if depth > 1
            else _script(_turns(draw, f"{name}.{n}", draw.randint(1, 2)))
        )
        spawns.append(_call("spawn_agent", agent="parent" if depth > 1 else "child", instruction=told))
    calls = [*spawns, _call("record_effect", name=f"{name} beside")]
    return _script([{"calls": calls}, {"calls": [_call("record_effect", name=f"{name} after")]}])


def _turns(draw: random.Random, name: str, count: int) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for n in range(count):
        calls = [_call("record_effect", name=f"{name} {n}")]
        if draw.random() < 0.5:
            calls.append(_call("record_again", name=f"{name} {n} again"))
        if draw.random() < 0.3:
            calls.append(_call("slow", seconds=round(draw.uniform(0.1, 1.5), 2)))
        if draw.random() < 0.3:
            calls.append(_call("word_count", text=name))
        turns.append({"calls": calls})
    return turns


def _call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"tool": tool, "arguments": arguments}


def _script(turns: list[dict[str, Any]]) -> str:
    # A line of its own: a message is shown with its speaker's name before its first line.
    return f"do this\n```script\n{json.dumps([*turns, {'text': 'done'}])}\n```"
