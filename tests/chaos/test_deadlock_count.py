"""The server's count of deadlocks, on which other tests rely: one that happens is in it."""

from __future__ import annotations

import asyncio
from threading import Barrier
from uuid import UUID

import psycopg
import pytest

from tests.fixtures.postgres import ScratchDatabase, both_servers
from tests.fixtures.races import at_once, deadlocks

pytestmark = [pytest.mark.anyio, pytest.mark.chaos, pytest.mark.timeout(60), both_servers]


async def test_a_deadlock_is_counted(database: ScratchDatabase) -> None:
    rows = database.query(
        "insert into chaz.heads (session_id) select gen_random_uuid() from generate_series(1, 2) returning session_id"
    )
    both_have_one = Barrier(2)

    def lock(first: UUID, second: UUID) -> None:
        with database.connect() as connection:
            connection.execute("select from chaz.heads where session_id = %s for update", [first])
            both_have_one.wait(10)
            connection.execute("select from chaz.heads where session_id = %s for update", [second])

    one, two = (row["session_id"] for row in rows)
    assert deadlocks(database) == 0
    with pytest.raises(ExceptionGroup) as killed:
        await at_once(asyncio.to_thread(lock, one, two), asyncio.to_thread(lock, two, one))
    assert [type(error) for error in killed.value.exceptions] == [psycopg.errors.DeadlockDetected]
    assert deadlocks(database) == 1
