"""Firing: a listener takes a schedule whose slot is due, makes its run, and says when the next one is.

All of it is one transaction, and the row of the firing, unique for schedule and slot, lets it happen once. It waits for
nobody: the head of the session that a schedule is pinned to is taken if it is free, then the schedule's row if nobody
has it; else it is left for the next round. Under the head it is decided whether the session is in conversation.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from chaz import schedules, sessionlog
from chaz.aside import Aside
from chaz.database import RETRIED, Database, Row, Transaction
from chaz.entries import derived_id, session_id
from chaz.errors import DatabaseUnavailable, UnknownSchedule
from chaz.runs import DEFAULT_TIMEOUT
from chaz.triggers import due_at, judge

logger = logging.getLogger("chaz.listener")

ROUND = 0.2
"""Seconds that a round fires for, while messages wait to be placed."""


@dataclass(frozen=True)
class Fired:
    """What came of a schedule's slot: a run, or the word and the text of why there is none."""

    agent: str
    id: str
    slot: datetime
    run_id: UUID | None = None
    skipped: str | None = None
    detail: str = ""


def run_id_of(schedule: UUID, slot: datetime) -> UUID:
    """The id of the run of a schedule's slot."""
    micros = (slot - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    return derived_id("firing", str(schedule), str(micros))


def session_name(agent: str, id: str, slot: datetime) -> str:
    """The name of the session that a firing opens."""
    return f"schedule/{agent}/{id}/{slot.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%f}Z"


async def fire_due(
    database: Database, *, grace: float, aside: Aside, limit: int = 100, within: float = ROUND
) -> tuple[list[Fired], bool]:
    """Fire what is due, each in a transaction of its own. What cannot be is put ``aside``, and holds up nothing else.

    What came of it, and whether some was left: because somebody held what it takes, or because this has gone on for
    ``within`` seconds. A slot that is more than ``grace`` seconds late is missed.
    """
    until = time.monotonic() + within
    rows = list(
        await database.fetch(
            """
            select key, session_id from chaz.schedules where next_at <= now() and key <> all(%(aside)s::uuid[])
            order by next_at limit %(limit)s
            """,
            {"aside": aside.ids(), "limit": limit},
        )
    )
    # So that several listeners do not try them one after the other in step.
    random.shuffle(rows)
    fired: list[Fired] = []
    left = False
    for row in rows:
        fire = partial(_fire, key=row["key"], pinned=row["session_id"], grace=timedelta(seconds=grace))
        try:
            found = await database.transact(fire)
        except (DatabaseUnavailable, asyncio.CancelledError):
            raise
        except RETRIED as error:
            logger.warning("listener: schedule %s cannot fire now (%s); going on", row["key"], error)
            found = None
        except Exception:
            # One bad row never holds up the others.
            pause = aside.put(row["key"])
            logger.exception("listener: schedule %s cannot fire; set aside for %g s", row["key"], pause)
            continue
        left |= found is None
        fired += found or []
        if time.monotonic() > until:
            return fired, True
    return fired, left


async def _fire(tx: Transaction, *, key: UUID, pinned: UUID | None, grace: timedelta) -> list[Fired] | None:
    """What came of the slots that were due, if any still are; None if somebody has what it takes."""
    if pinned is not None and await _has_head(tx, pinned) and not await sessionlog.lock_free_head(tx, pinned):
        return None
    cursor = await tx.execute(
        "select *, clock_timestamp() as now from chaz.schedules where key = %(key)s for update skip locked",
        {"key": key},
    )
    row = await cursor.fetchone()
    if row is None:
        # Another listener fires it, or somebody changes it.
        return []
    if row["session_id"] != pinned:
        return None
    if row["next_at"] is None or row["next_at"] > row["now"]:
        return []
    schedule = schedules.of_row(row)
    due = judge(
        schedule.trigger_from(row["anchor"]),
        key,
        row["next_slot"],
        row["now"],
        jitter=schedule.spread,
        grace=grace,
        catch_up=schedule.catch_up == "once",
        expires_at=schedule.expires_at,
    )
    fired: list[Fired] = []
    if due.missed is not None:
        detail = "no listener fired it in time"
        if due.fires is not None:
            detail += f"; the slot {due.fires.isoformat()} was next"
        fired += await _record(tx, row, due.missed, skipped="missed", detail=detail)
    if due.fires is not None:
        fired += await _make(tx, row, due.fires)
    count = row["fire_count"] + sum(one.run_id is not None for one in fired)
    reason = schedules.why_over(schedule, due.next, count)
    slot = due.next if reason is None else None
    await tx.execute(
        """
        update chaz.schedules set next_slot = %(slot)s, next_at = %(next)s, fire_count = %(count)s, reason = %(reason)s
        where key = %(key)s
        """,
        {
            "key": key,
            "slot": slot,
            "next": None if slot is None else due_at(key, slot, schedule.spread, schedule.expires_at),
            "count": count,
            "reason": reason,
        },
    )
    return fired


async def fire_now(tx: Transaction, agent: str, id: str, *, tenant: str, by: str) -> Fired | None:
    """Fire a schedule because somebody says so, whatever its trigger says, and leave its times and counts as they are.

    None: somebody has just pinned it elsewhere, and it has to be tried again. Raises UnknownSchedule.
    """
    key = schedules.key_of(tenant, agent, id)
    cursor = await tx.execute(
        "select session_id from chaz.schedules where key = %(key)s and retired_at is null", {"key": key}
    )
    found = await cursor.fetchone()
    if found is None:
        raise UnknownSchedule(agent, id)
    pinned = found["session_id"]
    if pinned is not None and await _has_head(tx, pinned):
        await sessionlog.lock_head(tx, pinned)
    cursor = await tx.execute(
        """
        select *, clock_timestamp() as now from chaz.schedules where key = %(key)s and retired_at is null for update
        """,
        {"key": key},
    )
    row = await cursor.fetchone()
    if row is None:
        raise UnknownSchedule(agent, id)
    if row["session_id"] != pinned:
        # Heads are locked first, and this has not that of the new one.
        return None
    (fired,) = await _make(tx, row, row["now"], by=by)
    return fired


async def _has_head(tx: Transaction, session: UUID) -> bool:
    """Whether the session is there. One in which nothing was ever placed gets its head now."""
    cursor = await tx.execute(
        """
        with made as (
            insert into chaz.heads (session_id) select s.id from chaz.sessions s where s.id = %(session)s
                and not exists (select from chaz.heads h where h.session_id = s.id)
            on conflict do nothing)
        select from chaz.sessions where id = %(session)s
        """,
        {"session": session},
    )
    return await cursor.fetchone() is not None


async def _make(tx: Transaction, row: Row, slot: datetime, *, by: str | None = None) -> list[Fired]:
    """Make the run of a slot, unless something is in its way; nothing if the slot has fired already."""
    why = await _in_its_way(tx, row)
    if why is not None:
        return await _record(tx, row, slot, skipped=why[0], detail=why[1], by=by)
    run = run_id_of(row["key"], slot)
    session = row["session_id"]
    if session is None:
        name = session_name(row["agent"], row["id"], slot)
        session = session_id(name, row["tenant"])
        if not await _open(tx, row, session, name, run):
            return await _record(tx, row, slot, skipped="session", detail=f"there is a session {name!r} already", by=by)
    fired = await _record(tx, row, slot, run=run, session=session, by=by)
    if not fired:
        return []
    await tx.execute(
        """
        with made as (
            insert into chaz.runs (id, tenant, session_id, agent, state, cause, prompt, root_run_id, depth, depth_left,
                scope, model, max_steps, deadline, queued_at)
            select %(run)s, s.tenant, s.id, %(agent)s, 'queued', 'schedule', %(prompt)s,
                coalesce(s.root_run_id, %(run)s), s.depth, s.depth_left, s.scope, s.model, s.max_steps,
                least(clock_timestamp() + coalesce(a.timeout, %(timeout)s), s.deadline), clock_timestamp()
            from chaz.sessions s left join chaz.agents a on a.name = %(agent)s where s.id = %(session)s
            returning id, session_id, root_run_id),
        limits as (
            insert into chaz.tree_budgets (root_run_id) select id from made where id = root_run_id)
        update chaz.heads h set active_run = made.id from made where h.session_id = made.session_id
        """,
        {
            "run": run,
            "agent": row["agent"],
            "prompt": row["prompt"],
            "session": session,
            "timeout": DEFAULT_TIMEOUT,
        },
    )
    return fired


async def _in_its_way(tx: Transaction, row: Row) -> tuple[str, str] | None:
    """Why a slot gets no run, in a word and in a text. The head of the session that it is pinned to is held."""
    cursor = await tx.execute(
        """
        select
            exists (select from chaz.pauses where kind = 'all' or (kind = 'agent' and name = %(agent)s)
                or (kind = 'session' and name = %(session)s::uuid::text)) as paused,
            s.id is not null and h.session_id is not null and s.tenant = %(tenant)s as there, h.active_run,
            s.deadline <= clock_timestamp() as late,
            exists (select from chaz.attachments a where a.session_id = s.id and a.agent = %(agent)s) as attached,
            exists (select from chaz.entries e where e.session_id = s.id and e.position is null)
            or exists (select from chaz.runs r where r.session_id = s.id and r.state = 'pending'
                and (r.not_before is null or r.not_before <= clock_timestamp())) as spoken_to
        from (select %(session)s::uuid as pinned) asked left join chaz.sessions s on s.id = pinned
            left join chaz.heads h on h.session_id = s.id
        """,
        {"agent": row["agent"], "session": row["session_id"], "tenant": row["tenant"]},
    )
    facts = await cursor.fetchone()
    assert facts is not None
    if facts["paused"]:
        return "paused", "its agent, its session or everything is paused"
    if row["session_id"] is None:
        return None
    if not facts["there"]:
        return "no-session", f"its session {row['session_id']} is gone"
    if not facts["attached"]:
        return "detached", "its agent is no longer attached to its session"
    if facts["late"]:
        return "no-session", "the time of its session is over"
    if facts["active_run"] is not None:
        return "busy", f"its session was busy with run {facts['active_run']}"
    return ("busy", "its session was about to answer what had been sent to it") if facts["spoken_to"] else None


async def _open(tx: Transaction, row: Row, session: UUID, name: str, run: UUID) -> bool:
    """Make the session of a firing, with its agent; False if it is there."""
    cursor = await tx.execute(
        """
        with alone as (select pg_try_advisory_xact_lock(chaz.opening_key(%(session)s)) as alone),
        opened as (
            insert into chaz.sessions (id, tenant, name, schedule)
            select %(session)s, %(tenant)s, %(name)s, %(key)s from alone where alone on conflict do nothing
            returning id),
        head as (
            insert into chaz.heads (session_id) select id from opened)
        insert into chaz.roster_changes (session_id, agent, change, run_id)
        select id, %(agent)s, 'attach', %(run)s from opened
        """,
        {
            "session": session,
            "tenant": row["tenant"],
            "name": name,
            "key": row["key"],
            "agent": row["agent"],
            "run": run,
        },
    )
    return cursor.rowcount > 0


async def _record(
    tx: Transaction,
    row: Row,
    slot: datetime,
    *,
    run: UUID | None = None,
    session: UUID | None = None,
    skipped: str | None = None,
    detail: str = "",
    by: str | None = None,
) -> list[Fired]:
    """Write a line of the schedule's history; nothing if the slot has one."""
    facts: dict[str, Any] = {"run": run, "session": session or row["session_id"], "skipped": skipped, "detail": detail}
    cursor = await tx.execute(
        """
        insert into chaz.firings (schedule, slot, run_id, session_id, skipped, detail, fired_by)
        values (%(key)s, %(slot)s, %(run)s, %(session)s, %(skipped)s, %(detail)s, %(by)s) on conflict do nothing
        """,
        facts | {"key": row["key"], "slot": slot, "by": by},
    )
    return [Fired(row["agent"], row["id"], slot, run, skipped, detail)] if cursor.rowcount else []
