"""The store of limits: what sessions, agents, or everything may use in a period, and have used in it.

A row counts what its period has used, with each stored step and in its transaction. It is looked at before a model is
asked, and nothing is reserved: each run that is at work then may take a turn past it. Rows are locked in the order of
their keys, after a tree's budget.
"""

from __future__ import annotations

from datetime import UTC, timedelta
from decimal import Decimal
from typing import Any, LiteralString
from uuid import UUID

from chaz.database import Cursor, Database, Row, Transaction
from chaz.errors import InvalidLimit, LimitReached, UnknownPrice
from chaz.outcomes import Usage
from chaz.subjects import Subject

LONGEST = timedelta(days=3660)

OF_THE_RUN: LiteralString = """
    (l.kind = 'all' or (l.kind = 'agent' and l.name = r.agent) or (l.kind = 'session' and l.name = r.session_id::text))
"""
"""Whether ``chaz.limits l`` is one for ``chaz.runs r``."""


async def set_limit(
    tx: Transaction,
    what: Subject,
    *,
    tenant: str,
    period: timedelta,
    tokens: int | None,
    cost: Decimal | None,
    by: str,
) -> None:
    """Let it use no more than this in each period; instead of what was said of the same period before.

    What it has used in the period that goes on counts at once, but for a step that is stored in this very moment.
    Raises InvalidLimit, UnknownAgent, UnknownSession.
    """
    _check(period, tokens, cost)
    await what.must_exist(tx, tenant)
    await tx.execute(
        """
        with period as (
            select chaz.period_end(%(period)s) as ends_at, make_interval(secs => %(seconds)s) as length),
        used as (
            select coalesce(sum(m.prompt_tokens + m.completion_tokens), 0) as tokens, coalesce(sum(m.cost), 0) as cost,
                count(*) - count(m.cost) as unpriced
            from chaz.model_calls m
            where m.created_at >= (select ends_at - length from period)
                and (%(kind)s = 'all' or (%(kind)s = 'agent' and m.agent = %(name)s)
                    or (%(kind)s = 'session' and m.session_id::text = %(name)s)))
        insert into chaz.limits
            (kind, name, period, max_tokens, max_cost, ends_at, tokens, cost, unpriced, set_by)
        select %(kind)s, %(name)s, %(period)s, %(max_tokens)s, %(max_cost)s, ends_at, tokens, cost, unpriced, %(by)s
        from period, used
        on conflict (kind, name, period) do update set max_tokens = excluded.max_tokens, max_cost = excluded.max_cost,
            set_by = excluded.set_by, set_at = excluded.set_at
        """,
        {
            **what.key(tenant),
            "period": period,
            "seconds": period.total_seconds(),
            "max_tokens": tokens,
            "max_cost": cost,
            "by": by,
        },
    )


def _check(period: timedelta, tokens: int | None, cost: Decimal | None) -> None:
    if tokens is None and cost is None:
        raise InvalidLimit("it limits nothing; say how many tokens, or how much cost")
    if tokens is not None and not 0 < tokens < 2**63:
        raise InvalidLimit(f"its tokens are {tokens}; use 1 or more (chaz pause lets nothing start)")
    if cost is not None and not (cost.is_finite() and cost > 0):
        raise InvalidLimit(f"its cost is {cost}; use more than 0 (chaz pause lets nothing start)")
    if not timedelta(seconds=1) <= period <= LONGEST:
        raise InvalidLimit(f"its period is {period}; use 1 second to ten years")


async def remove_limit(tx: Transaction, what: Subject, *, tenant: str, period: timedelta | None) -> bool:
    """Take its limit of this period away, or all of them (None); False if there is none."""
    cursor = await tx.execute(
        """
        delete from chaz.limits
        where kind = %(kind)s and name = %(name)s and (%(period)s::interval is null or period = %(period)s)
        """,
        {**what.key(tenant), "period": period},
    )
    return cursor.rowcount > 0


