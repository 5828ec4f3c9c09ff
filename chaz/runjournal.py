"""The engine's journal, as a worker keeps it: in PostgreSQL, by one attempt, and told to the audit trail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from chaz import journal, steering
from chaz.database import Database, Transaction
from chaz.deliveries import AuditEvent
from chaz.outcomes import CallOutcome, ToolCall, Turn, Usage
from chaz.runs import Claim
from chaz.runtime.context import spoken
from chaz.runtime.models import HistoryMessage
from chaz.writes import surely

T = TypeVar("T")


class RunJournal:
    """The engine's journal, in PostgreSQL; what it stores it then tells to the audit trail."""

    def __init__(
        self,
        database: Database,
        claim: Claim,
        version: str,
        tell: Callable[[list[AuditEvent]], None],
        wait_for_lease: Callable[[], Awaitable[None]],
    ) -> None:
        self._database = database
        self._claim = claim
        self._version = version
        self._tell = tell
        self._wait_for_lease = wait_for_lease
        self.read_to = claim.read_to
        """The last position that the run has read."""

    async def wait_for_lease(self) -> None:
        await self._wait_for_lease()

    async def store_step(self, step: int, turn: Turn, usage: Usage) -> None:
        await self._write(
            partial(journal.store_step, claim=self._claim, step=step, turn=turn, version=self._version, usage=usage),
            partial(journal.has_step, claim=self._claim, step=step),
        )

    async def hear(self, step: int) -> Sequence[HistoryMessage]:
        if not await surely(self._database, self._claim.run_id, partial(steering.is_spoken_to, claim=self._claim)):
            return []
        hear = partial(steering.hear, claim=self._claim, step=step, after=self.read_to)
        entries = await surely(self._database, self._claim.run_id, hear)
        self.read_to = max([self.read_to, *(entry.position or 0 for entry in entries)])
        return spoken(entries)

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
        return await surely(self._database, self._claim.run_id, write, written)
