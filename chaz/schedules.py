"""The store of schedules: added, changed, retired, declared by agents' definitions, and what came of their firings.

Whoever changes a schedule locks its row, so that a change holds for each firing after its commit, in every listener.
A schedule has a next time, or a reason why it has none. What is retired stays as a row, so that its history does, and
so that the same slot never fires again under the same id.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, LiteralString
from uuid import UUID

from chaz import usage
from chaz.database import Database, Row, Transaction
from chaz.entries import derived_id, safe_text, session_id
from chaz.errors import InvalidSchedule, UnknownAgent, UnknownSchedule, UnknownSession
from chaz.outcomes import RunOutcome
from chaz.planning import Ceilings, Schedule, ScheduleChanges, changed
from chaz.triggers import due_at

CODE = "its definition"
"""Who changes what an agent's definition declares."""
DISABLED = "disabled by {}"


def key_of(tenant: str, agent: str, id: str) -> UUID:
    """The key of an agent's schedule of this id."""
    return derived_id("schedule", tenant, f"{agent}/{id}")


def of_row(row: Row) -> Schedule:
    """The schedule that a row holds. Raises InvalidSchedule, where this machine does not know its time zone."""
    return changed(_fields(row), {})


def _fields(row: Row) -> dict[str, Any]:
    return {name: row[name] for name in ("id", *ScheduleChanges.__annotations__) if name != "session"} | {
        "session": row["session_id"]
    }


async def add(
    tx: Transaction, agent: str, schedule: Schedule, *, tenant: str, by: str, ceilings: Ceilings, own: bool = False
) -> Row:
    """Add a schedule to an agent's; its row. One that was retired is there anew, with its history.

    ``own``: by the agent itself, which brings back nothing that others have retired. Raises InvalidSchedule,
    UnknownAgent, UnknownSession.
    """
    ceilings.check(schedule)
    await _count(tx, tenant, agent, ceilings)
    now = await _now(tx)
    if schedule.at is not None and schedule.at <= now:
        raise InvalidSchedule("at", f"{schedule.at.isoformat()} has passed; it is {now.isoformat()}")
    await _may_be_pinned(tx, agent, schedule, tenant)
    found = await _locked(tx, tenant, agent, schedule.id)
    if found is not None and found["retired_at"] is None:
        raise InvalidSchedule("id", f"agent {agent!r} has a schedule {schedule.id!r} already; modify or remove it")
    if found is not None and own and found["retired_by"] not in {by, CODE}:
        raise InvalidSchedule("id", f"{schedule.id!r} was removed by {found['retired_by']}; take another id")
    return await _write(tx, tenant, agent, schedule, now, by=by)


async def modify(
    tx: Transaction,
    agent: str,
    id: str,
    changes: Mapping[str, Any],
    *,
    tenant: str,
    by: str,
    ceilings: Ceilings,
    own: bool = False,
) -> Row:
    """Change a schedule; its row. From now on: no slot of before is made up for. Enabled, it forgets its failures.

    ``own``: by the agent itself, which enables nothing that others have disabled. Raises UnknownSchedule,
    InvalidSchedule, UnknownSession.
    """
    row = await _locked(tx, tenant, agent, id)
    if row is None or row["retired_at"] is not None:
        raise UnknownSchedule(agent, id)
    if own and changes.get("enabled") and not row["enabled"] and _by_others(row["reason"], by):
        raise InvalidSchedule("enabled", f"it was {row['reason']}, who may enable it again")
    schedule = changed(_fields(row), changes)
    ceilings.check(schedule)
    if schedule.session != row["session_id"]:
        await _may_be_pinned(tx, agent, schedule, tenant)
    now = await _now(tx)
    if changes.get("at") is not None and schedule.at is not None and schedule.at <= now:
        raise InvalidSchedule("at", f"{schedule.at.isoformat()} has passed; it is {now.isoformat()}")
    # What others have disabled stays theirs, though the agent disables it too.
    said = changes.keys() - ({"enabled"} if own else set())
    return await _write(tx, tenant, agent, schedule, now, by=by, row=row, said=said)


def _by_others(reason: str, by: str) -> bool:
    return reason.startswith(DISABLED.format("")) and reason != DISABLED.format(by)


async def remove(tx: Transaction, agent: str, id: str, *, tenant: str, by: str) -> Row:
    """Retire a schedule; its row. What it has started goes on. Raises UnknownSchedule."""
    cursor = await tx.execute(
        """
        update chaz.schedules set retired_at = clock_timestamp(), retired_by = %(by)s, next_slot = null,
            next_at = null, reason = 'removed by ' || %(by)s, changed_at = clock_timestamp(), changed_by = %(by)s
        where key = %(key)s and retired_at is null returning *
        """,
        {"key": key_of(tenant, agent, id), "by": by},
    )
    row = await cursor.fetchone()
    if row is None:
        raise UnknownSchedule(agent, id)
    return row


