"""The end of a run: one transaction under its session's head. There is no moment at which a part of it is true.

Open calls get a result, the closing entry is appended, whom it mentions is woken, the state is final, the session's
next run is queued, the parent's wait is answered, whoever waits is notified, and who asked to be told is due to be.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from chaz import approvals, budgets, mentions, schedules, sessionlog
from chaz.channels import ABORT, DONE
from chaz.database import Row, Transaction
from chaz.deliveries import AuditEvent, event_body
from chaz.entries import safe_text
from chaz.errors import StaleAttempt
from chaz.journal import close_call
from chaz.lineage import answer_of
from chaz.outcomes import CallOutcome, RunOutcome, RunState
from chaz.routing import BURST
from chaz.runs import Claim, go_on

AUDIT_GRACE = timedelta(seconds=5)
"""How long after a run's end its events may be on their way; then what is missing is sent again."""

INTERRUPTED = "interrupted"
"""The reason of a run that ended in favour of a newer message. It ends with a message of its own, and no error."""


async def end_run(tx: Transaction, claim: Claim, outcome: RunOutcome, *, burst: int = BURST) -> list[AuditEvent]:
    """End the run that this attempt owns. Returns the events to tell. Raises StaleAttempt.

    ``burst`` is the deployment's: how many answers of agents in a row may wake others.
    """
    await sessionlog.lock_head(tx, claim.session_id)
    events = await _end(tx, claim.run_id, outcome, states=("running",), attempt=claim.attempt, burst=burst)
    if events is None:
        raise StaleAttempt(claim.run_id, claim.attempt)
    return events


async def close_run(
    tx: Transaction, run_id: UUID, outcome: RunOutcome, *, states: Sequence[RunState]
) -> list[AuditEvent] | None:
    """End a run from outside and return the events to tell; None if it is in none of ``states`` or cannot be locked.

    The worker that runs it is told at once; should it not hear, its next beat or write shows it.
    """
    row = await (await tx.execute("select session_id from chaz.runs where id = %(run)s", {"run": run_id})).fetchone()
    if row is None:
        return None
    # A sweep waits for nobody: a run whose session is at work is closed by a later one.
    if not await sessionlog.lock_free_head(tx, row["session_id"]):
        return None
    return await _end(tx, run_id, outcome, states=states, attempt=None)


async def _end(
    tx: Transaction,
    run_id: UUID,
    outcome: RunOutcome,
    *,
    states: Sequence[RunState],
    attempt: int | None,
    burst: int = 0,
) -> list[AuditEvent] | None:
    run = await (
        await tx.execute(
            """
            select * from chaz.runs r where id = %(run)s and state = any(%(states)s)
                and (%(attempt)s::int is null or attempt = %(attempt)s)
                and not exists (
                    select from chaz.runs taker where taker.id = r.superseded_by and taker.ended_at is not null)
            for update of r
            """,
            {"run": run_id, "states": list(states), "attempt": attempt},
        )
    ).fetchone()
    if run is None:
        return None
    text = safe_text(outcome.text)
    if outcome.state == "succeeded" and not text.strip():
        # Silence is an answer, and the same however it was typed.
        text = ""
    events = await _close_calls(tx, run)
    await approvals.close(tx, run)
    await tx.execute(
        """
        update chaz.runs set state = %(state)s, result = %(result)s, reason = %(reason)s, worker_id = null,
            claim = null, waits_for = null, superseded_by = null, ended_at = clock_timestamp(),
            audit_after = case when event_seq > 0 then clock_timestamp() + %(audit_grace)s end
        where id = %(run)s
        """,
        {
            "run": run_id,
            "state": outcome.state,
            "result": text,
            "reason": outcome.reason or None,
            "audit_grace": AUDIT_GRACE,
        },
    )
    answer = await _append_closing_entry(tx, run, outcome, text)
    # The last words of a run that was interrupted are no answer, nor is a summary.
    if answer is not None and outcome.state == "succeeded" and outcome.says == "message":
        await mentions.answered(tx, run, position=answer, text=text, burst=burst)
    if outcome.state == "cancelled":
        await _release_superseded(tx, run)
    await _queue_next(tx, run)
    await answer_parents(tx, run_id, answer_of(run["agent"], outcome.model_copy(update={"text": text})))
    await budgets.release(tx, run_id)
    await schedules.settle(tx, run, outcome)
    await tx.execute(
        """
        with told as (
            update chaz.callbacks set ended_at = clock_timestamp(), due_at = clock_timestamp()
            where ended_at is null and run_id = any(array(
                select %(run)s::uuid union all select id from chaz.runs where superseded_by = %(run)s)))
        select pg_notify(%(channel)s, id::text) from chaz.runs where (id = %(run)s or superseded_by = %(run)s)
            and exists (select from chaz.waiters where expires_at > now())
        """,
        {"channel": DONE, "run": run_id},
    )
    if attempt is None and run["state"] == "running":
        await tx.execute("select pg_notify(%(channel)s, %(run)s)", {"channel": ABORT, "run": str(run_id)})
    return events


