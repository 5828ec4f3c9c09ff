"""The store of a run's steps and calls: written before and after each effect, so that a run can be replayed.

A tool's arguments are kept exactly, for workers only; the audit events made here carry what may leave. A result is
kept as the model was told it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, LiteralString
from uuid import UUID

from chaz import budgets, limits
from chaz import usage as accounts
from chaz.database import Row, Transaction
from chaz.deliveries import AuditEvent, event_body
from chaz.entries import Budget, safe_text
from chaz.outcomes import MAX_RESULT, CallOutcome, Room, ToolCall, Turn, Usage
from chaz.runs import Claim, fence

MAX_NAME = 200


@dataclass(frozen=True)
class StoredStep:
    """A turn that the model gave in an earlier attempt or earlier in this one."""

    step: int
    turn: Turn
    read_to: int
    """The last position that its model had seen."""


@dataclass(frozen=True)
class StoredCall:
    """A call as the journal has it. ``outcome`` is None while it has no result; ``waiting``: then a wait is open.

    One that has not started is known by its wait alone: a person is asked, or was, whether it may be made.
    """

    step: int
    ordinal: int
    tool: str
    outcome: CallOutcome | None
    waiting: bool
    answer: CallOutcome | None
    """What its wait was answered with, not yet told as its result."""
    started: bool = True
    digest: str | None = None
    """Of the call that a person was asked about."""


async def load(tx: Transaction, run_id: UUID) -> tuple[list[StoredStep], list[StoredCall]]:
    """All that the run did so far, in order."""
    steps = await tx.execute(
        "select step, turn, read_to from chaz.steps where run_id = %(run)s order by step", {"run": run_id}
    )
    stored = [
        StoredStep(row["step"], Turn.model_validate(row["turn"]), row["read_to"]) for row in await steps.fetchall()
    ]
    calls = await tx.execute(
        """
        select step, ordinal, coalesce(c.tool, a.tool) as tool, c.outcome, c.result, c.error,
            w.run_id is not null as waits, w.answer, c.run_id is not null as started, a.digest
        from (select * from chaz.calls where run_id = %(run)s) c
            full join (select * from chaz.waits where run_id = %(run)s) w using (run_id, step, ordinal)
            left join chaz.approvals a using (run_id, step, ordinal)
        order by step, ordinal
        """,
        {"run": run_id},
    )
    return stored, [_stored_call(row) for row in await calls.fetchall()]


def _stored_call(row: Mapping[str, Any]) -> StoredCall:
    done = row["outcome"] is not None
    return StoredCall(
        step=row["step"],
        ordinal=row["ordinal"],
        tool=row["tool"],
        outcome=stored_outcome(row) if done else None,
        waiting=not done and row["waits"] and row["answer"] is None,
        answer=None if done or row["answer"] is None else CallOutcome.model_validate(row["answer"]),
        started=row["started"],
        digest=row["digest"],
    )


def stored_outcome(row: Mapping[str, Any]) -> CallOutcome:
    """What a call came to, from the row of one that is done."""
    return CallOutcome(kind=row["outcome"], content=row["result"], error=row["error"] or "")


async def store_step(
    tx: Transaction,
    claim: Claim,
    *,
    step: int,
    turn: Turn,
    version: str,
    model: str,
    cost: Decimal | None,
    seen: int | None = None,
) -> bool:
    """Store the model's turn, before any of its calls runs, book what it used, and settle what was reserved for it.

    ``model`` is its name as agents write it; ``cost`` is None where its price is not known. ``seen`` is the last
    position that the model had seen; None: all that the run has read. Returns whether the run's next turn has to be
    reserved.
    """
    await fence(tx, claim)
    # ASCII escapes, so that whatever a model wrote (NUL, lone surrogates) is kept as it came.
    text = json.dumps(turn.model_dump(mode="json"), ensure_ascii=True)
    async with tx.pipeline():
        await tx.execute(
            """
            with stored as (
                insert into chaz.steps (run_id, step, attempt, version, read_to, turn)
                select id, %(step)s, %(attempt)s, %(version)s, coalesce(%(seen)s::bigint, read_to), %(turn)s::json
                from chaz.runs where id = %(run)s),
            held as (
                select reserved_step, reserved_tokens, reserved_cost from chaz.runs where id = %(run)s),
            counted as (
                update chaz.runs set steps = %(step)s + 1, crashes = 0, suspect = false,
                    reserved_step = null, reserved_tokens = 0, reserved_cost = 0
                where id = %(run)s)
            update chaz.tree_budgets b set steps = b.steps + 1, tokens = b.tokens + %(tokens)s,
                cost = b.cost + %(cost)s,
                reserved_steps = b.reserved_steps - (held.reserved_step is not null)::int,
                reserved_tokens = b.reserved_tokens - held.reserved_tokens,
                reserved_cost = b.reserved_cost - held.reserved_cost
            from held where root_run_id = %(root)s
            """,
            {
                "run": claim.run_id,
                "step": step,
                "attempt": claim.attempt,
                "version": version,
                "seen": seen,
                "turn": text,
                "tokens": turn.usage.prompt + turn.usage.completion,
                "cost": cost or 0,
                "root": claim.root_run_id,
            },
        )
        await accounts.book(
            tx, claim.run_id, claim.attempt, step=step, number=0, model=model, usage=turn.usage, cost=cost
        )
        counted = await limits.count(tx, claim.run_id, turn.usage, cost)
    return claim.limited or counted.rowcount > 0


async def has_step(tx: Transaction, claim: Claim, *, step: int) -> bool | None:
    """True if this attempt has stored the turn already, else None. Raises StaleAttempt, as the write would."""
    await fence(tx, claim)
    cursor = await tx.execute(
        "select from chaz.steps where run_id = %(run)s and step = %(step)s and attempt = %(attempt)s",
        {"run": claim.run_id, "step": step, "attempt": claim.attempt},
    )
    return True if await cursor.fetchone() is not None else None


async def book_refused(
    tx: Transaction, claim: Claim, *, step: int, number: int, usage: Usage, model: str, cost: Decimal | None
) -> bool:
    """Book what a turn used that the model gave in this attempt, at try ``number`` from 1, and is refused. True."""
    await fence(tx, claim)
    async with tx.pipeline():
        await tx.execute(
            """
            update chaz.tree_budgets set tokens = tokens + %(tokens)s, cost = cost + %(cost)s
            where root_run_id = %(root)s
            """,
            {"tokens": usage.prompt + usage.completion, "cost": cost or 0, "root": claim.root_run_id},
        )
        await accounts.book(
            tx, claim.run_id, claim.attempt, step=step, number=number, model=model, usage=usage, cost=cost
        )
        await limits.count(tx, claim.run_id, usage, cost)
    return True


async def has_refused(tx: Transaction, claim: Claim, *, step: int, number: int) -> bool | None:
    """True if that has been booked already, else None. Raises StaleAttempt, as the write would."""
    await fence(tx, claim)
    booked = await accounts.is_booked(tx, claim.run_id, claim.attempt, step=step, number=number)
    return True if booked else None


async def reserve(
    tx: Transaction, claim: Claim, *, step: int, tokens: int, cost: Decimal | None, budget: Budget, model: str
) -> Room:
    """Hold what a step is thought to take of the tree's budget; ``budget`` is the agent's own, for a tree's root.

    Raises LimitReached if the run's agent, its session or the deployment has used up what it may in a period;
    UnknownPrice where a cost is limited, and that of the model is not known (None).
    """
    await fence(tx, claim)
    await limits.check(tx, claim.run_id, model=model, priced=cost is not None)
    if claim.is_top and budget != Budget():
        await budgets.limit(tx, claim.root_run_id, budget)
    return await budgets.reserve(tx, claim.run_id, claim.root_run_id, step=step, tokens=tokens, cost=cost, model=model)


async def start_call(tx: Transaction, claim: Claim, *, step: int, ordinal: int, call: ToolCall) -> AuditEvent:
    """Store that a call starts, before it does; the event to tell."""
    content = call.arguments if call.shown is None else call.shown
    event = await _event(tx, claim, "tool_call", step, ordinal, call, content=content)
    await tx.execute(
        """
        with approved as (
            delete from chaz.waits where (run_id, step, ordinal) = (%(run)s, %(step)s, %(ordinal)s)
                and kind = 'approval')
        insert into chaz.calls
            (run_id, step, ordinal, call_id, tool, arguments, shown, attempt, call_position, call_seq, started_at)
        values (%(run)s, %(step)s, %(ordinal)s, %(call_id)s, %(tool)s, %(arguments)s, %(shown)s, %(attempt)s,
            %(position)s, %(seq)s, %(at)s)
        """,
        {
            "run": claim.run_id,
            "step": step,
            "ordinal": ordinal,
            "call_id": event.call_id,
            "tool": event.tool,
            "arguments": safe_text(call.arguments, MAX_RESULT),
            "shown": None if call.shown is None else event.content,
            "attempt": claim.attempt,
            "position": event.position,
            "seq": event.seq,
            "at": event.at,
        },
    )
    return event


async def finish_call(
    tx: Transaction, claim: Claim, *, step: int, ordinal: int, call: ToolCall, outcome: CallOutcome
) -> AuditEvent:
    """Store what a started call came to; the event to tell."""
    event = await _event(tx, claim, "tool_result", step, ordinal, call, content=outcome.content, outcome=outcome.kind)
    await close_call(tx, event, error=outcome.error)
    return event


async def refuse_call(
    tx: Transaction, claim: Claim, *, step: int, ordinal: int, call: ToolCall, outcome: CallOutcome
) -> list[AuditEvent]:
    """Store a call that chaz refuses, with its result; the two events to tell.

    In one transaction, so that no lost worker leaves in doubt whether anything ran.
    """
    place: dict[str, Any] = {"step": step, "ordinal": ordinal, "call": call}
    return [await start_call(tx, claim, **place), await finish_call(tx, claim, **place, outcome=outcome)]


async def told_call(tx: Transaction, claim: Claim, *, step: int, ordinal: int, call: ToolCall) -> AuditEvent | None:
    """The event of a call that this attempt has stored already, else None. Raises StaleAttempt."""
    await fence(tx, claim)
    row = await call_row(tx, claim, step, ordinal)
    return None if row is None or row["attempt"] != claim.attempt else call_event(row)


async def told_result(tx: Transaction, claim: Claim, *, step: int, ordinal: int, call: ToolCall) -> AuditEvent | None:
    """The event of a result that has been stored already, else None. Raises StaleAttempt."""
    await fence(tx, claim)
    row = await call_row(tx, claim, step, ordinal)
    return None if row is None or row["result_seq"] is None else result_event(row)


async def told_refusal(
    tx: Transaction, claim: Claim, *, step: int, ordinal: int, call: ToolCall
) -> list[AuditEvent] | None:
    """The two events of a refusal that this attempt has stored already, else None. Raises StaleAttempt."""
    await fence(tx, claim)
    row = await call_row(tx, claim, step, ordinal)
    return None if row is None or row["attempt"] != claim.attempt else [call_event(row), result_event(row)]


CALL: LiteralString = "c.*, r.session_id, r.tenant, r.agent from chaz.calls c join chaz.runs r on r.id = c.run_id"
"""What :func:`call_event` and :func:`result_event` need of a call: its row, and its run's session, tenant and agent."""


