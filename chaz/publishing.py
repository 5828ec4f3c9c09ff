"""The store of what may be published: whose turn it is, how much of it, and what is held back.

A broker's queue is first come, first served. So that a tenant's thousand runs do not stand before another's first,
only so many of each tenant's runs of an agent are announced and not yet claimed; the rest waits in the table, where
turns are taken. An agent's cap is kept here so that no delivery is in vain, and by the claim so that it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import LiteralString

from chaz.channels import ISOLATION
from chaz.database import Transaction
from chaz.runs import GIVEN_UP, ISOLATED, Publication, publication

ANNOUNCED_AHEAD = 100
"""Runs of one tenant and agent that are announced and not yet claimed. No fewer than start between two looks."""

LONGEST_WAIT = 60
"""The longest wait before a run is announced again, as a multiple of the first."""

_PAUSED: LiteralString = """
    exists (select from chaz.pauses p where p.kind = 'all' or (p.kind = 'agent' and p.name = a.name))
"""
_ANNOUNCED: LiteralString = """
    select count(*) from chaz.runs n
    where n.state = 'queued' and n.publishes > 0 and n.agent = a.name and n.publish_after > now()
"""

ROOM: LiteralString = f"""
    turns(agent, tenant) as (
        -- Agents and tenants with queued runs, found by skipping through the index.
        (select agent, tenant from chaz.runs where state = 'queued' order by agent, tenant limit 1)
        union all
        select n.agent, n.tenant from turns cross join lateral (
            select r.agent, r.tenant from chaz.runs r
            where r.state = 'queued' and (r.agent, r.tenant) > (turns.agent, turns.tenant)
            order by r.agent, r.tenant limit 1) n),
    room as (
        select t.agent, t.tenant, a.queue,
            %(ahead)s - ({_ANNOUNCED} and n.tenant = t.tenant) as ahead,
            case when a.max_concurrent is not null then a.max_concurrent - ({_ANNOUNCED}) - (
                select count(*) from chaz.runs n where n.state = 'running' and n.agent = a.name) end as under_cap
        from turns t join chaz.agents a on a.name = t.agent
        where not {_PAUSED})
"""
"""``room`` (after ``with recursive``): of each agent and tenant that has queued runs and is not paused, how many more

may be announced: ``ahead`` of the tenant's, and of the agent's as a whole ``under_cap`` (null: it has no cap).
"""

DUE: LiteralString = f"""
    select r.id, r.priority, r.publish_after, r.suspect from chaz.runs r
    where r.state = 'queued' and r.agent = room.agent and r.tenant = room.tenant and r.publish_after <= now()
        and not {GIVEN_UP}
        and not exists (select from chaz.pauses p where p.kind = 'session' and p.name = r.session_id::text)
    order by r.priority desc, r.publish_after
"""
"""The runs of one row of ``room`` whose bell is due."""


async def publishable(
    tx: Transaction, *, first_wait: float, limit: int = 200, ahead: int = ANNOUNCED_AHEAD
) -> list[Publication]:
    """Take the queued runs whose bell is due; each is due again after a wait that doubles, from ``first_wait`` seconds.

    Doubling, because a run that nobody has claimed yet most often stands in a long queue already; within a bound, as
    what a flushed broker forgot counts as announced until then, and keeps others from being announced. Tenants take
    turns among runs of one priority. A suspect run goes to the isolation worker, if there is one.
    """
    cursor = await tx.execute(
        f"""
        with recursive {ROOM},
        candidates as (
            select due.*, room.agent, room.queue, room.under_cap,
                row_number() over (
                    partition by room.agent, room.tenant order by due.priority desc, due.publish_after) as turn
            from room cross join lateral (
                {DUE} limit greatest(least(room.ahead, %(limit)s), 0) for update of r skip locked) due
            where room.under_cap is null or room.under_cap > 0),
        placed as (
            select c.*, row_number() over (partition by agent order by priority desc, turn, publish_after) as place
            from candidates c),
        chosen as (
            select id, turn, suspect, queue from placed where under_cap is null or place <= under_cap
            order by priority desc, turn, publish_after limit %(limit)s),
        due as (
            select chosen.id, chosen.turn, case when chosen.suspect and {ISOLATED}
                then %(isolation)s else chosen.queue end as queue
            from chosen)
        update chaz.runs r set
            publishes = r.publishes + 1,
            publish_after = now()
                + %(first_wait)s * least(power(2, least(r.publishes, 20)), %(most)s) * interval '1 second'
        from due where r.id = due.id
        returning r.id, r.agent, r.session_id, r.parent_run_id, r.priority, r.queued_at, due.queue, due.turn
        """,
        {"first_wait": first_wait, "limit": limit, "isolation": ISOLATION, "ahead": ahead, "most": LONGEST_WAIT},
    )
    rows = sorted(await cursor.fetchall(), key=lambda row: (-row["priority"], row["turn"], row["queued_at"]))
    return [publication(row) for row in rows]


async def room_at_once(
    tx: Transaction, tenants: Sequence[str], *, ahead: int = ANNOUNCED_AHEAD
) -> dict[tuple[str, str], int]:
    """How many new runs of an agent and tenant may be published the moment they are made: none past those that wait.

    Those of a capped agent are left to :func:`publishable`, which knows of other tenants' turns.
    """
    cursor = await tx.execute(
        f"""
        select a.name, t.tenant, case
            when a.max_concurrent is not null or {_PAUSED} or exists (
                select from chaz.runs r where r.state = 'queued' and r.agent = a.name and r.tenant = t.tenant
                    and r.publish_after <= now()) then 0
            else %(ahead)s - ({_ANNOUNCED} and n.tenant = t.tenant) end as room
        from chaz.agents a cross join unnest(%(tenants)s::text[]) t(tenant)
        """,
        {"tenants": list(tenants), "ahead": ahead},
    )
    return {(row["name"], row["tenant"]): row["room"] for row in await cursor.fetchall()}
