"""What a listener looks for because no doorbell announces it: times that have come, and workers that were lost.

Each sweep takes its rows with SKIP LOCKED or one at a time, so that listeners share the work.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from functools import partial
from uuid import UUID

from chaz import approvals
from chaz.aside import Aside
from chaz.completion import close_run
from chaz.database import Database, Transaction
from chaz.deliveries import AuditEvent
from chaz.errors import DatabaseUnavailable
from chaz.outcomes import RunOutcome, RunState
from chaz.publishing import ANNOUNCED_AHEAD, DUE, ROOM
from chaz.runs import GIVEN_UP, INTERRUPTING

logger = logging.getLogger("chaz.listener")


@dataclass(frozen=True)
class Due:
    """Which kinds of work there are, found by one statement."""

    inbox: bool
    cancel: bool
    scheduled: bool
    schedules: bool
    publish: bool
    interrupting: bool
    lost: bool
    late: bool
    overdue: bool
    untold: bool
    callbacks: bool
    behind: bool
    """Somebody's runs wait for others of theirs to be claimed, which rings no bell. No work in itself."""
    next_schedule: float | None
    """Seconds until a schedule is due, of those that are not yet."""

    def __bool__(self) -> bool:
        return any(astuple(replace(self, behind=False, next_schedule=None)))


async def due(database: Database, *, lease: float = 0.0) -> Due:
    """Look for work of every kind. A server younger than a ``lease`` (in seconds) has let nobody renew one yet."""
    (row,) = await database.fetch(
        f"""
        with recursive {ROOM}
        select
            exists (select from chaz.entries where position is null) as inbox,
            exists (select from chaz.cancellations where done_at is null) as cancel,
            exists (select from chaz.runs r join chaz.heads h on h.session_id = r.session_id and h.active_run is null
                where r.state = 'pending' and r.not_before <= now()) as scheduled,
            exists (select from chaz.schedules where next_at <= now()) as schedules,
            (select extract(epoch from min(next_at) - now())::float8 from chaz.schedules where next_at > now())
                as next_schedule,
            exists (select from room cross join lateral ({DUE} limit 1) due
                where room.ahead > 0 and (room.under_cap is null or room.under_cap > 0)) as publish,
            exists (select from room where room.ahead <= 0) as behind,
            exists (select from chaz.runs p join chaz.runs r on r.id = p.interrupts
                where {INTERRUPTING} and r.state in ('queued', 'running', 'parked')) as interrupting,
            exists (select from chaz.workers w join chaz.runs r on r.worker_id = w.id and r.state = 'running'
                where w.expires_at < now())
            and pg_postmaster_start_time() < now() - %(lease)s as lost,
            exists (select from chaz.runs
                where state in ('pending', 'queued', 'running', 'parked') and deadline < now())
            or exists (select from chaz.runs
                where state in ('pending', 'queued') and expires_at is not null and expires_at < now())
            or exists (select from chaz.runs r
                where r.state = 'queued' and (
                    {GIVEN_UP} or not exists (select from chaz.agents a where a.name = r.agent))) as late,
            exists (select from chaz.approvals where decision is null and expires_at <= now()) as overdue,
            exists (select from chaz.runs where audit_after <= now()) as untold,
            exists (select from chaz.callbacks where due_at <= now() and given_up_at is null) as callbacks
        """,
        {"lease": timedelta(seconds=lease), "ahead": ANNOUNCED_AHEAD},
    )
    return Due(**row)


async def queue_scheduled(database: Database, *, limit: int = 100) -> int:
    """Queue the runs whose time has come in sessions that are free; how many sessions there were."""

    async def work(tx: Transaction) -> int:
        heads = await tx.execute(
            """
            select h.session_id from chaz.heads h
            where h.active_run is null and h.session_id in (
                select session_id from chaz.runs where state = 'pending' and not_before <= now())
            order by h.session_id limit %(limit)s for update skip locked
            """,
            {"limit": limit},
        )
        sessions = [row["session_id"] for row in await heads.fetchall()]
        await tx.execute(
            """
            with next as (
                select distinct on (session_id) session_id, id from chaz.runs
                where session_id = any(%(sessions)s) and state = 'pending'
                    and (not_before is null or not_before <= now())
                order by session_id, priority desc, trigger_position),
            queued as (
                update chaz.runs r set state = 'queued', queued_at = clock_timestamp(),
                    publish_after = clock_timestamp()
                from next where r.id = next.id)
            update chaz.heads h set active_run = next.id from next where h.session_id = next.session_id
            """,
            {"sessions": sessions},
        )
        return len(sessions)

    return await database.transact(work)


async def rescue_lost(database: Database, *, limit: int = 100) -> list[tuple[UUID, UUID]]:
    """Send the runs of expired leases back to ``queued``; run and worker of each.

    One whose workers keep dying under it is then ended by :func:`close_late`.
    """

    async def work(tx: Transaction) -> list[tuple[UUID, UUID]]:
        cursor = await tx.execute(
            """
            with lost as (
                select r.id, r.worker_id, w.isolation from chaz.runs r join chaz.workers w on w.id = r.worker_id
                where r.state = 'running' and w.expires_at < now()
                order by r.id limit %(limit)s for update of r skip locked)
            update chaz.runs r set state = 'queued', crashes = crashes + 1, worker_id = null, claim = null,
                lost_alone = suspect and lost.isolation,
                suspect = suspect or exists (
                    select from chaz.calls c left join chaz.waits w using (run_id, step, ordinal)
                    where c.run_id = r.id and c.attempt = r.attempt and c.state = 'started' and w.run_id is null),
                queued_at = clock_timestamp(), publishes = 0, publish_after = clock_timestamp(),
                waits_for = 'its worker was lost'
            from lost where r.id = lost.id returning r.id, lost.worker_id
            """,
            {"limit": limit},
        )
        return [(row["id"], row["worker_id"]) for row in await cursor.fetchall()]

    return await database.transact(work)


