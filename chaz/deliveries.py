"""What crosses the broker: the delivery that announces a run, and the audit event that a run tells.

Their JSON is kept in golden files, so that two versions running side by side agree.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict


class RunDelivery(BaseModel):
    """The arguments of the task ``chaz.agent.<name>``.

    The worker believes ``run`` alone; the rest is there to be looked at in Flower.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["run"] = "run"
    run: UUID
    agent: str
    session: UUID
    parent: UUID | None = None


class AuditEvent(BaseModel):
    """One thing that a tool call did. ``(session, position, seq)`` is the place of its entry in the log."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["tool_call", "tool_result"]
    session: UUID
    tenant: str = ""
    position: int
    seq: int
    at: datetime
    """When it was counted, on the database's clock."""
    run: UUID
    agent: str
    attempt: int
    step: int
    ordinal: int
    call_id: str
    tool: str
    outcome: str = ""
    """Of a result: ok, error, cancelled or unknown."""
    content: str
    """Of a call its arguments, of a result what the model was told."""

    @property
    def body(self) -> str:
        """What the run's digest covers: canonical JSON of what happened; the chain itself orders it."""
        return event_body(
            kind=self.kind,
            run=self.run,
            step=self.step,
            ordinal=self.ordinal,
            call_id=self.call_id,
            tool=self.tool,
            attempt=self.attempt,
            outcome=self.outcome,
            content=self.content,
        )


def event_body(
    *,
    kind: str,
    run: UUID,
    step: int,
    ordinal: int,
    call_id: str,
    tool: str,
    attempt: int,
    outcome: str,
    content: str,
) -> str:
    """Canonical JSON of an audit event: sorted keys, no spaces, ASCII."""
    return json.dumps(
        {
            "attempt": attempt,
            "call_id": call_id,
            "content": content,
            "kind": kind,
            "ordinal": ordinal,
            "outcome": outcome,
            "run": str(run),
            "step": step,
            "tool": tool,
        },
        separators=(",", ":"),
        sort_keys=True,
    )


class AuditBatch(BaseModel):
    """One delivery on the exchange ``chaz.audit``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["audit"] = "audit"
    version: Literal[1] = 1
    events: tuple[AuditEvent, ...]