async def call_row(tx: Transaction, claim: Claim, step: int, ordinal: int) -> Row | None:
    """A call with what its events need of its run; None if it has not started."""
    cursor = await tx.execute(
        f"select {CALL} where c.run_id = %(run)s and step = %(step)s and ordinal = %(ordinal)s",
        {"run": claim.run_id, "step": step, "ordinal": ordinal},
    )
    return await cursor.fetchone()


def call_event(row: Row) -> AuditEvent:
    """The event of a call, as it was told when the call started."""
    return AuditEvent(
        kind="tool_call",
        position=row["call_position"],
        seq=row["call_seq"],
        at=row["started_at"],
        attempt=row["attempt"],
        content=row["arguments"] if row["shown"] is None else row["shown"],
        **_common(row),
    )


def result_event(row: Row) -> AuditEvent:
    """The event of a result, as it was told when the call ended."""
    return AuditEvent(
        kind="tool_result",
        position=row["result_position"],
        seq=row["result_seq"],
        at=row["ended_at"],
        attempt=row["result_attempt"],
        outcome=row["outcome"],
        content=row["result"],
        **_common(row),
    )


def _common(row: Row) -> dict[str, Any]:
    return {
        "session": row["session_id"],
        "tenant": row["tenant"],
        "run": row["run_id"],
        "agent": row["agent"],
        "step": row["step"],
        "ordinal": row["ordinal"],
        "call_id": row["call_id"],
        "tool": row["tool"],
    }


