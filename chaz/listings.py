"""The store of listings: questions that a person asks, with any of several conditions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from chaz import usage
from chaz.database import Database
from chaz.entries import safe_text


@dataclass(frozen=True)
class RunFilter:
    """Which runs a listing shows, newest first."""

    session_id: UUID | None = None
    agent: str | None = None
    state: str | None = None
    root_run_id: UUID | None = None
    since: datetime | None = None
    limit: int = 50


@dataclass(frozen=True)
class SessionFilter:
    """Which sessions a listing shows, newest first."""

    id: UUID | None = None
    tenant: str | None = None
    agent: str | None = None
    """With this agent attached."""
    name: str | None = None
    """Whose name holds this, in any case."""
    busy: bool = False
    """With a run at work, queued or parked."""
    waiting: bool = False
    """With something that waits: an entry, a run, or people's word."""
    children: bool = False
    """Those that runs opened, too."""
    limit: int = 50


async def list_sessions(database: Database, wanted: SessionFilter) -> list[dict[str, Any]]:
    """Sessions as a person wants to see them.

    Of each: ``id``, ``name``, ``created_at``, ``last_at`` (of its last entry), ``entries`` (how many are placed),
    ``agents`` (the lead first) and what is up: ``run``, the one at work, with its ``agent``, ``state``, ``since`` and
    ``waits_for``; and what waits: ``unplaced`` entries, ``pending`` runs, and ``asked`` requests to people.
    """
    return await database.fetch(
        """
        with found as (
            select s.*, coalesce(h.next_position, 1) as next_position, active.id as run, active.agent, active.state,
                active.waits_for, coalesce(active.started_at, active.queued_at) as since
            from chaz.sessions s left join chaz.heads h on h.session_id = s.id
                left join chaz.runs active on active.session_id = s.id
                    and active.state in ('queued', 'running', 'parked')
            where (%(id)s::uuid is null or s.id = %(id)s)
                and (%(tenant)s::text is null or s.tenant = %(tenant)s)
                and (%(agent)s::text is null or exists (
                    select from chaz.attachments a where a.session_id = s.id and a.agent = %(agent)s))
                and (%(name)s::text is null or strpos(lower(s.name), lower(%(name)s)) > 0)
                and (%(children)s or %(id)s::uuid is not null or s.parent_run_id is null)
                and (not %(busy)s or active.id is not null)
                and (not %(waiting)s
                    or exists (select from chaz.entries e where e.session_id = s.id and e.position is null)
                    or exists (select from chaz.runs p where p.session_id = s.id and p.state = 'pending')
                    or exists (select from chaz.approvals a where a.session_id = s.id and a.decision is null))
            order by s.created_at desc, s.id desc limit %(limit)s)
        select f.id, f.name, f.created_at, f.next_position - 1 as entries,
            f.run, f.agent, f.state, f.waits_for, f.since,
            (select e.created_at from chaz.entries e
                where e.session_id = f.id and e.position = f.next_position - 1 and e.seq = 0) as last_at,
            coalesce((select array_agg(a.agent order by a.lead desc, a.attached_at, a.agent)
                from chaz.attachments a where a.session_id = f.id), '{}') as agents,
            (select count(*) from chaz.entries e where e.session_id = f.id and e.position is null) as unplaced,
            (select count(*) from chaz.runs p where p.session_id = f.id and p.state = 'pending') as pending,
            (select count(*) from chaz.approvals a where a.session_id = f.id and a.decision is null) as asked
        from found f order by f.created_at desc, f.id desc
        """,
        {name: findable(value) for name, value in vars(wanted).items()},
    )


async def served_agents(database: Database) -> list[str]:
    """The names of the agents that a worker has ever said it serves."""
    return [row["name"] for row in await database.fetch("select name from chaz.agents order by name")]


async def tree_of(database: Database, run_id: UUID) -> list[dict[str, Any]]:
    """The runs of a run's tree, parents first, each with its ``usage``, as :func:`list_runs` has it.

    And with ``calls``: how many calls of which tools are open in it.
    A child whose directive no listener has placed yet is shown as pending too.
    """
    rows = await database.fetch(
        """
        with root as (
            select coalesce(
                (select root_run_id from chaz.runs where id = coalesce(
                    (select superseded_by from chaz.runs where id = %(run)s), %(run)s)), %(run)s) as id),
        placed as (
            select r.id, r.session_id, s.name as session, r.agent, r.state, r.parent_run_id, r.depth, r.attempt,
                r.steps, r.waits_for, r.not_before, r.reason, r.result, r.created_at, r.started_at, r.ended_at
            from chaz.runs r left join chaz.sessions s on s.id = r.session_id
            where r.root_run_id = (select id from root)),
        sent as (
            select e.id, e.session_id, s.name as session, coalesce(e.recipient, '(not known yet)') as agent,
                'pending' as state, s.parent_run_id,
                coalesce(s.depth, 0) as depth, 0 as attempt,
                0 as steps, null::text as waits_for,
                null::timestamptz as not_before, null::text as reason, null::text as result, e.created_at,
                null::timestamptz as started_at, null::timestamptz as ended_at
            from (
                select e.* from chaz.sessions s join chaz.entries e on e.session_id = s.id
                where s.root_run_id = (select id from root) and e.position is null and e.type = 'directive'
                    and e.author = 'agent'
                union
                select * from chaz.entries where id = %(run)s and position is null) as e
            left join chaz.sessions s on s.id = e.session_id),
        found as (select * from placed union all select * from sent)
        select f.*, coalesce((
            select jsonb_object_agg(tool, count) from (
                select c.tool, count(*) from chaz.calls c
                where c.run_id = f.id and c.state = 'started' and f.ended_at is null and not exists (
                    select from chaz.waits w where (w.run_id, w.step, w.ordinal) = (c.run_id, c.step, c.ordinal)
                        and w.answer is not null)
                group by c.tool order by c.tool
            ) as open), '{}') as calls
        from found f order by f.depth, f.created_at, f.id
        """,
        {"run": run_id},
    )
    return await with_usage(database, rows)


async def with_usage(database: Database, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """These runs, each with its ``usage``: the fields of a :class:`chaz.outcomes.Spent`."""
    spent = await usage.of_runs(database, [run["id"] for run in found])
    return [run | {"usage": spent[run["id"]].model_dump(mode="json")} for run in found]


def findable(value: object) -> object:
    """The value, if it is no text that PostgreSQL cannot hold; else one that nothing is named."""
    return safe_text(value) if isinstance(value, str) else value
