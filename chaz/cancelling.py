"""Cancelling: the request, which anybody makes by one INSERT, and the listener's walk down the tree of a run.

The walk ends one run per transaction, from the top down, so that no parent is woken by the end of its child. A run's
children are listed after its own end has been committed: a spawn locks its own run's row first, so that it is either
seen by then, or refused. Each child gets a cancellation of its own, so a walk that is cut off goes on from the rows.
Whom a child's answer wakes by a mention is a child of the same parent: of a run that is to end with its parent, those
of its session are listed, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, field
from functools import partial
from uuid import UUID

from chaz.aside import Aside
from chaz.completion import close_run
from chaz.database import RETRIED, Database, Row, Transaction
from chaz.deliveries import AuditEvent
from chaz.entries import safe_text
from chaz.errors import DatabaseUnavailable
from chaz.outcomes import FINAL_STATES, RunOutcome, RunState

logger = logging.getLogger("chaz.listener")

_OPEN_STATES: tuple[RunState, ...] = ("pending", "queued", "running", "parked")

MAX_BY = 200
MAX_REASON = 10_000
PASSED_ON_AT_ONCE = 1000
"""Children that one transaction asks for: each takes a place in PostgreSQL's table of locks."""


async def request(tx: Transaction, run_id: UUID, *, by: str | None = None, reason: str = "") -> bool:
    """Ask that a run be ended, with its tree; False if it is over already. Raises UnknownRun.

    ``by`` says who asks; default: the program's user.
    """
    cursor = await tx.execute(
        "select chaz.cancel(%(run)s, %(by)s, %(reason)s) as asked",
        {
            "run": run_id,
            "by": safe_text(by or os.environ.get("USER") or "program", MAX_BY),
            "reason": safe_text(reason, MAX_REASON),
        },
    )
    row = await cursor.fetchone()
    assert row is not None
    return row["asked"]


async def require(tx: Transaction, run_id: UUID, *, by: str, reason: str) -> bool:
    """Ask the same of a run that is known, whatever its state: if it has just ended, of the tree below it.

    False if somebody asks it in a transaction that is still open: a listener waits for nobody.
    """
    cursor = await tx.execute(
        """
        with alone as (select pg_try_advisory_xact_lock(chaz.opening_key(%(run)s::uuid)) as alone),
        asked as (
            insert into chaz.cancellations (run_id, cancelled_by, reason)
            select %(run)s, %(by)s, %(reason)s from alone where alone on conflict do nothing)
        select alone from alone
        """,
        {"run": run_id, "by": by, "reason": reason},
    )
    row = await cursor.fetchone()
    assert row is not None
    return row["alone"]


@dataclass(frozen=True)
class Cancelled:
    """A run that the walk has ended."""

    run_id: UUID
    text: str
    events: list[AuditEvent]
    """To be told to the audit trail."""


@dataclass
class Walked:
    """What one round of the walk did."""

    settled: int = 0
    """Cancellations that are done with: the run is over, and its children are to follow."""
    ended: list[Cancelled] = field(default_factory=list["Cancelled"])


async def walk(database: Database, *, aside: Aside, limit: int = 100) -> Walked:
    """Go on with the open cancellations, oldest first. What fails is put ``aside``; what is locked is left."""
    rows = await database.fetch(
        """
        select * from chaz.cancellations where done_at is null and run_id <> all(%(aside)s::uuid[])
        order by requested_at limit %(limit)s
        """,
        {"aside": aside.ids(), "limit": limit},
    )
    walked = Walked()
    for row in rows:
        try:
            over, ended = await database.transact(partial(_end, cancellation=row))
            if ended is not None:
                walked.ended.append(ended)
            if over and await database.transact(partial(_pass_on, cancellation=row)):
                walked.settled += 1
        except (DatabaseUnavailable, asyncio.CancelledError):
            raise
        except RETRIED as error:
            logger.warning("listener: run=%s cannot be cancelled now (%s); going on", row["run_id"], error)
        except Exception:
            # One bad row never holds up the others.
            pause = aside.put(row["run_id"])
            logger.exception("listener: run=%s cannot be cancelled; set aside for %g s", row["run_id"], pause)
    return walked


