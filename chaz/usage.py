"""The store of usage: what calls of models used and cost. Each has one row, written once; all is told from those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal, LiteralString, get_args
from uuid import UUID

from chaz.database import Database, Transaction
from chaz.errors import InvalidQuery
from chaz.outcomes import Spent, Usage

By = Literal["agent", "model", "session", "tree", "run", "day", "tenant"]

SPENT: LiteralString = """
    jsonb_build_object('prompt', coalesce(sum(m.prompt_tokens), 0), 'completion', coalesce(sum(m.completion_tokens), 0),
        'cached', coalesce(sum(m.cached_tokens), 0), 'reasoning', coalesce(sum(m.reasoning_tokens), 0),
        'calls', count(m.run_id), 'known_cost', coalesce(sum(m.cost), 0)::float8,
        'unpriced_calls', count(m.run_id) - count(m.cost))
"""
"""The fields of a :class:`chaz.outcomes.Spent`, over a group of ``chaz.model_calls m``."""

_KEYS: Mapping[str, LiteralString] = {
    "agent": "m.agent",
    "model": "m.model",
    "session": "m.session_id",
    "tree": "m.root_run_id",
    "run": "m.run_id",
    "day": "(m.created_at at time zone %(timezone)s)::date",
    "tenant": "m.tenant",
}
_COLUMNS: Mapping[str, LiteralString] = {key: key for key in get_args(By)}
_NAMES: Mapping[str, LiteralString] = {
    "session": "coalesce((select name from chaz.sessions where id = m.session_id), m.session_id::text)",
}


async def book(
    tx: Transaction,
    run_id: UUID,
    attempt: int,
    *,
    step: int,
    number: int,
    model: str,
    usage: Usage,
    cost: Decimal | None,
) -> None:
    """Store what a call of a model used and cost: 0, that of the stored turn; else a try that was refused."""
    await tx.execute(
        """
        insert into chaz.model_calls (run_id, step, attempt, try, tenant, session_id, root_run_id, agent, model,
            prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens, cost)
        select id, %(step)s, %(attempt)s, %(number)s, tenant, session_id, root_run_id, agent, %(model)s,
            %(prompt)s, %(completion)s, %(cached)s, %(reasoning)s, %(cost)s
        from chaz.runs where id = %(run)s
        """,
        {
            "run": run_id,
            "step": step,
            "attempt": attempt,
            "number": number,
            "model": model,
            "cost": cost,
            **usage.model_dump(include=set(Usage.model_fields)),
        },
    )


async def is_booked(tx: Transaction, run_id: UUID, attempt: int, *, step: int, number: int) -> bool:
    """Whether that has been stored."""
    cursor = await tx.execute(
        """
        select from chaz.model_calls
        where (run_id, step, attempt, try) = (%(run)s, %(step)s, %(attempt)s, %(number)s)
        """,
        {"run": run_id, "step": step, "attempt": attempt, "number": number},
    )
    return await cursor.fetchone() is not None


async def of_runs(database: Database, ids: Sequence[UUID]) -> dict[UUID, Spent]:
    """What each of these runs has used so far, without its children."""
    rows = await database.fetch(
        f"select m.run_id, {SPENT} as spent from chaz.model_calls m where m.run_id = any(%(ids)s) group by m.run_id",
        {"ids": list(ids)},
    )
    found = {row["run_id"]: Spent.model_validate(row["spent"]) for row in rows}
    return {id: found.get(id, Spent()) for id in ids}


@dataclass(frozen=True)
class UsageFilter:
    """Whose usage, and since when."""

    since: datetime | None = None
    agent: str | None = None
    session_id: UUID | None = None
    root_run_id: UUID | None = None


async def total(database: Database, wanted: UsageFilter) -> Spent:
    """What all of it comes to."""
    (row,) = await by(database, (), wanted)
    return Spent.model_validate(row)


async def by(
    database: Database, keys: Sequence[By], wanted: UsageFilter, *, timezone: str = "UTC"
) -> list[dict[str, Any]]:
    """Usage for each value of the keys together: those, and the fields of a :class:`chaz.outcomes.Spent`.

    A session is told by its name, if it has one, else by its id; a tree by its root run; a ``day`` is one of the time
    zone. Days come in order, and of the rest the dearest first. Without keys it is one row, of all. Raises
    InvalidQuery, and InvalidEntry for a zone that PostgreSQL does not know.
    """
    for key in keys:
        if key not in _KEYS:
            raise InvalidQuery(f"there is no usage by {key!r}; it is kept by {', '.join(_KEYS)}")
    conditions: list[LiteralString] = ["true"]
    if wanted.since is not None:
        conditions.append("m.created_at >= %(since)s")
    if wanted.agent is not None:
        conditions.append("m.agent = %(agent)s")
    if wanted.session_id is not None:
        conditions.append("m.session_id = %(session_id)s")
    if wanted.root_run_id is not None:
        conditions.append("m.root_run_id = %(root_run_id)s")
    groups: list[LiteralString] = [_KEYS[key] for key in keys]
    named: list[LiteralString] = ["", *(f"{_NAMES.get(key, _KEYS[key])} as {_COLUMNS[key]}" for key in keys)]
    days: list[LiteralString] = [_KEYS["day"]] if "day" in keys else []
    order: list[LiteralString] = [
        *days,
        "sum(m.cost) desc nulls last",
        "sum(m.prompt_tokens + m.completion_tokens) desc",
        *groups,
    ]
    rows = await database.fetch(
        f"""
        select {SPENT} as spent{", ".join(named)} from chaz.model_calls m where {" and ".join(conditions)}
        group by ({", ".join(groups)}) order by {", ".join(order)}
        """,
        {**vars(wanted), "timezone": timezone},
    )
    return [
        {key: row[key] for key in keys} | Spent.model_validate(row["spent"]).model_dump(mode="json") for row in rows
    ]
