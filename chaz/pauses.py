"""The store of pauses: agents, sessions, or everything, of which nothing new starts. What runs goes on.

Publishing leaves out what is paused, and a claim refuses it; entries are placed all the same.
"""

from __future__ import annotations

from typing import Any

from chaz.channels import BELL
from chaz.database import Database, Transaction
from chaz.subjects import Subject


async def pause(tx: Transaction, what: Subject, *, tenant: str, by: str, reason: str = "") -> bool:
    """Let nothing new start of it; False if it is paused already. Raises UnknownAgent, UnknownSession."""
    await what.must_exist(tx, tenant)
    cursor = await tx.execute(
        """
        insert into chaz.pauses (kind, name, paused_by, reason) values (%(kind)s, %(name)s, %(by)s, %(reason)s)
        on conflict do nothing
        """,
        {**what.key(tenant), "by": by, "reason": reason},
    )
    return cursor.rowcount > 0


async def resume(tx: Transaction, what: Subject, *, tenant: str) -> bool:
    """Let it start again, and ring the bell for what waits; False if it was not paused."""
    cursor = await tx.execute(
        """
        with ended as (delete from chaz.pauses where kind = %(kind)s and name = %(name)s returning kind)
        select pg_notify(%(bell)s, '') from ended
        """,
        {**what.key(tenant), "bell": BELL},
    )
    return await cursor.fetchone() is not None


async def paused(database: Database) -> list[dict[str, Any]]:
    """All that is paused, the longest first: kind, name (of a session its name, if it has one), since, by, reason."""
    return await database.fetch(
        """
        select p.kind, coalesce(s.name, p.name) as name, p.since, p.paused_by, p.reason
        from chaz.pauses p left join chaz.sessions s on s.id = case when p.kind = 'session' then p.name::uuid end
        order by p.since, p.kind, p.name
        """
    )