async def limits(database: Database) -> list[dict[str, Any]]:
    """All limits, with what is used of the period that goes on.

    Of each: ``kind``, ``name`` (of a session its name, if it has one), ``period`` (seconds), ``max_tokens``,
    ``max_cost``, ``tokens``, ``cost`` (that of ``unpriced`` calls is not known), ``ends_at``, ``reached``, ``set_by``,
    ``set_at``.
    """
    return await database.fetch(
        """
        select l.kind, coalesce(s.name, l.name) as name, extract(epoch from l.period)::float8 as period,
            l.max_tokens, l.max_cost::float8 as max_cost,
            case when goes_on then l.tokens else 0 end as tokens,
            case when goes_on then l.cost else 0 end::float8 as cost,
            case when goes_on then l.unpriced else 0 end as unpriced,
            case when goes_on then l.ends_at else chaz.period_end(l.period) end as ends_at,
            goes_on and coalesce(l.tokens >= l.max_tokens or l.cost >= l.max_cost, false) as reached,
            l.set_by, l.set_at
        from chaz.limits l cross join lateral (select l.ends_at > now()) as at(goes_on)
            left join chaz.sessions s on s.id = case when l.kind = 'session' then l.name::uuid end
        order by l.kind, name, l.period
        """
    )


async def check(tx: Transaction, run_id: UUID, *, model: str, priced: bool) -> None:
    """Raise LimitReached if a limit for the run has been used up, UnknownPrice if one is of a cost that is unknown."""
    cursor = await tx.execute(
        f"""
        select l.*, coalesce(s.name, l.name) as name, l.ends_at > clock_timestamp() as goes_on
        from chaz.runs r join chaz.limits l on {OF_THE_RUN}
            left join chaz.sessions s on s.id = r.session_id and l.kind = 'session'
        where r.id = %(run)s order by l.ends_at desc
        """,
        {"run": run_id},
    )
    rows = await cursor.fetchall()
    for row in rows:
        if row["goes_on"] and (used := _used_up(row)):
            raise LimitReached(named(row), used, f"{row['ends_at'].astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC")
    for row in rows:
        if row["max_cost"] is not None and not priced:
            raise UnknownPrice(model, named(row))


def _used_up(row: Row) -> str:
    """What has been used of what, where that is all; else nothing."""
    parts: list[str] = []
    if row["max_tokens"] is not None and row["tokens"] >= row["max_tokens"]:
        parts.append(f"{row['tokens']:,} of {row['max_tokens']:,} tokens")
    if row["max_cost"] is not None and row["cost"] >= row["max_cost"]:
        parts.append(f"a cost of {float(row['cost']):.4g} of {float(row['max_cost']):.4g}")
    return f"{' and '.join(parts)} used in its period of {period_text(row['period'])}" if parts else ""


def period_text(period: timedelta) -> str:
    """A period as the command line takes it: ``30d``, ``1h``, ``90s``."""
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if not period.total_seconds() % length:
            return f"{period.total_seconds() / length:.0f}{unit}"
    return f"{period.total_seconds():g}s"


def named(row: Row) -> str:
    """Whose limit it is, in words."""
    return "the deployment" if row["kind"] == "all" else f"{row['kind']}:{row['name']}"


async def count(tx: Transaction, run_id: UUID, usage: Usage, cost: Decimal | None) -> Cursor:
    """Count what a call of a model used and cost in the limits for its run. The cursor's row count is that of these.

    Each row counts the period that goes on: the first call after its end starts the next from nothing.
    """
    return await tx.execute(
        f"""
        with clock as materialized (
            select clock_timestamp() as at),
        mine as (
            select l.kind, l.name, l.period from chaz.runs r join chaz.limits l on {OF_THE_RUN}
            where r.id = %(run)s order by l.kind, l.name, l.period for update of l)
        update chaz.limits l set
            tokens = case when l.ends_at > clock.at then l.tokens else 0 end + %(tokens)s,
            cost = case when l.ends_at > clock.at then l.cost else 0 end + coalesce(%(cost)s::numeric, 0),
            unpriced = case when l.ends_at > clock.at then l.unpriced else 0 end + (%(cost)s::numeric is null)::int,
            ends_at = case when l.ends_at > clock.at then l.ends_at else chaz.period_end(l.period, clock.at) end
        from mine, clock where (l.kind, l.name, l.period) = (mine.kind, mine.name, mine.period)
        """,
        {"run": run_id, "tokens": usage.prompt + usage.completion, "cost": cost},
    )
