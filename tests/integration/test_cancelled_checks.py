"""A pooled connection whose check is cancelled goes on in transactions, or not at all."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from chaz.database import Database, Transaction
from tests.fixtures.postgres import ScratchDatabase

pytestmark = pytest.mark.anyio


async def transaction_ids(tx: Transaction) -> set[str]:
    found: set[str] = set()
    for _ in range(2):
        row = await (await tx.execute("select pg_current_xact_id()::text as id")).fetchone()
        assert row is not None
        found.add(row["id"])
    return found


async def test_no_connection_commits_by_itself_after_a_cancelled_check(
    database: ScratchDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy loop psycopg lets others run, and so be cancelled, where it need not wait; here always.
    monkeypatch.setattr("psycopg.waiting.MAX_BUSY_TIME", -1)
    monkeypatch.setattr("chaz.database.IDLE_FOR", 0.0)
    pool = await Database(database.url, size=1).open()
    try:
        assert len(await pool.transact(transaction_ids)) == 1
        for turns in range(1, 20):
            task = asyncio.create_task(pool.transact(transaction_ids))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            assert len(await pool.transact(transaction_ids)) == 1
    finally:
        await pool.close()
