"""What a run asks a person: whether it may make a call, or a question of its own. And what the model is told then."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from chaz.outcomes import CallOutcome, ToolCall, typed_error

Risk = Literal["low", "medium", "high"]
Decision = Literal["approve", "approve_all", "deny", "answer", "timed_out", "cancelled"]
"""``timed_out`` and ``cancelled`` are chaz's own."""

GRANTED = CallOutcome(kind="ok", content="")
"""The call may be made."""


@dataclass(frozen=True)
class Ask:
    """A request as a run puts it to people."""

    kind: Literal["approval", "question"]
    tool: str
    shown: str
    """The arguments as people may see them; or the question."""
    digest: str
    """Of the exact call: see :func:`digest_of`."""
    risk: Risk = "low"
    timeout: float | None = None
    """Seconds until it is closed; None: as the session or the deployment says."""
    choices: Sequence[str] | None = None
    """What a question may be answered with; None: anything."""
    unless_auto_approved: bool = False
    """Whether the session's or the deployment's list of tools may stand for a person's word."""


@dataclass(frozen=True)
class Approving:
    """What a deployment says of approvals, where a session says nothing."""

    approvers: Sequence[str] = ()
    """Who may decide: names or globs. None: whatever needs a word is denied."""
    auto_approve: Sequence[str] = ()
    """Tools, by globs, that need no word unless it is always needed."""
    timeout: float = 300.0


def digest_of(call: ToolCall) -> str:
    """What stands for the exact call: SHA-256 over the tool's name and the arguments as the model wrote them."""
    exact = f"{call.tool}\0{call.arguments}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(exact).hexdigest()


def told(kind: Literal["approval", "question"], decision: Decision, by: str, reason: str) -> CallOutcome:
    """What the call comes to by this decision; :data:`GRANTED` where it may be made."""
    match decision:
        case "approve" | "approve_all":
            return GRANTED
        case "answer":
            return CallOutcome(kind="ok", content=reason)
        case "deny":
            return CallOutcome(kind="error", error="denied", content=f"denied by {by}: {reason or 'no reason given'}")
        case "timed_out" if kind == "question":
            return typed_error("timed_out", "nobody answered in time")
        case "timed_out":
            return typed_error("timed_out", "not approved in time; it was not made")
        case "cancelled":
            return typed_error("cancelled", "the request was closed before anybody decided")


def not_approved() -> CallOutcome:
    """What a call comes to that is another than the one that was approved."""
    return typed_error("denied", "this is not the call that was approved; it was not made")


def nobody_to_ask() -> CallOutcome:
    """What a call comes to where no approver is named."""
    return typed_error("denied", "this needs a person's word, and nobody is named who may give it")
