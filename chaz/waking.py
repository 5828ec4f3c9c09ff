"""The making of a run: what it has of its entry, of its session, and of its agent. Whoever makes one holds the head."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, LiteralString
from uuid import UUID

from psycopg.types.json import Jsonb

from chaz.database import Row, Transaction
from chaz.entries import Budget
from chaz.runs import DEFAULT_TIMEOUT

INHERITED: LiteralString = """
    s.parent_run_id, s.root_run_id, s.depth, s.depth_left, s.scope, s.model, s.max_steps, s.deadline
"""
"""What ``chaz.sessions s`` hands on to every run in it."""


def new_run(
    session: Row, entry: Row, agent: str, *, timeout: timedelta | None, parent: UUID | None = None
) -> dict[str, Any]:
    """A pending run of ``agent`` for a placed entry, in a session with what it hands on; ``timeout`` is its agent's.

    ``parent`` is the run that it is to end with.
    """
    return {
        "id": entry["id"],
        "tenant": entry["tenant"],
        "session": entry["session_id"],
        "agent": agent,
        "state": "pending",
        "cause": "compaction" if entry["type"] == "compaction_request" else entry["type"],
        "position": entry["position"],
        "parent": parent,
        "root": session["root_run_id"] or entry["id"],
        "depth": session["depth"],
        "depth_left": session["depth_left"],
        "model": session["model"],
        "max_steps": session["max_steps"],
        "budget": Budget(),
        "scope": None if session["scope"] is None else Jsonb(session["scope"]),
        "timeout": timeout or DEFAULT_TIMEOUT,
        "latest": session["deadline"],
        "not_before": None,
        "expires": None,
        "priority": 0,
        "interrupts": None,
        "publishes": 0,
        "result": None,
        "reason": None,
        "ended": False,
        "first_wait": 0.0,
    }


async def insert_runs(tx: Transaction, runs: Sequence[dict[str, Any]]) -> None:
    """Write runs made by :func:`new_run`; a tree's root with what the tree may use."""
    async with tx.cursor() as cursor:
        await cursor.executemany(_INSERT_RUN, runs)
        await cursor.executemany(
            """
            insert into chaz.tree_budgets (root_run_id, max_steps, max_tokens, max_cost)
            values (%(root)s, %(steps)s, %(tokens)s, %(cost)s) on conflict do nothing
            """,
            [{"root": run["root"], **run["budget"].model_dump()} for run in runs if run["root"] == run["id"]],
        )


_INSERT_RUN = """
    insert into chaz.runs (id, tenant, session_id, agent, state, cause, trigger_position, interrupts, priority,
        parent_run_id, root_run_id, depth, depth_left, scope, model, max_steps, not_before, expires_at, deadline,
        publishes, publish_after, result, reason, queued_at, ended_at)
    values (%(id)s, %(tenant)s, %(session)s, %(agent)s, %(state)s, %(cause)s, %(position)s,
        %(interrupts)s, %(priority)s, %(parent)s, %(root)s, %(depth)s, %(depth_left)s, %(scope)s, %(model)s,
        %(max_steps)s, %(not_before)s, %(expires)s,
        least(greatest(%(not_before)s::timestamptz, clock_timestamp()) + %(timeout)s, %(latest)s::timestamptz),
        %(publishes)s,
        case when %(publishes)s > 0 then clock_timestamp() + %(first_wait)s * interval '1 second'
            else greatest(%(not_before)s::timestamptz, clock_timestamp()) end,
        %(result)s, %(reason)s,
        case when %(state)s = 'queued' then clock_timestamp() end, case when %(ended)s then clock_timestamp() end)
"""
