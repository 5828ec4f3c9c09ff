"""What a pause or a limit is of: an agent, a session, or everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from chaz.database import Transaction
from chaz.entries import session_id
from chaz.errors import InvalidSubject, UnknownAgent, UnknownSession


@dataclass(frozen=True)
class Subject:
    """An agent, a session, or everything."""

    kind: Literal["agent", "session", "all"]
    name: str = ""
    """The agent's name; the session's name or id; of everything, empty."""

    @classmethod
    def parse(cls, what: str) -> Subject:
        """``agent:NAME``, ``session:NAME`` (or its id) or ``all``. Raises InvalidSubject."""
        kind, _, name = what.partition(":")
        if what == "all":
            return cls("all")
        if kind in ("agent", "session") and name:
            return cls(kind, name)
        raise InvalidSubject(what)

    def key(self, tenant: str) -> dict[str, str]:
        """Its kind and name as tables have them: a session's id instead of its name."""
        name = str(self._session_id(tenant)) if self.kind == "session" else self.name
        return {"kind": self.kind, "name": name}

    def _session_id(self, tenant: str) -> UUID:
        try:
            return UUID(self.name)
        except ValueError:
            return session_id(self.name, tenant)

    async def must_exist(self, tx: Transaction, tenant: str) -> None:
        """Raise UnknownAgent or UnknownSession where there is none."""
        name = self.key(tenant)["name"]
        if self.kind == "agent":
            found = await tx.execute("select from chaz.agents where name = %(name)s", {"name": name})
            if await found.fetchone() is None:
                raise UnknownAgent(name)
        elif self.kind == "session":
            found = await tx.execute("select from chaz.sessions where id = %(id)s", {"id": UUID(name)})
            if await found.fetchone() is None:
                raise UnknownSession(self.name)
