"""The engine's journal, as a worker keeps it: in PostgreSQL, by one attempt, and told to the audit trail."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from decimal import Decimal
from functools import partial
from typing import TypeVar
from uuid import UUID

from chaz import approvals, children, compactions, journal, rates, scheduling, steering
from chaz.asking import Approving, Ask
from chaz.children import Asked
from chaz.database import REFUSED, Database, Transaction
from chaz.deliveries import AuditEvent
from chaz.entries import Budget
from chaz.lineage import Spawn
from chaz.outcomes import CallOutcome, Room, ToolCall, Turn, Usage, typed_error
from chaz.planning import Ceilings, ScheduleCall
from chaz.runs import Claim
from chaz.runtime.context import spoken
from chaz.runtime.models import HistoryMessage
from chaz.runtime.policy import Rate
from chaz.writes import surely

logger = logging.getLogger("chaz.worker")

T = TypeVar("T")


class RunJournal:
    """The engine's journal, in PostgreSQL; what it stores it then tells to the audit trail."""

    def __init__(
        self,
        database: Database,
        claim: Claim,
        version: str,
        model: str,
        budget: Budget,
        approving: Approving,
        tell: Callable[[list[AuditEvent]], None],
        wait_for_lease: Callable[[], Awaitable[None]],
        ceilings: Ceilings,
    ) -> None:
        self._database = database
        self._claim = claim
        self._version = version
        self._model = model
        self._budget = budget
        self._approving = approving
        self._ceilings = ceilings
        self._tell = tell
        self._wait_for_lease = wait_for_lease
        self.read_to = claim.read_to
        """The last position that the run has read."""
        self.seen: int | None = None
        """The last position that its model is shown, of one that is not shown all of that."""
        self.limited = claim.limited or (claim.is_top and budget != Budget())
        """Whether its next turn has to be reserved."""

    async def wait_for_lease(self) -> None:
        await self._wait_for_lease()

    async def reserve(self, step: int, tokens: int, cost: Decimal | None) -> Room:
        wanted = {"step": step, "tokens": tokens, "cost": cost, "budget": self._budget, "model": self._model}
        return await surely(self._database, self._claim.run_id, partial(journal.reserve, claim=self._claim, **wanted))

    async def store_step(self, step: int, turn: Turn, cost: Decimal | None) -> bool:
        limited = await self._write(
            partial(
                journal.store_step,
                claim=self._claim,
                step=step,
                turn=turn,
                version=self._version,
                model=self._model,
                cost=cost,
                seen=self.seen,
            ),
            partial(journal.has_step, claim=self._claim, step=step),
        )
        self.limited = self.limited or limited
        return self.limited

    async def book(self, step: int, attempt: int, usage: Usage, cost: Decimal | None) -> None:
        place = {"claim": self._claim, "step": step, "number": attempt}
        await self._write(
            partial(journal.book_refused, **place, usage=usage, model=self._model, cost=cost),
            partial(journal.has_refused, **place),
        )

    async def hear(self, step: int) -> Sequence[HistoryMessage]:
        spoken_to = partial(steering.is_spoken_to, claim=self._claim, after=self.read_to)
        if not await surely(self._database, self._claim.run_id, spoken_to):
            return []
        hear = partial(steering.hear, claim=self._claim, step=step, after=self.read_to)
        entries = await surely(self._database, self._claim.run_id, hear)
        self.read_to = max([self.read_to, *(entry.position or 0 for entry in entries)])
        return spoken(entries)

    async def admit(self, tool: str, rate: Rate, *, within: float) -> float:
        admit = partial(rates.admit, tool=tool, burst=rate.burst, interval=rate.interval, within=within)
        return await surely(self._database, self._claim.run_id, admit)

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

    async def refuse_call(self, step: int, ordinal: int, call: ToolCall, outcome: CallOutcome) -> None:
        place = {"claim": self._claim, "step": step, "ordinal": ordinal, "call": call}
        events = await self._write(
            partial(journal.refuse_call, **place, outcome=outcome), partial(journal.told_refusal, **place)
        )
        self._tell(events)

    async def start_spawn(self, step: int, ordinal: int, call: ToolCall, spawn: Spawn) -> CallOutcome | None:
        return await self._ask(step, ordinal, partial(children.start_spawn, call=call, spawn=spawn))

    async def ask_for(self, step: int, ordinal: int, call: ToolCall, child: UUID) -> CallOutcome | None:
        return await self._ask(step, ordinal, partial(children.ask_for, call=call, child=child))

    async def request_compaction(self, step: int, ordinal: int, call: ToolCall) -> CallOutcome | None:
        return await self._ask(step, ordinal, partial(compactions.request, call=call))

    async def ask(self, step: int, ordinal: int, call: ToolCall, ask: Ask) -> CallOutcome | None:
        place = {"claim": self._claim, "step": step, "ordinal": ordinal}
        write = partial(approvals.ask, **place, call=call, ask=ask, deployment=self._approving)
        try:
            asked = await self._write(write, partial(approvals.asked, **place))
        except REFUSED as error:
            # What people cannot be shown, they cannot approve.
            logger.exception("run=%s: a request to people cannot be stored", self._claim.run_id)
            why = f"the request for a person's word could not be stored ({type(error).__name__})"
            outcome = typed_error("denied", why)
            if ask.kind == "question":
                # It is the call itself, and has its result by this; of another call that is the engine's to store.
                await self.refuse_call(step, ordinal, call, outcome)
            return outcome
        self._tell(asked.events)
        return asked.outcome

    async def schedule(self, step: int, ordinal: int, call: ToolCall, wanted: ScheduleCall) -> CallOutcome:
        outcome = await self._ask(
            step, ordinal, partial(scheduling.perform, call=call, wanted=wanted, ceilings=self._ceilings)
        )
        assert outcome is not None
        return outcome

    async def _ask(self, step: int, ordinal: int, ask: Callable[..., Awaitable[Asked]]) -> CallOutcome | None:
        place = {"claim": self._claim, "step": step, "ordinal": ordinal}
        asked = await self._write(partial(ask, **place), partial(children.told, **place))
        self._tell(asked.events)
        return asked.outcome

    async def _write(
        self, write: Callable[[Transaction], Awaitable[T]], written: Callable[[Transaction], Awaitable[T | None]]
    ) -> T:
        return await surely(self._database, self._claim.run_id, write, written)