async def declare(
    tx: Transaction, agent: str, schedules: Sequence[Schedule], *, tenant: str, ceilings: Ceilings
) -> None:
    """Bring an agent's schedules in line with its definition. The same again changes nothing.

    What the definition has changed is changed, from now on; what it no longer has is retired, and comes back with it.
    What somebody else disabled or retired stays so. Raises InvalidSchedule.
    """
    # By itself: no worker must be unable to start for what others have added.
    ceilings.check_count(agent, len(schedules))
    await _lock_all(tx, tenant, agent)
    now = await _now(tx)
    found = {row["id"]: row for row in await _of_agent(tx, tenant, agent, "for update")}
    for schedule in schedules:
        row = found.get(schedule.id)
        if row is not None and row["retired_by"] not in {None, CODE}:
            continue
        if row is not None and row["retired_at"] is None and row["declared"] == schedule.plain():
            continue
        try:
            ceilings.check(schedule)
        except InvalidSchedule as error:
            raise InvalidSchedule(
                f"schedule {schedule.id!r} of agent {agent!r}: {error.args[0]}", error.args[1]
            ) from None
        before: dict[str, Any] = {} if row is None or row["declared"] is None else row["declared"]
        wanted = schedule.changed({"enabled": _enabled(schedule, row, before)})
        said = {name for name, value in schedule.plain().items() if before.get(name) != value} - {"enabled"}
        await _write(tx, tenant, agent, wanted, now, by=CODE, row=row, said=said, declared=schedule)
    kept = {schedule.id for schedule in schedules}
    for id, row in found.items():
        if row["declared"] is not None and row["retired_at"] is None and id not in kept:
            await remove(tx, agent, id, tenant=tenant, by=CODE)


def _enabled(schedule: Schedule, row: Row | None, before: Mapping[str, Any]) -> bool:
    """Whether a declared schedule is enabled: as the definition has it, but for what others have said since."""
    if row is None:
        return schedule.enabled
    if row["enabled"]:
        return schedule.enabled or not before.get("enabled", True)
    return schedule.enabled and row["reason"] == DISABLED.format(CODE)


async def settle(tx: Transaction, run: Row, outcome: RunOutcome) -> None:
    """Count what a schedule's run came to; too many failures in a row disable it.

    One that was cancelled, or fired by hand, counts as neither.
    """
    if run["cause"] != "schedule" or outcome.state == "cancelled":
        return
    await tx.execute(
        """
        with counted as (
            select s.key, case when %(failed)s then s.failures + 1 else 0 end as failures,
                %(failed)s and s.failures + 1 >= s.max_failures and s.enabled and s.retired_at is null as too_many
            from chaz.firings f join chaz.schedules s on s.key = f.schedule
            where f.run_id = %(run)s and f.fired_by is null for update of s)
        update chaz.schedules s set failures = c.failures,
            enabled = s.enabled and not coalesce(c.too_many, false),
            next_slot = case when c.too_many then null else s.next_slot end,
            next_at = case when c.too_many then null else s.next_at end,
            reason = case when c.too_many
                then format('disabled: %%s failed in a row; the last: %%s', c.failures, %(why)s::text)
                else s.reason end
        from counted c where s.key = c.key and (%(failed)s or s.failures > 0)
        """,
        {
            "run": run["id"],
            "failed": outcome.state == "failed",
            "why": safe_text(f"{outcome.reason}: {outcome.text}", 1000),
        },
    )


_SHOWN = """
    s.agent, s.id, s.prompt, s.cron, s.time_zone, extract(epoch from s.every)::float8 as every, s.at,
    s.session_id, p.name as session, s.enabled, s.expires_at, s.max_fires, s.fire_count, s.max_failures, s.failures,
    extract(epoch from s.jitter)::float8 as jitter, s.catch_up, s.declared is not null as declared, s.next_at, s.reason,
    s.retired_at, s.retired_by, s.created_at, s.created_by, s.changed_at, s.changed_by
"""


async def listed(
    database: Database, *, tenant: str, agent: str | None = None, retired: bool = False
) -> list[dict[str, Any]]:
    """Schedules of all agents or one, by agent and id, the ``retired`` ones too if so asked; times in seconds."""
    return await database.fetch(
        f"""
        select {_SHOWN} from chaz.schedules s left join chaz.sessions p on p.id = s.session_id
        where s.tenant = %(tenant)s and (%(agent)s::text is null or s.agent = %(agent)s)
            and (%(retired)s or s.retired_at is null)
        order by s.agent, s.id
        """,
        {"tenant": tenant, "agent": agent, "retired": retired},
    )


