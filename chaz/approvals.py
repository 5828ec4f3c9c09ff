"""The store of what runs ask people. A request and its decision are two entries, and a parked run between them.

A request is made, decided and closed under the lock of its run's row: so the first decision wins, and none falls
between a run's look and its parking.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

from chaz import sessionlog
from chaz.asking import GRANTED, Approving, Ask, Decision, nobody_to_ask, told
from chaz.database import Row, Transaction
from chaz.deliveries import AuditEvent
from chaz.entries import derived_id, safe_text
from chaz.journal import MAX_NAME, call_event, call_row, finish_call, result_event, start_call, stored_outcome
from chaz.lineage import matches
from chaz.outcomes import CallOutcome, ToolCall
from chaz.runs import Claim, fence, go_on

MAX_SHOWN = 20_000
"""The most characters of a call's arguments that a request shows."""
MAX_NOTE = 2_000
SYSTEM = "system"
FROM_PEOPLE = frozenset({"approve", "approve_all", "deny", "answer"})


@dataclass(frozen=True)
class Asked:
    """What it came to: the events to tell, and the outcome: None while it waits, GRANTED if the call may be made."""

    events: list[AuditEvent] = field(default_factory=list[AuditEvent])
    outcome: CallOutcome | None = None


def request_id(run_id: UUID, step: int, ordinal: int) -> UUID:
    """The id of the request that a call makes, and of its entry."""
    return derived_id("approval", str(run_id), f"{step}.{ordinal}")


async def ask(
    tx: Transaction, claim: Claim, *, step: int, ordinal: int, call: ToolCall, ask: Ask, deployment: Approving
) -> Asked:
    """Store a request, its entry and the wait for its decision; a question's call has started with it.

    It is asked in the run's own session if that names approvers, else in that of the run that started its tree. Where
    nobody may decide, the answer is no, at once. Raises StaleAttempt.
    """
    session = await _asked_in(tx, claim)
    await sessionlog.lock_head(tx, session["id"])
    place = {"step": step, "ordinal": ordinal}
    if ask.kind == "question":
        events = [await start_call(tx, claim, **place, call=call)]
    else:
        await fence(tx, claim)
        events = list[AuditEvent]()
        run = await (
            await tx.execute("select approve_all from chaz.runs where id = %(run)s", {"run": claim.run_id})
        ).fetchone()
        assert run is not None
        auto = deployment.auto_approve if session["auto_approve"] is None else session["auto_approve"]
        if run["approve_all"] or (ask.unless_auto_approved and matches(ask.tool, auto)):
            return Asked(events, GRANTED)
    approvers = deployment.approvers if session["approvers"] is None else session["approvers"]
    if not approvers:
        outcome = nobody_to_ask()
        await sessionlog.append(
            tx,
            session_id=session["id"],
            tenant=claim.tenant,
            type="note",
            sender="chaz",
            author="system",
            content=f"{claim.agent!r} may not use {ask.tool!r}: that needs a person's word, and no approver is named "
            "for this session or the deployment (CHAZ_APPROVERS)",
            metadata={"reason": "no-approver", "run": str(claim.run_id), "tool": ask.tool},
        )
        if events:
            events.append(await finish_call(tx, claim, **place, call=call, outcome=outcome))
        return Asked(events, outcome)
    await _store(tx, claim, session, step, ordinal, ask, approvers, deployment.timeout)
    return Asked(events)


async def _asked_in(tx: Transaction, claim: Claim) -> Row:
    cursor = await tx.execute(
        """
        select s.id, s.approvers, s.auto_approve, s.approval_timeout
        from chaz.sessions own cross join lateral (
            select * from chaz.sessions where id = case when own.approvers is not null then own.id
                else coalesce((select session_id from chaz.runs where id = %(root)s), own.id) end) s
        where own.id = %(session)s
        """,
        {"session": claim.session_id, "root": claim.root_run_id},
    )
    row = await cursor.fetchone()
    assert row is not None
    return row


