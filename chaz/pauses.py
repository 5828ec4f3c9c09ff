"""The store of pauses: agents, sessions, or everything, of which nothing new starts. What runs goes on.

Publishing leaves out what is paused, and a claim refuses it; entries are placed all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

from chaz.channels import BELL
from chaz.database import Database, Transaction
from chaz.entries import session_id
from chaz.errors import InvalidPause, UnknownAgent, UnknownSession


@dataclass(frozen=True)
class Paused:
    """What a pause is of."""

    kind: Literal["agent", "session", "all"]
    name: str = ""
    """The agent's name; the session's name or id; of everything, empty."""

    @classmethod
    def parse(cls, what: str) -> Paused:
        """``agent:NAME``, ``session:NAME`` (or its id) or ``all``. Raises InvalidPause."""
        kind, _, name = what.partition(":")
        if what == "all":
            return cls("all")
        if kind in ("agent", "session") and name:
            return cls(kind, name)
        raise InvalidPause(what)

    def key(self, tenant: str) -> dict[str, str]:
        """The pause's key in the table."""
        name = str(self._session_id(tenant)) if self.kind == "session" else self.name
        return {"kind": self.kind, "name": name}

    def _session_id(self, tenant: str) -> UUID:
        try:
            return UUID(self.name)
        except ValueError:
            return session_id(self.name, tenant)


async def pause(tx: Transaction, what: Paused, *, tenant: str, by: str, reason: str = "") -> bool:
    """Let nothing new start of it; False if it is paused already. Raises UnknownAgent, UnknownSession."""
    key = what.key(tenant)
    await _must_exist(tx, what, key["name"])
    cursor = await tx.execute(
        """
        insert into chaz.pauses (kind, name, paused_by, reason) values (%(kind)s, %(name)s, %(by)s, %(reason)s)
        on conflict do nothing
        """,
        {**key, "by": by, "reason": reason},
    )
    return cursor.rowcount > 0


async def resume(tx: Transaction, what: Paused, *, tenant: str) -> bool:
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


async def _must_exist(tx: Transaction, what: Paused, name: str) -> None:
    if what.kind == "agent":
        found = await tx.execute("select from chaz.agents where name = %(name)s", {"name": name})
        if await found.fetchone() is None:
            raise UnknownAgent(name)
    elif what.kind == "session":
        found = await tx.execute("select from chaz.sessions where id = %(id)s", {"id": UUID(name)})
        if await found.fetchone() is None:
            raise UnknownSession(what.name)
