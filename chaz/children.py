"""The store of a run's children: spawned within what their parent may do, and waited for.

A refusal is the call's result, stored with its start in the same transaction, so that no lost
worker leaves it in doubt.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from psycopg.types.json import Jsonb

from chaz import budgets
from chaz.database import Row, Transaction
from chaz.deliveries import AuditEvent
from chaz.entries import derived_id, safe_text
from chaz.journal import MAX_NAME, call_event, call_row, finish_call, result_event, start_call, stored_outcome
from chaz.lineage import Spawn, answer_of, in_scope, matches
from chaz.outcomes import FINAL_STATES, CallOutcome, RunOutcome, ToolCall, typed_error
from chaz.runs import Claim, fence


@dataclass(frozen=True)
class Asked:
    """A call that had to do with a child: the events to tell, and its result; None where it waits."""

    events: list[AuditEvent]
    outcome: CallOutcome | None = None


async def start_spawn(tx: Transaction, claim: Claim, *, step: int, ordinal: int, call: ToolCall, spawn: Spawn) -> Asked:
    """In one transaction: the call, a child session with what its runs inherit, a directive in it, and the wait.

    The child's ids come from run, step and ordinal, so that a replay finds the same child. Refused is what its parent's
    time, its tree's budget or its agent's own limits do not allow.
    """
    place: dict[str, Any] = {"step": step, "ordinal": ordinal, "call": call}
    event = await start_call(tx, claim, **place)
    outcome = await _refusal(tx, claim, spawn)
    child = child_id(claim.run_id, step, ordinal)
    if outcome is None:
        await _open(tx, claim, spawn, derived_id("child-session", str(claim.run_id), f"{step}.{ordinal}"), child)
        if spawn.wait:
            await _wait(tx, claim, step, ordinal, child)
            return Asked([event])
        outcome = CallOutcome(kind="ok", content=str(child))
    return Asked([event, await finish_call(tx, claim, **place, outcome=outcome)], outcome)


async def _refusal(tx: Transaction, claim: Claim, spawn: Spawn) -> CallOutcome | None:
    """Why there can be no such child, by what only the database knows; None if there can."""
    cursor = await tx.execute(
        """
        select r.deadline <= clock_timestamp() as late,
            extract(epoch from r.deadline - clock_timestamp())::float8 as seconds_left,
            a.name, a.max_steps as agent_steps, extract(epoch from a.timeout)::float8 as agent_timeout, a.tools,
            a.models, b.*
        from chaz.runs r left join chaz.agents a on a.name = %(agent)s
            left join chaz.tree_budgets b on b.root_run_id = r.root_run_id
        where r.id = %(run)s
        """,
        {"run": claim.run_id, "agent": safe_text(spawn.agent, MAX_NAME)},
    )
    facts = await cursor.fetchone()
    assert facts is not None
    if facts["late"]:
        return typed_error("past_deadline", "your own deadline has passed")
    if spawn.timeout is not None and spawn.timeout > facts["seconds_left"]:
        return typed_error(
            "past_deadline",
            f"timeout is {spawn.timeout:g} s; you have {facts['seconds_left']:.0f} s left yourself",
        )
    if facts["root_run_id"] is not None and budgets.used_up(facts):
        return typed_error("over_budget", "the budget of this tree of runs is used up")
    if facts["max_steps"] is not None and facts["max_steps"] - facts["steps"] < 2:
        return typed_error(
            "over_budget", "one step is left in the budget of this tree of runs; answer with it yourself"
        )
    # One that nobody has registered yet may be starting: its run waits for it a while, and is held to its limits then.
    return None if facts["name"] is None else _beyond_its_agent(spawn, facts)


def _beyond_its_agent(spawn: Spawn, facts: Row) -> CallOutcome | None:
    agent = spawn.agent
    if spawn.max_steps is not None and spawn.max_steps > facts["agent_steps"]:
        return typed_error(
            "not_allowed", f"max_steps is {spawn.max_steps}; {agent!r} takes {facts['agent_steps']} steps at most"
        )
    if spawn.timeout is not None and spawn.timeout > facts["agent_timeout"]:
        return typed_error(
            "not_allowed", f"timeout is {spawn.timeout:g} s; {agent!r} takes {facts['agent_timeout']:g} s at most"
        )
    if spawn.model is not None and facts["models"] is not None and not matches(spawn.model, facts["models"]):
        allowed = ", ".join(facts["models"])
        return typed_error("not_allowed", f"{agent!r} is not run with the model {spawn.model!r}; it may be: {allowed}")
    if facts["tools"] is not None:
        inherited = spawn.scope[:-1] if spawn.tools is not None else spawn.scope
        its = [tool for tool in facts["tools"] if in_scope(inherited, tool)]
        for glob in spawn.tools or ():
            if not any(matches(tool, [glob]) for tool in its):
                allowed = ", ".join(its) or "none"
                return typed_error("not_allowed", f"{agent!r} may have no tool {glob!r} here; it may have: {allowed}")
    return None


async def _open(tx: Transaction, claim: Claim, spawn: Spawn, session: UUID, child: UUID) -> None:
    """Make the child's session, with what every run in it inherits, and the directive that starts it."""
    await tx.execute(
        """
        with session as (
            insert into chaz.sessions (id, tenant, parent_run_id, root_run_id, depth, depth_left, scope, model,
                max_steps, deadline, detached)
            select %(session)s, tenant, id, root_run_id, depth + 1, %(depth_left)s, %(scope)s, %(model)s,
                %(max_steps)s, least(deadline, clock_timestamp() + %(timeout)s::interval), %(detached)s
            from chaz.runs where id = %(run)s
            returning id, tenant),
        head as (
            insert into chaz.heads (session_id) select id from session)
        insert into chaz.entries (id, tenant, session_id, type, sender, author, recipient, content, run_id)
        select %(child)s, tenant, id, 'directive', %(sender)s, 'agent', %(agent)s, %(instruction)s, %(run)s
        from session
        """,
        {
            "session": session,
            "child": child,
            "run": claim.run_id,
            "sender": claim.agent,
            "agent": safe_text(spawn.agent, MAX_NAME),
            "instruction": safe_text(spawn.instruction),
            "depth_left": spawn.depth_left,
            "scope": Jsonb([[safe_text(glob) for glob in globs] for globs in spawn.scope]) if spawn.scope else None,
            "model": spawn.model and safe_text(spawn.model),
            "max_steps": spawn.max_steps,
            "detached": spawn.detached,
            "timeout": None if spawn.timeout is None else timedelta(seconds=spawn.timeout),
        },
    )


