"""The store of how often tools are called, on all machines together and by the database's clock."""

from __future__ import annotations

from datetime import timedelta

from chaz.database import Transaction


async def admit(tx: Transaction, tool: str, *, burst: int, interval: float, within: float) -> float:
    """How many seconds from now the tool may be called next; that call is taken, if it is not more than ``within``.

    So many calls (``burst``) at once, and then one every ``interval`` seconds. Of a transaction of its own: the row
    is locked, and whoever calls the tool waits for it.
    """
    await tx.execute("insert into chaz.tool_rates (tool) values (%(tool)s) on conflict do nothing", {"tool": tool})
    await tx.execute("select from chaz.tool_rates where tool = %(tool)s for update", {"tool": tool})
    # In a statement of its own, so that its clock is read after the lock was had. No further ahead than this rate can
    # come to, lest a tool stand still for what a lower rate or another clock had said.
    cursor = await tx.execute(
        """
        with found as materialized (
            select next_at, clock_timestamp() as at, (%(burst)s - 1) * %(interval)s::interval as early
            from chaz.tool_rates where tool = %(tool)s),
        turn as (
            select at, early, next_at as before,
                least(greatest(next_at, at), at + early + %(interval)s::interval + %(within)s::interval) as next_at
            from found),
        written as (
            update chaz.tool_rates r set next_at = turn.next_at
                + case when turn.next_at - early - at <= %(within)s::interval then %(interval)s else interval '0' end
            from turn
            where r.tool = %(tool)s and (turn.next_at - early - at <= %(within)s::interval or turn.next_at < before))
        select greatest(0, extract(epoch from next_at - early - at))::float8 as wait from turn
        """,
        {
            "tool": tool,
            "burst": burst,
            "interval": timedelta(seconds=interval),
            "within": timedelta(seconds=within),
        },
    )
    row = await cursor.fetchone()
    assert row is not None
    return row["wait"]
