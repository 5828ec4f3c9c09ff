"""The store of callbacks: which ends are to be told now, and what came of it. Each is told at least once.

Taking one puts its next try off, so that nobody else takes it meanwhile; it is gone once it has been told.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from pydantic import TypeAdapter

from chaz import runs, usage
from chaz.callbacks import Callback, TaskCallback, Webhook
from chaz.database import Database, Row, Transaction
from chaz.outcomes import FINAL_STATES

TELLING_TAKES = timedelta(minutes=2)
"""How long a process may take to tell what it took; then another one may."""
LONGEST_PAUSE = timedelta(hours=1)
"""Between two tries, at most: the pause starts at 2 s and doubles."""
GIVEN_UP_AFTER = timedelta(days=1)
"""How long after the run's end it is tried; then it is given up, and `chaz doctor` shows it."""

_TARGET: TypeAdapter[Webhook | TaskCallback] = TypeAdapter(Callback)


@dataclass(frozen=True)
class End:
    """An end that is to be told."""

    entry: UUID
    """The entry whose sender asked to be told."""
    run: UUID
    """The run that answered it: of the same id, unless another one took its message."""
    target: Webhook | TaskCallback
    session: UUID
    agent: str | None
    state: str
    """``succeeded``, ``failed``, ``cancelled``, or ``nobody``: the entry woke no agent."""
    reason: str | None
    result: str | None
    usage: dict[str, Any]
    at: str | None
    """When it ended, in ISO 8601."""

    @property
    def succeeded(self) -> bool:
        """Whether there is an answer; where nobody was woken it is None."""
        return self.state not in {"failed", "cancelled"}


async def take(database: Database, *, without: Collection[UUID] = (), limit: int = 100) -> list[End]:
    """Take the ends that are due, but for those ``without``."""

    async def work(tx: Transaction) -> list[Row]:
        cursor = await tx.execute(
            """
            with due as (
                select run_id from chaz.callbacks
                where due_at <= now() and given_up_at is null and run_id <> all(%(without)s::uuid[])
                order by due_at limit %(limit)s for update skip locked)
            update chaz.callbacks c set tries = tries + 1, due_at = now() + %(takes)s
            from due where c.run_id = due.run_id returning c.run_id, c.target
            """,
            {"limit": limit, "takes": TELLING_TAKES, "without": list(without)},
        )
        return list(await cursor.fetchall())

    taken = await database.transact(work)
    if not taken:
        return []
    found = await runs.status(database, [row["run_id"] for row in taken])
    spent = await usage.of_runs(database, [row["id"] for row in found.values()])
    ends: list[End] = []
    for row in taken:
        status = found.get(row["run_id"])
        if status is None or status["state"] not in FINAL_STATES | {"nobody"}:
            await put_back(database, row["run_id"])
            continue
        ends.append(
            End(
                entry=row["run_id"],
                run=status["id"],
                target=_TARGET.validate_python(row["target"]),
                session=status["session_id"],
                agent=status["agent"],
                state=status["state"],
                reason=status["reason"],
                result=status["result"],
                usage=spent[status["id"]].model_dump(mode="json"),
                at=status["ended_at"].isoformat() if status["ended_at"] else None,
            )
        )
    return ends


async def put_back(database: Database, run_id: UUID) -> None:
    """Wait for the run's end: it was superseded by one that has ended, and goes on all the same."""

    async def work(tx: Transaction) -> None:
        await tx.execute(
            "update chaz.callbacks set ended_at = null, due_at = null, tries = 0 where run_id = %(run)s",
            {"run": run_id},
        )

    await database.transact(work)


async def told(database: Database, run_id: UUID) -> None:
    """It has been told: the callback is gone."""

    async def work(tx: Transaction) -> None:
        await tx.execute("delete from chaz.callbacks where run_id = %(run)s", {"run": run_id})

    await database.transact(work)


async def not_told(database: Database, run_id: UUID, error: str) -> bool:
    """It could not be told, for now or (True) for good."""

    async def work(tx: Transaction) -> bool:
        cursor = await tx.execute(
            """
            update chaz.callbacks set last_error = left(%(error)s, 2000),
                due_at = now() + least(power(2, least(tries, 20)) * interval '1 second', %(longest)s),
                given_up_at = case when ended_at < now() - %(after)s then now() end
            where run_id = %(run)s returning given_up_at is not null as given_up
            """,
            {"run": run_id, "error": error, "longest": LONGEST_PAUSE, "after": GIVEN_UP_AFTER},
        )
        row = await cursor.fetchone()
        return row is not None and row["given_up"]

    return await database.transact(work)