async def _wait(tx: Transaction, claim: Claim, step: int, ordinal: int, child: UUID) -> None:
    await tx.execute(
        """
        insert into chaz.waits (run_id, step, ordinal, kind, child_run_id)
        values (%(run)s, %(step)s, %(ordinal)s, 'child', %(child)s)
        """,
        {"run": claim.run_id, "step": step, "ordinal": ordinal, "child": child},
    )


async def ask_for(tx: Transaction, claim: Claim, *, step: int, ordinal: int, call: ToolCall, child: UUID) -> Asked:
    """The answer of a run that this one spawned, or one of those did; a wait for it while it goes on.

    Waits go down a tree only, so that none is part of a cycle. The head of the child's session is locked first: whoever
    makes or ends the child holds it, so that no end falls between the look and the wait.
    """
    place: dict[str, Any] = {"step": step, "ordinal": ordinal, "call": call}
    await tx.execute(
        """
        select from chaz.heads where session_id = (select session_id from chaz.entries where id = %(child)s) for update
        """,
        {"child": child},
    )
    found = await _descendant(tx, claim, child)
    event = await start_call(tx, claim, **place)
    if found is None:
        outcome = typed_error("unknown_run", f"{child} is no agent that you have spawned, nor one of theirs")
    elif found["state"] in FINAL_STATES:
        ended = {"state": found["state"], "text": found["result"] or "", "reason": found["reason"] or ""}
        outcome = answer_of(found["agent"], RunOutcome.model_validate(ended))
    else:
        await _wait(tx, claim, step, ordinal, child)
        return Asked([event])
    return Asked([event, await finish_call(tx, claim, **place, outcome=outcome)], outcome)


async def _descendant(tx: Transaction, claim: Claim, child: UUID) -> Row | None:
    """The run of this id, if the claimed run is one of its ancestors; without a state while it is not placed."""
    cursor = await tx.execute(
        """
        with recursive up as (
            select e.id, case when e.type = 'directive' and e.author = 'agent' then e.run_id end as parent
            from chaz.entries e where e.id = %(child)s
            union all
            select r.id, r.parent_run_id from up join chaz.runs r on r.id = up.parent
            where up.parent <> %(run)s and r.root_run_id = %(root)s)
        select r.agent, r.state, r.result, r.reason from (select %(child)s::uuid as id) asked
            left join chaz.runs r using (id)
        where exists (select from up where up.parent = %(run)s)
        """,
        {"child": child, "run": claim.run_id, "root": claim.root_run_id},
    )
    return await cursor.fetchone()


async def told(tx: Transaction, claim: Claim, *, step: int, ordinal: int) -> Asked | None:
    """What this attempt has stored of the call already, else None. Raises StaleAttempt, as the write would."""
    await fence(tx, claim)
    row = await call_row(tx, claim, step, ordinal)
    if row is None or row["attempt"] != claim.attempt:
        return None
    if row["state"] != "done":
        return Asked([call_event(row)])
    return Asked([call_event(row), result_event(row)], stored_outcome(row))


def child_id(run_id: UUID, step: int, ordinal: int) -> UUID:
    """The id of the run that a spawning call starts."""
    return derived_id("child", str(run_id), f"{step}.{ordinal}")
