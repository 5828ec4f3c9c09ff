"""The store of rosters: which agents are attached to a session, in what order, and who of them leads.

Each change is one more row, so that nobody who attaches an agent is in another's way; the view ``chaz.attachments``
says what they come to.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from chaz.database import Transaction


@dataclass(frozen=True)
class Attachment:
    """An agent of a session."""

    agent: str
    lead: bool
    """Whether it answers what is said to nobody by name. One of a session's agents does."""
    attached_at: datetime


async def attach(tx: Transaction, session: str, agent: str, *, lead: bool, tenant: str, open_session: bool) -> bool:
    """Attach the agent, or make it the lead; False if it is that already. Raises InvalidEntry, UnknownSession."""
    cursor = await tx.execute(
        """
        select chaz.attach(%(session)s::text, %(agent)s::text, lead => %(lead)s::boolean, tenant => %(tenant)s::text,
            open_session => %(open)s::boolean) as done
        """,
        {"session": session, "agent": agent, "lead": lead, "tenant": tenant, "open": open_session},
    )
    row = await cursor.fetchone()
    assert row is not None
    return row["done"]


async def detach(tx: Transaction, session: str, agent: str, *, tenant: str) -> bool:
    """Detach the agent; False if it is not attached. Raises InvalidEntry, UnknownSession."""
    cursor = await tx.execute(
        "select chaz.detach(%(session)s::text, %(agent)s::text, tenant => %(tenant)s::text) as done",
        {"session": session, "agent": agent, "tenant": tenant},
    )
    row = await cursor.fetchone()
    assert row is not None
    return row["done"]


async def roster(tx: Transaction, session_id: UUID) -> list[Attachment]:
    """The session's agents, in the order in which they were attached."""
    cursor = await tx.execute(
        "select agent, lead, attached_at from chaz.attachments where session_id = %(session)s order by since",
        {"session": session_id},
    )
    return [Attachment(**row) for row in await cursor.fetchall()]