async def _store(
    tx: Transaction,
    claim: Claim,
    session: Row,
    step: int,
    ordinal: int,
    ask: Ask,
    approvers: Sequence[str],
    timeout: float,
) -> None:
    id = request_id(claim.run_id, step, ordinal)
    shown = safe_text(ask.shown, MAX_SHOWN)
    choices = None if ask.choices is None else [safe_text(choice) for choice in ask.choices]
    default = timedelta(seconds=timeout) if session["approval_timeout"] is None else session["approval_timeout"]
    stored = await (
        await tx.execute(
            """
            with waiting as (
                insert into chaz.waits (run_id, step, ordinal, kind)
                values (%(run)s, %(step)s, %(ordinal)s, %(kind)s))
            insert into chaz.approvals (id, kind, run_id, step, ordinal, tenant, session_id, agent, tool, risk, shown,
                digest, choices, approvers, expires_at)
            select %(id)s, %(kind)s, r.id, %(step)s, %(ordinal)s, r.tenant, %(session)s, r.agent, %(tool)s, %(risk)s,
                %(shown)s, %(digest)s, %(choices)s, %(approvers)s,
                least(clock_timestamp() + %(timeout)s, r.deadline)
            from chaz.runs r where r.id = %(run)s
            returning expires_at
            """,
            {
                "id": id,
                "kind": ask.kind,
                "run": claim.run_id,
                "step": step,
                "ordinal": ordinal,
                "session": session["id"],
                "tool": safe_text(ask.tool, MAX_NAME),
                "risk": ask.risk,
                "shown": shown,
                "digest": ask.digest,
                "choices": choices,
                "approvers": list(approvers),
                "timeout": default if ask.timeout is None else timedelta(seconds=ask.timeout),
            },
        )
    ).fetchone()
    assert stored is not None
    content = shown if ask.kind == "question" else f"may {claim.agent} call {ask.tool}? {shown}"
    facts: dict[str, Any] = {
        "request": str(id),
        "kind": ask.kind,
        "tool": ask.tool,
        "risk": ask.risk,
        "arguments": shown,
        "hash": ask.digest,
        "deadline": stored["expires_at"].isoformat(),
        "agent": claim.agent,
        "step": step,
        "ordinal": ordinal,
    }
    if choices is not None:
        facts["choices"] = choices
    if claim.session_id != session["id"]:
        facts["asked_by"] = str(claim.session_id)
    await sessionlog.append(
        tx,
        id=id,
        session_id=session["id"],
        tenant=claim.tenant,
        type="approval_request",
        sender=claim.agent,
        author="agent",
        content=safe_text(content),
        metadata=facts,
        run_id=claim.run_id,
    )


async def asked(tx: Transaction, claim: Claim, *, step: int, ordinal: int) -> Asked | None:
    """What this attempt has stored of its asking already, else None. Raises StaleAttempt, as the write would."""
    await fence(tx, claim)
    call = await call_row(tx, claim, step, ordinal)
    events = [] if call is None else [call_event(call)]
    cursor = await tx.execute(
        "select from chaz.approvals where id = %(id)s", {"id": request_id(claim.run_id, step, ordinal)}
    )
    if await cursor.fetchone() is not None:
        return Asked(events)
    if call is None or call["attempt"] != claim.attempt or call["state"] != "done":
        return None
    return Asked([*events, result_event(call)], stored_outcome(call))


@dataclass(frozen=True)
class Said:
    """What a decision gives the log to say, besides itself: a ``note``, or a decision of the system's own."""

    entry: Mapping[str, Any]
    """The decision's row, as it was placed."""
    type: str
    text: str
    metadata: dict[str, Any]


async def decide(tx: Transaction, decisions: Sequence[Mapping[str, Any]]) -> list[Said]:
    """Let placed ``approval_decision`` entries decide; what the log has to say of each that does not.

    The caller, which places them, holds their sessions' heads. Their runs are locked the deepest first, as those that
    end lock theirs before their parents'.
    """
    ids = [id for row in decisions if (id := _request_of(row)) is not None]
    await tx.execute(
        """
        select from chaz.runs where id in (select run_id from chaz.approvals where id = any(%(ids)s))
        order by depth desc, id for update
        """,
        {"ids": ids},
    )
    said: list[Said] = []
    for row in decisions:
        said += await _decide(tx, row)
    return said


