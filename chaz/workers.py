"""The store of worker processes: one lease each, a row that only its process updates."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

import psycopg
from psycopg.rows import DictRow

from chaz.database import Transaction

BEAT = """
    with beat as (
        insert into chaz.workers (id, name, pid, isolation, expires_at)
        values (%(id)s, %(name)s, %(pid)s, %(isolation)s, clock_timestamp() + %(lease)s)
        on conflict (id) do update set beat_at = clock_timestamp(), expires_at = excluded.expires_at
        returning id)
    select r.id, r.attempt from beat left join chaz.runs r on r.worker_id = beat.id and r.state = 'running'
"""


def beat(
    connection: psycopg.Connection[DictRow],
    worker_id: UUID,
    *,
    name: str,
    pid: int,
    lease: timedelta,
    isolation: bool = False,
) -> dict[UUID, int]:
    """Renew the process's lease; the attempts by run that the database says it owns.

    Synchronous and on a connection of its own: it must not wait for the loop, the pool or another row's lock.
    """
    facts = {"id": worker_id, "name": name, "pid": pid, "lease": lease, "isolation": isolation}
    rows = connection.execute(BEAT, facts).fetchall()
    return {row["id"]: row["attempt"] for row in rows if row["id"] is not None}


async def owned(tx: Transaction, worker_id: UUID) -> dict[UUID, int]:
    """The attempts by run that the database says the process owns."""
    cursor = await tx.execute(
        "select id, attempt from chaz.runs where worker_id = %(id)s and state = 'running'", {"id": worker_id}
    )
    return {row["id"]: row["attempt"] for row in await cursor.fetchall()}


async def leave(tx: Transaction, worker_id: UUID) -> None:
    """Take back the lease of a process that ends in order; what it still owned is free at the next sweep."""
    await tx.execute("update chaz.workers set expires_at = clock_timestamp() where id = %(id)s", {"id": worker_id})