async def close_late(
    database: Database, *, grace: float, lease: float, aside: Aside, limit: int = 100
) -> list[tuple[UUID, str, list[AuditEvent]]]:
    """End the runs whose time is over; id, reason and the events to tell of each. What cannot be is put ``aside``.

    A running one is its worker's to end; it is ended from here a lease later, if the worker has not.
    """
    rows = await database.fetch(
        f"""
        select r.id, r.agent, r.state,
            case
                when r.state = 'queued' and {GIVEN_UP} then 'crashes'
                when r.deadline < now() then 'deadline'
                when r.expires_at < now() and r.state in ('pending', 'queued') then 'expired'
                else 'unknown-agent'
            end as reason
        from chaz.runs r
        where r.state in ('pending', 'queued', 'running', 'parked') and r.id <> all(%(aside)s::uuid[]) and (
            r.deadline < now() - case when r.state = 'running' then %(lease)s else interval '0' end
            or (r.expires_at < now() and r.state in ('pending', 'queued') and r.started_at is null)
            or (r.state = 'queued' and {GIVEN_UP})
            or (r.state = 'queued' and r.queued_at < now() - %(grace)s
                and not exists (select from chaz.agents a where a.name = r.agent)))
        order by r.deadline limit %(limit)s
        """,
        {
            "grace": timedelta(seconds=grace),
            "lease": timedelta(seconds=lease),
            "aside": aside.ids(),
            "limit": limit,
        },
    )
    closed: list[tuple[UUID, str, list[AuditEvent]]] = []
    for row in rows:
        reason = row["reason"]
        outcome = RunOutcome(state="failed", reason=reason, text=_text(reason, row["agent"]))
        states = _CLOSED_IN[reason] if row["state"] != "running" else ("running",)

        async def work(
            tx: Transaction,
            id: UUID = row["id"],
            outcome: RunOutcome = outcome,
            states: tuple[RunState, ...] = states,
            agent: str = row["agent"],
        ) -> list[AuditEvent] | None:
            if outcome.reason == "unknown-agent" and await _is_registered(tx, agent):
                return None
            events = await close_run(tx, id, outcome, states=states)
            if events is not None and outcome.reason == "unknown-agent":
                # Nobody ever was this agent: it must not stay the session's lead, unless somebody attached it by name.
                await tx.execute(
                    """
                    insert into chaz.roster_changes (session_id, agent, change, run_id)
                    select session_id, agent, 'detach', %(run)s from chaz.attachments
                    where agent = %(agent)s and by_run
                        and session_id = (select session_id from chaz.runs where id = %(run)s)
                    """,
                    {"agent": agent, "run": id},
                )
            return events

        try:
            events = await database.transact(work)
        except (DatabaseUnavailable, asyncio.CancelledError):
            raise
        except Exception:
            # One bad row never holds up the others.
            pause = aside.put(row["id"])
            logger.exception("listener: run=%s cannot be closed (%s); set aside for %g s", row["id"], reason, pause)
            continue
        if events is not None:
            closed.append((row["id"], reason, events))
    return closed


async def time_out_requests(database: Database, *, aside: Aside) -> list[UUID]:
    """Close the requests to people whose time is over; which they were. What cannot be is put ``aside``."""
    closed: list[UUID] = []
    for id in await database.transact(partial(approvals.overdue, without=aside.ids())):
        try:
            if await database.transact(partial(approvals.time_out, id=id)):
                closed.append(id)
        except (DatabaseUnavailable, asyncio.CancelledError):
            raise
        except Exception:
            # One bad row never holds up the others.
            pause = aside.put(id)
            logger.exception("listener: request=%s cannot be closed; set aside for %g s", id, pause)
    return closed


async def _is_registered(tx: Transaction, agent: str) -> bool:
    cursor = await tx.execute("select from chaz.agents where name = %(agent)s", {"agent": agent})
    return await cursor.fetchone() is not None


# A run may have moved since it was listed: a pending one is queued by the end of the one before it.
_CLOSED_IN: dict[str, tuple[RunState, ...]] = {
    "crashes": ("queued",),
    "deadline": ("pending", "queued", "parked"),
    "expired": ("pending", "queued"),
    "unknown-agent": ("queued",),
}


async def forget_processes(database: Database) -> None:
    """Remove the rows of processes that have been gone for a day."""

    async def work(tx: Transaction) -> None:
        await tx.execute(
            """
            with listeners as (delete from chaz.listeners where seen_at < now() - interval '1 day'),
            waiters as (delete from chaz.waiters where expires_at < now() - interval '1 day')
            delete from chaz.workers w where expires_at < now() - interval '1 day'
                and not exists (select from chaz.runs r where r.worker_id = w.id and r.state = 'running')
            """
        )

    await database.transact(work)


def _text(reason: str, agent: str) -> str:
    match reason:
        case "crashes":
            return "given up: too many workers were lost while they ran it"
        case "deadline":
            return "its deadline has passed"
        case "expired":
            return "it was not started before it expired"
        case _:
            return (
                f"no worker has registered an agent {agent!r}; start one with CHAZ_AGENTS naming a module that has it"
            )
