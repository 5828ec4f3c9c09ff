"""The store of listings: questions that a person asks, with any of several conditions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString, cast
from uuid import UUID

from sqlalchemy import ColumnElement, Double, Select, exists, select
from sqlalchemy import cast as cast_to
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from chaz.database import Database
from chaz.tables import runs, sessions

_DIALECT = PGDialect_psycopg()


async def _fetch(database: Database, statement: Select[Any]) -> list[dict[str, Any]]:
    """Run a statement of SQLAlchemy Core on the process's own pool."""
    compiled = statement.compile(dialect=_DIALECT, compile_kwargs={"render_postcompile": True})
    return await database.fetch(cast("LiteralString", str(compiled)), compiled.params)


@dataclass(frozen=True)
class RunFilter:
    """Which runs a listing shows, newest first."""

    session_id: UUID | None = None
    agent: str | None = None
    state: str | None = None
    root_run_id: UUID | None = None
    since: datetime | None = None
    limit: int = 50


async def list_runs(database: Database, wanted: RunFilter) -> list[dict[str, Any]]:
    """Runs as a person wants to see them: the columns of ``chaz.runs``, and ``session``, the session's name."""
    hidden = {"claim", "worker_id", "digest", "cost"}
    # Of a cost, a number that JSON has.
    shown = [*(column for column in runs.c if column.name not in hidden), cast_to(runs.c.cost, Double).label("cost")]
    return await _fetch(
        database,
        select(*shown, sessions.c.name.label("session"))
        .join(sessions, sessions.c.id == runs.c.session_id)
        .where(*_conditions(wanted))
        .order_by(runs.c.created_at.desc(), runs.c.id.desc())
        .limit(wanted.limit),
    )


async def list_failed(database: Database, wanted: RunFilter) -> list[dict[str, Any]]:
    """What failed for good, the latest end first, with why; what was requeued is its new run's matter."""
    names = (
        *("id", "agent", "session_id", "created_at", "ended_at", "reason", "result"),
        *("attempt", "crashes", "steps", "retry_of", "parent_run_id", "root_run_id"),
    )
    later = runs.alias("later")
    return await _fetch(
        database,
        select(*(runs.c[name] for name in names), sessions.c.name.label("session"))
        .join(sessions, sessions.c.id == runs.c.session_id)
        .where(*_conditions(wanted), runs.c.state == "failed", ~exists().where(later.c.retry_of == runs.c.id))
        .order_by(runs.c.ended_at.desc(), runs.c.id.desc())
        .limit(wanted.limit),
    )


async def tree_of(database: Database, run_id: UUID) -> list[dict[str, Any]]:
    """The runs of a run's tree, parents first, and ``calls``: how many calls of which tools are open in each.

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
                r.steps, r.usage, r.cost::float8 as cost,
                r.waits_for, r.not_before, r.reason, r.result, r.created_at, r.started_at, r.ended_at
            from chaz.runs r left join chaz.sessions s on s.id = r.session_id
            where r.root_run_id = (select id from root)),
        sent as (
            select e.id, e.session_id, s.name as session, coalesce(e.recipient, '(not known yet)') as agent,
                'pending' as state, s.parent_run_id,
                coalesce(s.depth, 0) as depth, 0 as attempt,
                0 as steps, '{}'::jsonb as usage, 0::float8 as cost, null::text as waits_for,
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
    return [dict(row) for row in rows]


def _conditions(wanted: RunFilter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    for name in ("session_id", "agent", "state", "root_run_id"):
        if (value := getattr(wanted, name)) is not None:
            conditions.append(runs.c[name] == value)
    if wanted.since is not None:
        conditions.append(runs.c.created_at >= wanted.since)
    return conditions