async def _end(tx: Transaction, cancellation: Row) -> tuple[bool, Cancelled | None]:
    """End the run; whether it is over now, and what there is to tell."""
    run_id = cancellation["run_id"]
    # In one statement: an entry that is placed between two would seem to have woken nobody.
    cursor = await tx.execute(
        """
        select case when taker.ended_at is null then r.state else taker.state end as state, r.superseded_by,
            own.position is null and own.id is not null as unplaced,
            (theirs.sender, theirs.author) = (own.sender, own.author) as same_sender
        from chaz.cancellations c
            left join chaz.runs r on r.id = c.run_id
            left join chaz.runs taker on taker.id = r.superseded_by
            left join chaz.entries own on own.id = c.run_id
            left join chaz.entries theirs on theirs.session_id = taker.session_id
                and theirs.position = taker.trigger_position and theirs.seq = 0
        where c.run_id = %(run)s
        """,
        {"run": run_id},
    )
    run = await cursor.fetchone()
    if run is None or run["state"] is None:
        # An entry that is not placed yet has its run later. One that woke nobody has nothing to end.
        return run is None or not run["unplaced"], None
    # A superseded one is over with the run that took it.
    if run["state"] in FINAL_STATES:
        return True, None
    states = _OPEN_STATES
    if run["state"] == "superseded":
        # Who asked twice takes both back, and with them the run that answers both. What somebody else said is that
        # run's own matter: then only this message is taken back.
        if run["same_sender"]:
            by, why = cancellation["cancelled_by"], cancellation["reason"]
            return await require(tx, run["superseded_by"], by=by, reason=why), None
        states = ("superseded", *_OPEN_STATES)
    text = _text(cancellation)
    reason = "requested" if cancellation["parent_run_id"] is None else "parent"
    outcome = RunOutcome(state="cancelled", reason=reason, text=text, metadata=_who(cancellation))
    events = await close_run(tx, run_id, outcome, states=states)
    return events is not None, None if events is None else Cancelled(run_id, text, events)


async def _pass_on(tx: Transaction, cancellation: Row) -> bool:
    """Ask the same for the run's children; whether it is done with. A child that is over counts if it had children.

    Not done is what has more children than are asked for at once, or one that somebody is asking for just now.
    """
    cursor = await tx.execute(
        """
        with opened as (
            select id from chaz.sessions where parent_run_id = %(run)s and not detached),
        children as (
            select r.id from chaz.runs r join chaz.sessions s on s.id = r.session_id and not s.detached
            where r.parent_run_id = %(run)s
                and (r.ended_at is null or exists (select from chaz.sessions s where s.parent_run_id = r.id))
            union
            select e.id from opened join chaz.entries e on e.session_id = opened.id
            where e.position is null and e.run_id = %(run)s
            union
            -- Whom its last answer woke, when its parent's children had been listed already.
            select sibling.id from chaz.runs r join chaz.runs sibling using (parent_run_id, session_id)
            where r.id = %(run)s and %(with_parent)s and sibling.id <> r.id
                and (sibling.ended_at is null
                    or exists (select from chaz.sessions s where s.parent_run_id = sibling.id))),
        unasked as (
            select id from children
            where not exists (select from chaz.cancellations c where c.run_id = children.id) limit %(limit)s),
        asked as (
            select id, pg_try_advisory_xact_lock(chaz.opening_key(id)) as alone from unasked),
        passed as (
            insert into chaz.cancellations (run_id, cancelled_by, reason, parent_run_id)
            select id, %(by)s, %(reason)s, %(run)s from asked where alone order by id on conflict do nothing)
        update chaz.cancellations set done_at = clock_timestamp()
        where run_id = %(run)s and (select count(*) < %(limit)s and coalesce(bool_and(alone), true) from asked)
        """,
        {
            "run": cancellation["run_id"],
            "by": cancellation["cancelled_by"],
            "reason": cancellation["reason"],
            "limit": PASSED_ON_AT_ONCE,
            "with_parent": cancellation["parent_run_id"] is not None,
        },
    )
    return cursor.rowcount > 0


def _who(cancellation: Row) -> dict[str, str]:
    """The text's facts, for code that reads the closing entry; ``reason`` is taken there by the run's own, a word."""
    parent = cancellation["parent_run_id"]
    who = {"cancelled_by": cancellation["cancelled_by"], "cancel_reason": cancellation["reason"]}
    return who if parent is None else who | {"parent": str(parent)}


def _text(cancellation: Row) -> str:
    parent = cancellation["parent_run_id"]
    who = f"cancelled by {cancellation['cancelled_by']}"
    along = "" if parent is None else f", with run {parent} that had spawned it"
    return f"{who}{along}: {cancellation['reason']}" if cancellation["reason"] else who + along
