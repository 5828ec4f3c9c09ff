"""What people are asked, as programs see it: the requests that wait, and the word that is sent for one."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar
from uuid import UUID

from chaz.asking import Decision, Risk
from chaz.database import Database, Transaction
from chaz.errors import UnknownRequest

Word = Literal["approve", "approve_all", "deny", "answer"]
Sent = TypeVar("Sent", bound=UUID | Awaitable[UUID | None] | None)


@dataclass(frozen=True)
class Request(Generic[Sent]):
    """What a run asked a person: whether it may make a call (``approval``), or a ``question`` of its own.

    Each method sends a word, one INSERT, and returns its entry's id; None if it has been decided already. The listener
    that places the entry decides whether ``by`` may, and whether it came first and in time; a ``note`` says if not.
    ``by`` is by default the program's user. Of an :class:`~chaz.AsyncChaz` the methods are to be awaited. They raise
    InvalidEntry (what cannot decide this), NotPermitted, DatabaseUnavailable.
    """

    id: UUID
    kind: Literal["approval", "question"]
    run_id: UUID
    session_id: UUID
    """Where it was asked: for a run that another one spawned, in the session that started its tree."""
    agent: str
    tool: str
    risk: Risk
    shown: str
    """The arguments, sensitive ones masked; or the question."""
    digest: str
    """SHA-256 of the exact call."""
    choices: list[str] | None
    """What a question may be answered with; None: anything."""
    asked_at: datetime
    expires_at: datetime
    decision: Decision | None
    decided_by: str | None
    decided_as: str | None
    """The database's role that brought the decision."""
    reason: str | None
    decided_at: datetime | None
    send: Callable[[UUID, Word, str | None, str], Sent] = field(repr=False, compare=False)

    def approve(self, *, by: str | None = None, reason: str = "") -> Sent:
        """Let the call be made."""
        return self.send(self.id, "approve", by, reason)

    def approve_all(self, *, by: str | None = None, reason: str = "") -> Sent:
        """Let it be made, and whatever else the run calls; not what the runs call that it spawns."""
        return self.send(self.id, "approve_all", by, reason)

    def deny(self, *, by: str | None = None, reason: str = "") -> Sent:
        """Do not let it be made, or do not answer; the model is told the reason."""
        return self.send(self.id, "deny", by, reason)

    def answer(self, text: str, *, by: str | None = None) -> Sent:
        """Answer a question."""
        return self.send(self.id, "answer", by, text)

    def facts(self) -> dict[str, Any]:
        """All that is known of it, by name."""
        return {name: value for name, value in self.__dict__.items() if name != "send"}


_REQUEST = """
    select id, kind, run_id, session_id, agent, tool, risk, shown, digest, choices, asked_at, expires_at, decision,
        decided_by, decided_as, reason, decided_at
    from chaz.approvals
"""


async def waiting(
    database: Database,
    send: Callable[[UUID, Word, str | None, str], Sent],
    *,
    tenant: str,
    session_id: UUID | None = None,
) -> list[Request[Sent]]:
    """The requests that wait for somebody, the oldest first."""
    rows = await database.fetch(
        f"""
        {_REQUEST} where decision is null and tenant = %(tenant)s
            and (%(session)s::uuid is null or session_id = %(session)s)
        order by asked_at, id
        """,
        {"tenant": tenant, "session": session_id},
    )
    return [Request(**row, send=send) for row in rows]


async def request(database: Database, id: UUID, send: Callable[[UUID, Word, str | None, str], Sent]) -> Request[Sent]:
    """The request of this id, as it stands. Raises UnknownRequest."""
    rows = await database.fetch(f"{_REQUEST} where id = %(id)s", {"id": id})
    if not rows:
        raise UnknownRequest(str(id))
    return Request(**rows[0], send=send)


async def beginning_with(database: Database, text: str) -> list[UUID]:
    """The requests whose ids begin so; those of four hexadecimal digits and more, none of any other text.

    Fewer are sooner a slip, such as a shell's variable that is not set, than a choice.
    """
    digits = text.lower().replace("-", "")
    if not re.fullmatch(r"[0-9a-f]{4,32}", digits):
        return []
    rows = await database.fetch(
        "select id from chaz.approvals where id between %(first)s and %(last)s order by asked_at limit 10",
        {"first": UUID(digits.ljust(32, "0")), "last": UUID(digits.ljust(32, "f"))},
    )
    return [row["id"] for row in rows]


async def decide(tx: Transaction, id: UUID, word: Word, by: str | None = None, reason: str = "") -> UUID | None:
    """Send a word: its entry's id; None if the request has been decided already.

    Raises UnknownRequest, InvalidEntry, NotPermitted.
    """
    cursor = await tx.execute(
        "select chaz.decide(%(id)s, %(word)s::text, %(by)s::text, %(reason)s::text) as sent",
        {"id": id, "word": word, "by": by or os.environ.get("USER") or "program", "reason": reason},
    )
    row = await cursor.fetchone()
    assert row is not None
    return row["sent"]


async def no_effect(database: Database, decision: UUID) -> str | None:
    """Why a decision that was placed decided nothing, by its entry's id; None if it did, or is not placed."""
    rows = await database.fetch(
        """
        select n.content from chaz.entries d join chaz.entries n on n.session_id = d.session_id
            and n.position > d.position and n.type = 'note' and n.metadata->>'entry' = d.id::text
        where d.id = %(decision)s order by n.position limit 1
        """,
        {"decision": decision},
    )
    return rows[0]["content"] if rows else None
