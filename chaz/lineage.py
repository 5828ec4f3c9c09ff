"""What a child inherits: words that the runtime checks, the stores keep on its rows, and its parent is told.

A scope is a list of lists of globs, one list for each level on the way down that narrowed it. A tool is in scope if
every list has a glob that it matches; so a level can take tools away, and give none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from chaz.entries import safe_text
from chaz.outcomes import MAX_RESULT, CallOutcome, RunOutcome, typed_error

Scope = Sequence[Sequence[str]]


def in_scope(scope: Scope, tool: str) -> bool:
    """Whether a tool of this name may be used under the scope."""
    return all(matches(tool, globs) for globs in scope)


def matches(name: str, globs: Sequence[str]) -> bool:
    """Whether one of the globs is the name, or matches it."""
    return any(fnmatchcase(name, glob) for glob in globs)


@dataclass(frozen=True)
class Spawn:
    """A child as it is to be: what its parent's model asked for, within what the parent itself may do."""

    agent: str
    instruction: str
    wait: bool = True
    """Whether the call waits for the child's answer; else its result is the child's id."""
    model: str | None = None
    max_steps: int | None = None
    timeout: float | None = None
    tools: Sequence[str] | None = None
    """Globs that the model asked for; each has to match a tool that the child may have."""
    scope: Scope = ()
    """The child's scope, ``tools`` included."""
    detached: bool = False
    """Whether it goes on when the run that spawned it is cancelled."""
    depth_left: int = 0
    """How many levels deep the child may spawn in its turn."""


# How a child ended that has a word of its own, by the run's reason; any other is `failed`.
_ENDED = {
    "deadline": "timed_out",
    "expired": "timed_out",
    "unknown-agent": "unknown_agent",
    "budget": "over_budget",
    "limit": "over_budget",
}


def answer_of(agent: str, outcome: RunOutcome) -> CallOutcome:
    """What a call that waits for a run of ``agent`` is answered with, once that has ended."""
    match outcome.state:
        case "succeeded":
            return CallOutcome(kind="ok", content=safe_text(outcome.text, MAX_RESULT))
        case "cancelled":
            error = typed_error("cancelled", f"agent {agent} was cancelled ({outcome.reason}): {outcome.text}")
            error = error.model_copy(update={"kind": "cancelled"})
        case "failed":
            word = _ENDED.get(outcome.reason, "failed")
            error = typed_error(word, f"agent {agent} failed ({outcome.reason}): {outcome.text}")
    return error.model_copy(update={"content": safe_text(error.content, MAX_RESULT)})