async def shown(tx: Transaction, tenant: str, agent: str, id: str) -> dict[str, Any]:
    """One of them, as :func:`listed` has it. Raises UnknownSchedule."""
    cursor = await tx.execute(
        f"""
        select {_SHOWN} from chaz.schedules s left join chaz.sessions p on p.id = s.session_id where s.key = %(key)s
        """,
        {"key": key_of(tenant, agent, id)},
    )
    row = await cursor.fetchone()
    if row is None:
        raise UnknownSchedule(agent, id)
    return row


async def history(database: Database, agent: str, id: str, *, tenant: str, limit: int = 50) -> list[dict[str, Any]]:
    """What came of a schedule's slots, the latest first. Raises UnknownSchedule.

    Of each: ``slot``, ``fired_at``, ``fired_by``; ``skipped`` (a word) and ``detail``, if there is no run; else
    ``run_id``, ``session_id`` with ``session``, its name, and the run's ``state``, ``reason``, ``started_at``,
    ``ended_at`` and ``usage``, which has the fields of a :class:`chaz.outcomes.Spent`.
    """
    key = key_of(tenant, agent, id)
    rows = await database.fetch(
        """
        select f.slot, f.fired_at, f.fired_by, f.skipped, f.detail, f.run_id, f.session_id, p.name as session, r.state,
            r.reason, r.started_at, r.ended_at
        from chaz.firings f left join chaz.runs r on r.id = f.run_id left join chaz.sessions p on p.id = f.session_id
        where f.schedule = %(key)s order by f.slot desc limit %(limit)s
        """,
        {"key": key, "limit": limit},
    )
    if not rows and not await database.fetch("select from chaz.schedules where key = %(key)s", {"key": key}):
        raise UnknownSchedule(agent, id)
    spent = await usage.of_runs(database, [row["run_id"] for row in rows if row["run_id"] is not None])
    used = {run: each.model_dump(mode="json") for run, each in spent.items()}
    return [row | {"usage": used.get(row["run_id"])} for row in rows]


async def of_own(tx: Transaction, tenant: str, agent: str) -> list[dict[str, Any]]:
    """What an agent's tool lists, within its transaction."""
    cursor = await tx.execute(
        f"""
        select {_SHOWN} from chaz.schedules s left join chaz.sessions p on p.id = s.session_id
        where s.tenant = %(tenant)s and s.agent = %(agent)s and s.retired_at is null order by s.id
        """,
        {"tenant": tenant, "agent": agent},
    )
    return await cursor.fetchall()


async def _write(
    tx: Transaction,
    tenant: str,
    agent: str,
    schedule: Schedule,
    now: datetime,
    *,
    by: str,
    row: Row | None = None,
    said: Collection[str] = (),
    declared: Schedule | None = None,
) -> Row:
    """Write the row, new or as it is from now on, with its next time or why there is none."""
    key = key_of(tenant, agent, schedule.id)
    stays = row is not None and row["retired_at"] is None
    same_trigger = row is not None and {"cron", "every", "at", "time_zone"}.isdisjoint(said)
    anchor = row["anchor"] if row is not None and same_trigger else now
    fire_count = row["fire_count"] if row is not None else 0
    # What is due at this moment, and has only not fired yet, is left to fire.
    slot = row["next_slot"] if row is not None and same_trigger else None
    slot = slot or schedule.trigger_from(anchor).after(now)
    reason = why_over(schedule, slot, fire_count) if schedule.enabled else DISABLED.format(by)
    if row is not None and not schedule.enabled and not row["enabled"] and "enabled" not in said:
        reason = row["reason"] if stays else "disabled before it was retired"
    revived = row is None or not stays or (schedule.enabled and not row["enabled"])
    if reason is not None:
        slot = None
    facts = schedule.fields() | {
        "key": key,
        "tenant": tenant,
        "agent": agent,
        "session": _session_of(schedule, tenant),
        "anchor": anchor,
        "fire_count": fire_count,
        "failures": 0 if revived or row is None else row["failures"],
        "anew": row is None,
        "declared": json.dumps(declared.plain()) if declared else None,
        "slot": slot,
        "next": None if slot is None else due_at(key, slot, schedule.spread, schedule.expires_at),
        "reason": reason,
        "by": by,
    }
    cursor = await tx.execute(
        """
        insert into chaz.schedules as s (key, tenant, agent, id, prompt, cron, time_zone, every, at, anchor,
            session_id, enabled, expires_at, max_fires, fire_count, max_failures, failures, jitter, catch_up, declared,
            next_slot, next_at, reason, created_by, changed_by)
        values (%(key)s, %(tenant)s, %(agent)s, %(id)s, %(prompt)s, %(cron)s, %(time_zone)s, %(every)s, %(at)s,
            %(anchor)s, %(session)s, %(enabled)s, %(expires_at)s, %(max_fires)s, %(fire_count)s, %(max_failures)s,
            %(failures)s, %(jitter)s, %(catch_up)s, %(declared)s::jsonb, %(slot)s, %(next)s, %(reason)s, %(by)s, %(by)s)
        on conflict (key) do update set prompt = excluded.prompt, cron = excluded.cron, time_zone = excluded.time_zone,
            every = excluded.every, at = excluded.at, anchor = excluded.anchor, session_id = excluded.session_id,
            enabled = excluded.enabled, expires_at = excluded.expires_at, max_fires = excluded.max_fires,
            fire_count = excluded.fire_count, max_failures = excluded.max_failures, failures = excluded.failures,
            jitter = excluded.jitter, catch_up = excluded.catch_up,
            declared = case when %(anew)s then excluded.declared else coalesce(excluded.declared, s.declared) end,
            next_slot = excluded.next_slot, next_at = excluded.next_at, reason = excluded.reason, retired_at = null,
            retired_by = null, changed_by = excluded.changed_by, changed_at = clock_timestamp()
        returning *
        """,
        facts,
    )
    written = await cursor.fetchone()
    assert written is not None
    return written


