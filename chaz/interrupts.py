"""Interrupting: a message of a session whose ``on_message`` is ``interrupt`` takes the place of the active run.

Placing marks the message's run with the run that it interrupts; a listener ends that one from here, wherever it is: its
worker, if it has one, is refused by the fence from then on, and aborts it at its next beat.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from functools import partial
from uuid import UUID

from chaz import cancelling, sessionlog
from chaz.aside import Aside
from chaz.completion import INTERRUPTED, close_run
from chaz.database import Database, Transaction
from chaz.deliveries import AuditEvent
from chaz.errors import DatabaseUnavailable
from chaz.outcomes import RunOutcome, Turn
from chaz.runs import INTERRUPTING

logger = logging.getLogger("chaz.listener")


async def interrupt(database: Database, *, aside: Aside, limit: int = 100) -> list[tuple[UUID, UUID, list[AuditEvent]]]:
    """End the runs that messages interrupt; of each its id, the message's run, and the events to tell."""
    rows = await database.fetch(
        f"""
        select distinct on (r.id) r.id, p.id as by
        from chaz.runs p join chaz.runs r on r.id = p.interrupts
        where {INTERRUPTING} and r.state in ('queued', 'running', 'parked') and r.id <> all(%(aside)s::uuid[])
        order by r.id, p.trigger_position limit %(limit)s
        """,
        {"aside": aside.ids(), "limit": limit},
    )
    interrupted: list[tuple[UUID, UUID, list[AuditEvent]]] = []
    for row in rows:
        run, by = row["id"], row["by"]
        try:
            events = await database.transact(partial(interrupt_run, run_id=run, by=by))
        except (DatabaseUnavailable, asyncio.CancelledError):
            raise
        except Exception:
            # One bad row never holds up the others.
            pause = aside.put(run)
            logger.exception("listener: run=%s cannot be interrupted; set aside for %g s", run, pause)
            continue
        if events is not None:
            interrupted.append((run, by, events))
    return interrupted


async def interrupt_run(tx: Transaction, run_id: UUID, by: UUID) -> list[AuditEvent] | None:
    """End the run in favour of ``by``, the pending run of a message; the events to tell.

    None if that is no longer so, or if somebody else has the session's head or cancels the run at the moment.
    """
    session = await (
        await tx.execute("select session_id, tenant, agent, cause from chaz.runs where id = %(run)s", {"run": run_id})
    ).fetchone()
    if session is None or not await sessionlog.lock_free_head(tx, session["session_id"]):
        return None
    locked = await tx.execute(
        f"""
        select from chaz.runs r where id = %(run)s and state in ('queued', 'running', 'parked')
            and exists (select from chaz.runs p where p.id = %(by)s and p.interrupts = r.id and {INTERRUPTING})
        for update of r
        """,
        {"run": run_id, "by": by},
    )
    if await locked.fetchone() is None:
        return None
    # The walk finds the run ended, and goes on to its children.
    if not await cancelling.require(tx, run_id, by="chaz", reason="it was interrupted by a newer message"):
        return None
    if session["cause"] == "compaction":
        # It was to say nothing but the summary: the log stays as it was.
        outcome = RunOutcome(state="cancelled", reason=INTERRUPTED)
    else:
        outcome = await _outcome(tx, run_id, by)
    events = await close_run(tx, run_id, outcome, states=("queued", "running", "parked"))
    if events is None:
        return None
    await sessionlog.append(
        tx,
        session_id=session["session_id"],
        tenant=session["tenant"],
        type="note",
        sender="chaz",
        author="system",
        content=f"interrupted {session['agent']!r} for a newer message",
        metadata={"entry": str(by), "reason": INTERRUPTED, "run": str(run_id)},
    )
    return events


async def _outcome(tx: Transaction, run_id: UUID, by: UUID) -> RunOutcome:
    """What the run leaves: its last text, and the names of the calls that it made."""
    turns = await tx.execute(
        "select turn from chaz.steps where run_id = %(run)s order by step desc limit 1", {"run": run_id}
    )
    calls = await tx.execute(
        "select tool from chaz.calls where run_id = %(run)s order by step, ordinal", {"run": run_id}
    )
    last = await turns.fetchone()
    said = Turn.model_validate(last["turn"]).text.strip() if last else ""
    made = [row["tool"] for row in await calls.fetchall()]
    names = ", ".join(tool if n == 1 else f"{n} x {tool}" for tool, n in Counter(made).items())
    mark = f"[interrupted by a newer message; calls made: {names or 'none'}]"
    return RunOutcome(
        state="cancelled",
        reason=INTERRUPTED,
        text=f"{said}\n\n{mark}" if said else mark,
        metadata={"interrupted": True, "by": str(by), "calls": made},
    )
