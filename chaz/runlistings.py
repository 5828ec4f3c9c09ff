"""The store of listings of runs, put together with SQLAlchemy Core: a question with any of several conditions.

In a file of its own, because to import SQLAlchemy takes longer than all else that a command needs.
"""

from __future__ import annotations

from typing import Any, LiteralString, cast

from sqlalchemy import ColumnElement, Select, exists, select
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from chaz.database import Database
from chaz.listings import RunFilter, findable, with_usage
from chaz.tables import runs, sessions

_DIALECT = PGDialect_psycopg()


async def _fetch(database: Database, statement: Select[Any]) -> list[dict[str, Any]]:
    """Run a statement of SQLAlchemy Core on the process's own pool."""
    compiled = statement.compile(dialect=_DIALECT, compile_kwargs={"render_postcompile": True})
    return await database.fetch(cast("LiteralString", str(compiled)), compiled.params)


async def list_runs(database: Database, wanted: RunFilter) -> list[dict[str, Any]]:
    """Runs as a person wants to see them: the columns of ``chaz.runs``, ``session``, the session's name, and ``usage``.

    That has the fields of a :class:`chaz.outcomes.Spent`.
    """
    hidden = {"claim", "worker_id", "digest", "prompt"}
    found = await _fetch(
        database,
        select(*(column for column in runs.c if column.name not in hidden), sessions.c.name.label("session"))
        .join(sessions, sessions.c.id == runs.c.session_id)
        .where(*_conditions(wanted))
        .order_by(runs.c.created_at.desc(), runs.c.id.desc())
        .limit(wanted.limit),
    )
    return await with_usage(database, found)


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
            conditions.append(runs.c[name] == findable(value))
    if wanted.since is not None:
        conditions.append(runs.c.created_at >= wanted.since)
    return conditions
