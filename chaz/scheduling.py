"""An agent's call about schedules: the call, what it does and its result, in one transaction.

So it happens once, whatever becomes of the worker, and no lost one leaves it in doubt.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from chaz import schedules
from chaz.children import Asked
from chaz.database import Row, Transaction
from chaz.entries import safe_text
from chaz.errors import ChazError, InvalidSchedule, UnknownAgent, UnknownSchedule, UnknownSession
from chaz.journal import finish_call, start_call
from chaz.outcomes import CallOutcome, ToolCall, typed_error
from chaz.planning import Ceilings, ScheduleCall
from chaz.runs import Claim


async def perform(
    tx: Transaction,
    claim: Claim,
    *,
    step: int,
    ordinal: int,
    call: ToolCall,
    wanted: ScheduleCall,
    ceilings: Ceilings,
) -> Asked:
    """Do what the call wants, unless it is refused, which is its result then. Raises StaleAttempt."""
    place: dict[str, Any] = {"step": step, "ordinal": ordinal, "call": call}
    event = await start_call(tx, claim, **place)
    try:
        outcome = CallOutcome(kind="ok", content=await _perform(tx, claim, wanted, ceilings))
    # Each is raised before anything is written.
    except InvalidSchedule as error:
        outcome = typed_error("bad_arguments", f"{call.tool}: {error}")
    except (UnknownSchedule, UnknownAgent, UnknownSession) as error:
        outcome = typed_error("unknown_schedule", f"{call.tool}: {error}")
    except _Refused as error:
        outcome = typed_error("not_allowed", str(error))
    return Asked([event, await finish_call(tx, claim, **place, outcome=outcome)], outcome)


class _Refused(ChazError):
    """The agent may not do this. Args: why."""


async def _perform(tx: Transaction, claim: Claim, wanted: ScheduleCall, ceilings: Ceilings) -> str:
    agent = safe_text(wanted.agent, 200)
    if agent != claim.agent and not ceilings.of_others:
        raise _Refused(f"the schedules of {agent!r} are its own; you may have schedules of yours only")
    by, tenant = f"agent {claim.agent}", claim.tenant
    match wanted.verb:
        case "add":
            assert wanted.schedule is not None
            row = await schedules.add(tx, agent, wanted.schedule, tenant=tenant, by=by, ceilings=ceilings, own=True)
        case "modify":
            row = await schedules.modify(
                tx, agent, wanted.id, wanted.changes, tenant=tenant, by=by, ceilings=ceilings, own=True
            )
        case "remove":
            await schedules.remove(tx, agent, wanted.id, tenant=tenant, by=by)
            return f"{wanted.id} is removed"
        case "list":
            found = await schedules.of_own(tx, tenant, agent)
            return "\n".join(json.dumps(_shown(row), ensure_ascii=False, default=_plain) for row in found) or "none"
    return f"{row['id']} {_when(row)}"


def _when(row: Row) -> str:
    return (
        f"is due next at {row['next_at'].isoformat()}" if row["next_at"] is not None else f"is not due: {row['reason']}"
    )


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    hidden = {"agent", "session_id", "retired_at", "retired_by"}
    return {name: value for name, value in row.items() if name not in hidden and value is not None}


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