async def close_call(tx: Transaction, event: AuditEvent, *, error: str = "") -> None:
    """Write the result that ``event`` tells into the call's row; ``error`` is the word of one of chaz's own errors."""
    await tx.execute(
        """
        update chaz.calls set state = 'done', outcome = %(outcome)s, result = %(result)s, error = %(error)s,
            result_position = %(position)s, result_seq = %(seq)s, result_attempt = %(attempt)s, ended_at = %(at)s
        where run_id = %(run)s and step = %(step)s and ordinal = %(ordinal)s and state = 'started'
        """,
        {
            "run": event.run,
            "step": event.step,
            "ordinal": event.ordinal,
            "outcome": event.outcome,
            "result": event.content,
            "error": error or None,
            "position": event.position,
            "attempt": event.attempt,
            "seq": event.seq,
            "at": event.at,
        },
    )


async def _event(
    tx: Transaction,
    claim: Claim,
    kind: str,
    step: int,
    ordinal: int,
    call: ToolCall,
    *,
    content: str,
    outcome: str = "",
) -> AuditEvent:
    """Number an event by the fenced statement."""
    facts: dict[str, Any] = {
        "kind": kind,
        "run": claim.run_id,
        "step": step,
        "ordinal": ordinal,
        "call_id": safe_text(call.id, MAX_NAME),
        "tool": safe_text(call.tool, MAX_NAME),
        "attempt": claim.attempt,
        "outcome": outcome,
        "content": safe_text(content, MAX_RESULT),
    }
    number = await fence(tx, claim, event_body=event_body(**facts))
    return AuditEvent(
        session=claim.session_id,
        tenant=claim.tenant,
        position=claim.ack_position,
        seq=number.seq,
        at=number.at,
        agent=claim.agent,
        **facts,
    )