def _request_of(row: Mapping[str, Any]) -> UUID | None:
    try:
        return UUID(str(row["metadata"].get("request")))
    except ValueError:
        return None


async def _decide(tx: Transaction, row: Mapping[str, Any]) -> list[Said]:
    id = _request_of(row)
    found = await tx.execute(
        """
        select a.*, coalesce(s.approvers, a.approvers) as may_decide, e.created_at > a.expires_at as late
        from chaz.approvals a join chaz.sessions s on s.id = a.session_id join chaz.entries e on e.id = %(entry)s
        where a.id = %(id)s and a.session_id = %(session)s
        """,
        {"id": id, "session": row["session_id"], "entry": row["id"]},
    )
    request = await found.fetchone()
    if request is None:
        named = safe_text(repr(row["metadata"].get("request")), MAX_NAME)
        return [_note(row, f"no request {named} was made in this session")]
    by, decision = row["sender"], row["metadata"].get("decision")
    if refusal := _refusal(request, row, decision):
        return [_note(row, refusal)]
    if request["decision"] is None and request["late"]:
        await _settle(tx, request, "timed_out", SYSTEM, "")
        return [_closing(row, request, "timed_out", ""), _note(row, _too_late(request | {"decision": "timed_out"}))]
    if request["decision"] is not None:
        return [_note(row, _too_late(request))]
    await _settle(tx, request, decision, by, row["content"], decided_as=row["metadata"].get("decided_as"))
    if decision != "approve_all":
        return []
    await tx.execute("update chaz.runs set approve_all = true where id = %(run)s", {"run": request["run_id"]})
    others = await tx.execute(
        """
        select * from chaz.approvals where run_id = %(run)s and kind = 'approval' and decision is null
        order by step, ordinal
        """,
        {"run": request["run_id"]},
    )
    said: list[Said] = []
    for other in await others.fetchall():
        await _settle(tx, other, "approve", by, f"all of this run's, with {id}")
        said.append(_closing(row, other, "approve", f"with all of this run's, by {by}"))
    return said


def _refusal(request: Row, row: Mapping[str, Any], decision: Any) -> str | None:
    """Why the entry decides nothing, whatever the state of the request; None if it may."""
    by = row["sender"]
    if row["author"] == "agent" or not matches(by, request["may_decide"]):
        allowed = ", ".join(request["may_decide"]) or "nobody"
        return f"{by!r} may not decide request {request['id']}; who may: {allowed}"
    if not isinstance(decision, str) or decision not in FROM_PEOPLE:
        return f"a decision is approve, approve_all, deny or answer, not {safe_text(repr(decision), MAX_NAME)}"
    if (request["kind"] == "question") != (decision == "answer") and decision != "deny":
        return f"request {request['id']} is of the kind {request['kind']}; {decision} decides nothing about it"
    if decision == "answer" and request["choices"] is not None and row["content"] not in request["choices"]:
        return f"the answer to request {request['id']} is one of {', '.join(request['choices'])}"
    return None


_WORDS = {
    "approve": "approved by {by}",
    "approve_all": "approved by {by}",
    "deny": "denied by {by}",
    "answer": "answered by {by}",
    "timed_out": "timed out",
    "cancelled": "closed with its run",
}


def in_words(decision: str, by: str) -> str:
    """How a request was decided: "approved by ada"."""
    return _WORDS[decision].format(by=by)


def _too_late(request: Row) -> str:
    how = in_words(request["decision"], request["decided_by"] or "")
    return f"request {request['id']} had been {how} before; this decision changes nothing"


def _note(row: Mapping[str, Any], text: str) -> Said:
    # Whoever may decide, or what may be answered, can be a long list.
    return Said(row, "note", safe_text(text, MAX_NOTE), {"entry": str(row["id"]), "reason": "no-effect"})


def _closing(row: Mapping[str, Any], request: Row, decision: Decision, text: str) -> Said:
    return Said(row, "approval_decision", text, {"request": str(request["id"]), "decision": decision})