async def _close_calls(tx: Transaction, run: Row) -> list[AuditEvent]:
    """Give each open call a result, through the run's own counter, so that every call has exactly one."""
    cursor = await tx.execute(
        """
        select c.*, w.run_id is not null as waits from chaz.calls c left join chaz.waits w using (run_id, step, ordinal)
        where c.run_id = %(run)s and c.state = 'started' order by c.step, c.ordinal
        """,
        {"run": run["id"]},
    )
    events: list[AuditEvent] = []
    for call in await cursor.fetchall():
        kind, content = (
            ("cancelled", "the run ended before the answer came")
            if call["waits"]
            else ("unknown", "the run ended during the call; it may or may not have run")
        )
        facts: dict[str, Any] = {
            "kind": "tool_result",
            "run": run["id"],
            "step": call["step"],
            "ordinal": call["ordinal"],
            "call_id": call["call_id"],
            "tool": call["tool"],
            "attempt": run["attempt"],
            "outcome": kind,
            "content": content,
        }
        numbered = await (
            await tx.execute(
                """
                update chaz.runs set event_seq = event_seq + 1, digest = sha256(digest || convert_to(%(body)s, 'UTF8'))
                where id = %(run)s returning event_seq, clock_timestamp() as at
                """,
                {"run": run["id"], "body": event_body(**facts)},
            )
        ).fetchone()
        assert numbered is not None
        event = AuditEvent(
            session=run["session_id"],
            tenant=run["tenant"],
            position=run["ack_position"],
            seq=numbered["event_seq"],
            at=numbered["at"],
            agent=run["agent"],
            **facts,
        )
        await close_call(tx, event)
        events.append(event)
    return events


async def _append_closing_entry(tx: Transaction, run: Row, outcome: RunOutcome, text: str) -> int | None:
    """Append what the log has of the end; where its text stands, if it has one."""
    if outcome.state == "succeeded" or outcome.reason == INTERRUPTED:
        if text.strip():
            noted = outcome.says == "note"
            return await sessionlog.append(
                tx,
                session_id=run["session_id"],
                tenant=run["tenant"],
                type=outcome.says,
                sender="chaz" if noted else run["agent"],
                author="system" if noted else "agent",
                content=text,
                metadata=outcome.metadata,
                run_id=run["id"],
            )
        return None
    await sessionlog.append(
        tx,
        session_id=run["session_id"],
        tenant=run["tenant"],
        type="error",
        sender="chaz",
        author="system",
        content=text,
        metadata=outcome.metadata | {"state": outcome.state, "reason": outcome.reason, "agent": run["agent"]},
        run_id=run["id"],
    )
    return None


async def _release_superseded(tx: Transaction, run: Row) -> None:
    """What others had said, and a cancelled run was to answer too, is owed an answer still.

    A requeued run has no entry of its id: its trigger is found by its position.
    """
    await tx.execute(
        """
        update chaz.runs p set state = 'pending', superseded_by = null
        from chaz.entries own, chaz.entries other
        where p.superseded_by = %(run)s and other.id = p.id
            and own.session_id = %(session)s and own.position = %(trigger)s and own.seq = 0
            and (other.sender, other.author) <> (own.sender, own.author)
        """,
        {"run": run["id"], "session": run["session_id"], "trigger": run["trigger_position"]},
    )


async def _queue_next(tx: Transaction, run: Row) -> None:
    """If the run was the session's active one, the next is queued in its place.

    That is the message's that interrupted it, else the first pending one whose time has come.
    """
    await tx.execute(
        """
        with free as (
            select session_id from chaz.heads where session_id = %(session)s and active_run = %(run)s),
        next as (
            select coalesce((
                select id from chaz.runs
                where interrupts = %(run)s and state = 'pending' and session_id = (select session_id from free)
                order by trigger_position limit 1), (
                select id from chaz.runs where session_id = (select session_id from free) and state = 'pending'
                    and (not_before is null or not_before <= clock_timestamp())
                order by priority desc, trigger_position limit 1)) as id),
        queued as (
            update chaz.runs set state = 'queued', queued_at = clock_timestamp(), publishes = 0,
                publish_after = clock_timestamp()
            where id = (select id from next))
        update chaz.heads set active_run = (select id from next)
        where session_id = (select session_id from free)
        """,
        {"session": run["session_id"], "run": run["id"]},
    )


async def answer_parents(tx: Transaction, run_id: UUID, answer: CallOutcome) -> None:
    """Answer the waits for this run, and queue each parked run whose last open wait this was.

    The waiting run's row is locked first, as its own decision to park does, so that the two cannot miss each other; of
    several the deepest first, as by all who lock more than one.
    """
    waiting = await (
        await tx.execute(
            """
            select id from chaz.runs where id in (
                select run_id from chaz.waits where child_run_id = %(run)s and answer is null)
            order by depth desc, id for update
            """,
            {"run": run_id},
        )
    ).fetchall()
    if not waiting:
        return
    await tx.execute(
        """
        update chaz.waits set answer = %(answer)s::json, answered_at = clock_timestamp()
        where child_run_id = %(run)s and answer is null
        """,
        {"run": run_id, "answer": json.dumps(answer.model_dump(mode="json"))},
    )
    await go_on(tx, [row["id"] for row in waiting])