def why_over(schedule: Schedule, slot: datetime | None, fire_count: int) -> str | None:
    """Why a schedule fires no more, given its next slot and how often it has fired; None: it does."""
    if schedule.max_fires is not None and fire_count >= schedule.max_fires:
        return f"over: it has fired {'once' if fire_count == 1 else f'{fire_count} times'}"
    if slot is None:
        return "over: no slot is left"
    if schedule.expires_at is not None and slot > schedule.expires_at:
        return f"over: it expires at {schedule.expires_at.isoformat()}"
    return None


def _session_of(schedule: Schedule, tenant: str) -> UUID | None:
    pinned = schedule.session
    if pinned is None or isinstance(pinned, UUID):
        return pinned
    try:
        return UUID(pinned)
    except ValueError:
        return session_id(pinned, tenant)


async def _may_be_pinned(tx: Transaction, agent: str, schedule: Schedule, tenant: str) -> None:
    """Raises UnknownSession, or InvalidSchedule where the agent is not in the session."""
    session = _session_of(schedule, tenant)
    if session is None:
        return
    cursor = await tx.execute(
        """
        select exists (select from chaz.attachments a where a.session_id = s.id and a.agent = %(agent)s) as attached
        from chaz.sessions s where s.id = %(session)s and s.tenant = %(tenant)s
        """,
        {"session": session, "agent": agent, "tenant": tenant},
    )
    row = await cursor.fetchone()
    if row is None:
        raise UnknownSession(str(schedule.session))
    if not row["attached"]:
        raise InvalidSchedule("session", f"agent {agent!r} is not attached to {str(schedule.session)!r}")


async def _lock_all(tx: Transaction, tenant: str, agent: str) -> None:
    """Let nobody else add to the agent's schedules meanwhile."""
    await tx.execute(
        "select pg_advisory_xact_lock(chaz.opening_key(%(id)s))", {"id": derived_id("schedules", tenant, agent)}
    )


async def _count(tx: Transaction, tenant: str, agent: str, ceilings: Ceilings) -> None:
    cursor = await tx.execute("select from chaz.agents where name = %(agent)s", {"agent": agent})
    if await cursor.fetchone() is None:
        raise UnknownAgent(agent)
    await _lock_all(tx, tenant, agent)
    found = sum(row["retired_at"] is None for row in await _of_agent(tx, tenant, agent))
    ceilings.check_count(agent, found + 1)


async def _of_agent(tx: Transaction, tenant: str, agent: str, lock: LiteralString = "") -> Sequence[Row]:
    cursor = await tx.execute(
        f"select * from chaz.schedules where tenant = %(tenant)s and agent = %(agent)s order by key {lock}",
        {"tenant": tenant, "agent": agent},
    )
    return await cursor.fetchall()


async def _locked(tx: Transaction, tenant: str, agent: str, id: str) -> Row | None:
    cursor = await tx.execute(
        "select * from chaz.schedules where key = %(key)s for update", {"key": key_of(tenant, agent, id)}
    )
    return await cursor.fetchone()


async def _now(tx: Transaction) -> datetime:
    cursor = await tx.execute("select clock_timestamp() as now")
    row = await cursor.fetchone()
    assert row is not None
    return row["now"]
