"""The engine's journal, as a worker keeps it: in PostgreSQL, by one attempt, and told to the audit trail."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from chaz import journal, runs
from chaz.database import Database, Transaction
from chaz.deliveries import AuditEvent
from chaz.errors import DatabaseUnavailable
from chaz.outcomes import CallOutcome, ToolCall, Turn, Usage
from chaz.runs import Claim

logger = logging.getLogger("chaz.worker")

T = TypeVar("T")

LOST_PAUSE = 0.5
"""Seconds between two tries of a write whose connection was lost."""


class RunJournal:
    """The engine's journal, in PostgreSQL; what it stores it then tells to the audit trail.

    A write whose connection is lost is tried again for as long as the lease surely holds: a model's turn or a tool's
    result is too dear to be lost to a restart of the database. Whether the lost one was committed is looked up first.
    """

    def __init__(
        self,
        database: Database,
        claim: Claim,
        version: str,
        tell: Callable[[list[AuditEvent]], None],
        check: Callable[[Claim], None],
    ) -> None:
        self._database = database
        self._claim = claim
        self._version = version
        self._tell = tell
        self._check = check

    def check_lease(self) -> None:
        self._check(self._claim)

    async def store_step(self, step: int, turn: Turn, usage: Usage) -> None:
        await self._write(
            partial(journal.store_step, claim=self._claim, step=step, turn=turn, version=self._version, usage=usage),
            partial(journal.has_step, claim=self._claim, step=step),
        )

    async def start_call(self, step: int, ordinal: int, call: ToolCall) -> None:
        place = {"claim": self._claim, "step": step, "ordinal": ordinal, "call": call}
        event = await self._write(partial(journal.start_call, **place), partial(journal.told_call, **place))
        self._tell([event])

    async def finish_call(self, step: int, ordinal: int, call: ToolCall, outcome: CallOutcome) -> None:
        place = {"claim": self._claim, "step": step, "ordinal": ordinal, "call": call}
        event = await self._write(
            partial(journal.finish_call, **place, outcome=outcome), partial(journal.told_result, **place)
        )
        self._tell([event])

    async def start_spawn(self, step: int, ordinal: int, call: ToolCall, agent: str, instruction: str) -> None:
        place = {"claim": self._claim, "step": step, "ordinal": ordinal, "call": call}
        event = await self._write(
            partial(journal.start_spawn, **place, agent=agent, instruction=instruction),
            partial(journal.told_call, **place),
        )
        self._tell([event])

    async def _write(
        self, write: Callable[[Transaction], Awaitable[T]], written: Callable[[Transaction], Awaitable[T | None]]
    ) -> T:
        try:
            return await self._database.transact(write)
        except DatabaseUnavailable as error:
            logger.warning("worker: run=%s: %s; trying again", self._claim.run_id, error)

        async def look_and_write(tx: Transaction) -> T:
            # The fence waits for the lost transaction, should the server still be at it.
            await runs.fence(tx, self._claim)
            found = await written(tx)
            return await write(tx) if found is None else found

        while True:
            self._check(self._claim)
            await asyncio.sleep(LOST_PAUSE)
            with contextlib.suppress(DatabaseUnavailable):
                return await self._database.transact(look_and_write)