async def _settle(
    tx: Transaction, request: Row, decision: Decision, by: str, reason: str, *, decided_as: str | None = None
) -> None:
    """Write the decision of an open request, answer its call's wait, and let its run go on. Its row is locked."""
    outcome = told(request["kind"], decision, by, reason)
    await tx.execute(
        """
        with decided as (
            update chaz.approvals set decision = %(decision)s, decided_by = %(by)s, decided_as = %(as)s,
                reason = %(reason)s, decided_at = clock_timestamp()
            where id = %(id)s and decision is null)
        update chaz.waits set answer = %(answer)s::json, answered_at = clock_timestamp()
        where (run_id, step, ordinal) = (%(run)s, %(step)s, %(ordinal)s) and answer is null
        """,
        {
            "id": request["id"],
            "decision": decision,
            "by": by,
            "as": decided_as,
            "reason": reason,
            "answer": json.dumps(outcome.model_dump(mode="json")),
            "run": request["run_id"],
            "step": request["step"],
            "ordinal": request["ordinal"],
        },
    )
    await go_on(tx, [request["run_id"]])


async def overdue(tx: Transaction, *, without: Sequence[UUID] = (), limit: int = 100) -> list[UUID]:
    """Open requests whose time is over, but for those ``without``, the oldest first."""
    cursor = await tx.execute(
        """
        select id from chaz.approvals
        where decision is null and expires_at <= clock_timestamp() and id <> all(%(without)s::uuid[])
        order by expires_at limit %(limit)s
        """,
        {"without": list(without), "limit": limit},
    )
    return [row["id"] for row in await cursor.fetchall()]


async def time_out(tx: Transaction, id: UUID) -> bool:
    """Close a request whose time is over, with a decision of the system's own; False if it cannot be, or need not.

    A decision that was sent in time and is not placed yet comes first.
    """
    asked_in = await (
        await tx.execute("select session_id, run_id from chaz.approvals where id = %(id)s", {"id": id})
    ).fetchone()
    if asked_in is None or not await sessionlog.lock_free_head(tx, asked_in["session_id"]):
        return False
    await tx.execute("select from chaz.runs where id = %(run)s for update", {"run": asked_in["run_id"]})
    found = await tx.execute(
        """
        select a.* from chaz.approvals a
        where a.id = %(id)s and a.decision is null and a.expires_at <= clock_timestamp() and not exists (
            select from chaz.entries e where e.session_id = a.session_id and e.position is null
                and e.type = 'approval_decision' and e.created_at <= a.expires_at)
        """,
        {"id": id},
    )
    request = await found.fetchone()
    if request is None:
        return False
    await _settle(tx, request, "timed_out", SYSTEM, "")
    await sessionlog.append(tx, **_entry(request, "timed_out"))
    return True


async def close(tx: Transaction, run: Row) -> None:
    """Close the open requests of a run that ends, each with a decision of the system's own. The run's row is locked.

    One that was asked in another session has its decision placed by a listener: the head held here is the run's own.
    """
    cursor = await tx.execute(
        """
        update chaz.approvals set decision = 'cancelled', decided_by = %(by)s, reason = '',
            decided_at = clock_timestamp()
        where run_id = %(run)s and decision is null returning *
        """,
        {"run": run["id"], "by": SYSTEM},
    )
    for request in sorted(await cursor.fetchall(), key=lambda row: (row["step"], row["ordinal"])):
        entry = _entry(request, "cancelled")
        if request["session_id"] == run["session_id"]:
            await sessionlog.append(tx, **entry)
            continue
        await tx.execute(
            """
            insert into chaz.entries (tenant, session_id, type, sender, author, content, metadata, run_id)
            values (%(tenant)s, %(session_id)s, %(type)s, %(sender)s, %(author)s, %(content)s, %(metadata)s::jsonb,
                %(run_id)s)
            """,
            entry | {"metadata": json.dumps(entry["metadata"])},
        )


def _entry(request: Row, decision: Decision) -> dict[str, Any]:
    return {
        "session_id": request["session_id"],
        "tenant": request["tenant"],
        "type": "approval_decision",
        "sender": SYSTEM,
        "author": "system",
        "content": "",
        "metadata": {"request": str(request["id"]), "decision": decision},
        "run_id": request["run_id"],
    }
