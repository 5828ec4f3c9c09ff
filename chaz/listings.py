"""The store of listings: questions that a person asks, with any of several conditions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString, cast
from uuid import UUID

from sqlalchemy import ColumnElement, Select, exists, select
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
    shown = [column for column in runs.c if column.name not in {"claim", "worker_id", "digest"}]
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


def _conditions(wanted: RunFilter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    for name in ("session_id", "agent", "state", "root_run_id"):
        if (value := getattr(wanted, name)) is not None:
            conditions.append(runs.c[name] == value)
    if wanted.since is not None:
        conditions.append(runs.c.created_at >= wanted.since)
    return conditions
