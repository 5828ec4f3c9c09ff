"""A run's reads and writes through an outage of the database: what was in doubt is looked up, the rest done again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar
from uuid import UUID

from chaz.database import Database, Transaction
from chaz.errors import DatabaseUnavailable

logger = logging.getLogger("chaz.worker")

T = TypeVar("T")

LOST_PAUSE = 0.5
"""Seconds between two tries when a connection was lost."""


async def _never(_: Transaction) -> None:
    return None


async def surely(
    database: Database,
    run_id: UUID,
    work: Callable[[Transaction], Awaitable[T]],
    done: Callable[[Transaction], Awaitable[T | None]] = _never,
) -> T:
    """Do ``work`` in a transaction, for as long as it takes to reach the database; what it gives.

    A model's turn or a tool's result is too dear to be lost to a restart of the database. A write may come late, since
    it is fenced: it raises StaleAttempt once somebody else has the run. Before it is tried again, ``done`` locks the
    run's row, so as to wait for a commit in doubt, and gives what ``work`` gave if that came through, else None.
    """
    try:
        return await database.transact(work)
    except DatabaseUnavailable as error:
        logger.warning("worker: run=%s: %s; trying again", run_id, error)
    while True:
        await asyncio.sleep(LOST_PAUSE)
        try:
            found = await database.transact(done)
            return await database.transact(work) if found is None else found
        except DatabaseUnavailable as error:
            logger.debug("worker: run=%s: %s; trying again", run_id, error)
