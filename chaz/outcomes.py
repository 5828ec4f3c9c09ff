"""What things came to: a model's turn, a tool call, a run.

Stored as JSON by the journal, so that a run can be replayed by any worker.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field

RunState = Literal["pending", "queued", "running", "parked", "succeeded", "failed", "cancelled", "superseded"]
FINAL_STATES: frozenset[RunState] = frozenset({"succeeded", "failed", "cancelled"})
ACTIVE_STATES: frozenset[RunState] = frozenset({"queued", "running", "parked"})


class Usage(BaseModel):
    """Tokens of one or more model calls. ``cached`` is a part of ``prompt``, ``reasoning`` of ``completion``."""

    model_config = ConfigDict(frozen=True)

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0


class Spent(Usage):
    """What calls of models used and cost together; refused turns count, since they are paid for too."""

    calls: int = 0
    known_cost: float = 0.0
    """What those calls cost whose model has a known price, in what the prices are in (dollars, of the price list)."""
    unpriced_calls: int = 0
    """How many others there are."""

    @computed_field
    @property
    def cost(self) -> float | None:
        """What all of them cost; None, and not less than ``known_cost``, where a price is not known."""
        return None if self.unpriced_calls else self.known_cost

    def __add__(self, other: Spent) -> Spent:
        names = ("prompt", "completion", "cached", "reasoning", "calls", "known_cost", "unpriced_calls")
        return Spent.model_validate({name: getattr(self, name) + getattr(other, name) for name in names})


class ToolCall(BaseModel):
    """A tool call as the model asked for it."""

    model_config = ConfigDict(frozen=True)

    id: str
    """The provider's id; providers repeat ids, so the journal's key is the ordinal in the turn."""
    tool: str
    arguments: str
    """JSON text exactly as the model wrote it; it may be malformed."""
    shown: str | None = Field(default=None, exclude=True)
    """The arguments as they may be shown, where these hold what must not leave the worker."""
    secrets: tuple[str, ...] = Field(default=(), exclude=True)
    """The kinds of the secrets in them."""


class Turn(BaseModel):
    """One turn of a model: text, or calls, or both."""

    model_config = ConfigDict(frozen=True)

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage()
    model: str = ""
    """The model that answered, as its provider names it."""
    native: dict[str, Any] | None = None
    """The provider's own form of the turn, sent back unchanged so that reasoning blocks survive."""


MAX_RESULT = 200_000
"""The most characters of a tool's result that are kept and shown to the model."""


class CallOutcome(BaseModel):
    """What a tool call came to; ``content`` is what the model is told."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["ok", "error", "cancelled", "unknown"]
    """``unknown``: the call had started when its worker was lost, and may or may not have run."""
    content: str
    error: str = ""
    """The word that an error of chaz's own begins with (see :func:`typed_error`); empty for a tool's own errors."""


def typed_error(word: str, text: str) -> CallOutcome:
    """An error that the model is told, and that code can tell by its word.

    Of a call: ``unknown_tool``, ``not_allowed``, ``rate_limited``, ``denied``, ``secret_arguments``, ``withheld``; of a
    spawn besides: ``bad_arguments``, ``too_deep``, ``over_budget``, ``past_deadline``; of a child: ``failed``,
    ``cancelled``, ``timed_out``, ``unknown_agent``, ``over_budget``; of ``agent_result``: ``unknown_run``; of
    schedules: ``unknown_schedule``; of what a person is asked: ``denied``, ``timed_out``.
    """
    return CallOutcome(kind="error", content=f"{word}: {text}", error=word)


Room = Literal["free", "last", "held", "none"]
"""What a tree's budget has for another step: enough, one step, nothing until others settle theirs, or nothing more."""


class RunOutcome(BaseModel):
    """What a run came to: the answer of a succeeded one, or the reason (one word) and text of another."""

    model_config = ConfigDict(frozen=True)

    state: Literal["succeeded", "failed", "cancelled"]
    text: str = ""
    reason: str = ""
    metadata: dict[str, Any] = {}
    """What the closing entry says besides, of one that summarised, was interrupted or cancelled."""
    says: Literal["message", "summary", "note"] = "message"
    """What the text of one that succeeded or was interrupted becomes in the log; blank, it becomes nothing."""
