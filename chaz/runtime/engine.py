"""The ReAct loop: replay the stored steps, look each call up in the journal, run what is missing, park on a wait,

repeat until the model answers with text. Crash recovery, approvals, children and retries are this one path. It knows
neither broker nor database: what it needs of them is the protocol :class:`~chaz.runtime.running.Journal`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from decimal import Decimal
from functools import partial

from chaz.errors import ModelError, ModelUnavailable
from chaz.outcomes import CallOutcome, Room, ToolCall, Turn, Usage
from chaz.runtime.calling import make_call, remember_sensitive
from chaz.runtime.context import EMPTY
from chaz.runtime.delimiting import DATA_RULE, delimited
from chaz.runtime.masking import without
from chaz.runtime.models import AssistantMessage, HistoryMessage, ToolMessage, ToolSchema
from chaz.runtime.running import (
    FIRST_SLEEP,
    LONGEST_SLEEP,
    Answered,
    CameTo,
    Failed,
    GivenBack,
    Parked,
    RunContext,
    Waiting,
    stops_within,
)
from chaz.runtime.tokens import MESSAGE, Count, counter, schema_tokens
from chaz.runtime.window import Window

MODEL_TRIES = 5
BUDGET_PAUSE = 5.0
"""Seconds that a run waits, without a slot, for others to settle what they hold of its tree's budget."""
ANSWER = 500
"""Tokens that an answer is thought to take, where a budget has to hold them before the model is asked."""
LAST_STEP = "This was your last step with tools. Answer now, in text, with what you have."


async def run(context: RunContext) -> CameTo:
    """Bring the run as far as it goes. Raises what the journal raises, and ModelError."""
    count = counter(context.model)
    taken = _always_shown(context, count)
    window = Window(context.conversation, count, max(0, context.room - taken))
    for step in range(context.max_steps):
        turn = context.steps.get(step)
        window.add(context.heard.get(step, []))
        if turn is None:
            if context.stopping.is_set():
                return GivenBack(0, "its worker is stopping")
            if step > 0:
                window.add(await context.journal.hear(step))
            history = window.show()
            reserve = partial(_reserve, context, step, taken + window.tokens)
            room = await reserve()
            if room in ("none", "held"):
                return _without_room(room)
            last = room == "last" or step == context.max_steps - 1
            try:
                turn = await _ask(context, step, history, reserve, last=last)
            except ModelUnavailable as error:
                if error.retry_after is None or error.retry_after <= LONGEST_SLEEP:
                    return Failed("model", str(error))
                return GivenBack(error.retry_after, str(error))
            if isinstance(turn, GivenBack | Failed):
                return turn
            cost = _cost(context, turn.usage)
            context.limited = await context.journal.store_step(step, turn, cost) or context.limited
        else:
            # What was shown then is cut then, so that what is shown later is the same.
            window.show()
        if not turn.calls:
            return Answered(without(turn.text, context.sensitive))
        if step == context.max_steps - 1:
            break
        outcomes = await _calls(context, step, turn)
        if isinstance(outcomes, Parked | GivenBack):
            return outcomes
        window.add([AssistantMessage(turn=turn)])
        window.add(
            _result(context, step, ordinal, call, outcome)
            for ordinal, (call, outcome) in enumerate(zip(turn.calls, outcomes, strict=True))
        )
    return Failed("steps", f"no answer after {context.max_steps} steps, though the last one had no tools")


def _result(context: RunContext, step: int, ordinal: int, call: ToolCall, outcome: CallOutcome) -> ToolMessage:
    """A call's result as the model sees it: what a tool or an agent gave, as data; chaz's own words as they are."""
    own = outcome.kind in {"cancelled", "unknown"} or outcome.error not in {"", "failed"}
    said = outcome.content if outcome.content.strip() else EMPTY
    content = said if own else delimited(outcome.content, f"{context.run_id}:{step}:{ordinal}")
    return ToolMessage(call_id=call.id, tool=call.tool, content=content, is_error=outcome.kind != "ok")


def _system(context: RunContext) -> str:
    """The agent's instructions; with the rule for what its tools give, and what there is to know of other agents."""
    if context.system is not None:
        return context.system
    parts = [context.agent.instructions, DATA_RULE if context.agent.tool_names else "", context.room_note]
    return "\n\n".join([parts[0], *filter(None, parts[1:])])


def _tools(context: RunContext) -> list[ToolSchema]:
    return context.agent.schemas(context.scope) if context.system is None else []


def _always_shown(context: RunContext, count: Count) -> int:
    """Tokens of what each step shows besides the history, at most."""
    system = _system(context) if context.system is not None else f"{_system(context)}\n\n{LAST_STEP}"
    return MESSAGE + count(system) + schema_tokens(_tools(context), count)


async def _reserve(context: RunContext, step: int, shown: int) -> Room:
    """Hold what the next turn is thought to take: the tokens that the model is shown, and some for the answer."""
    if not context.limited:
        return "free"
    usage = Usage(prompt=shown, completion=ANSWER)
    cost = context.agent.cost(context.model_name, usage)
    return await context.journal.reserve(step, usage.prompt + usage.completion, cost)


def _without_room(room: Room) -> GivenBack | Failed:
    """What a run comes to that cannot take its next turn; it may later where others hold what is left (``held``)."""
    if room == "held":
        return GivenBack(BUDGET_PAUSE, "others of its tree hold what is left of the budget")
    return Failed("budget", "the budget of its tree of runs is used up")


async def _ask(
    context: RunContext,
    step: int,
    history: Sequence[HistoryMessage],
    reserve: Callable[[], Awaitable[Room]],
    *,
    last: bool,
) -> Turn | GivenBack | Failed:
    """The model's next turn; what may pass is tried again, unless the wait is too long for a slot.

    A turn that the model gave and that is refused is booked, and what is left is looked at (``reserve``) before the
    next try.
    """
    # On the last step an answer is asked for without tools, so that a run ends in text.
    tools = [] if last else _tools(context)
    system = _system(context) + (f"\n\n{LAST_STEP}" if last and context.system is None else "")
    for attempt in range(1, MODEL_TRIES + 1):
        await context.journal.wait_for_lease()
        try:
            return await context.model.complete(system, history, tools, timeout=context.agent.model_timeout)
        except ModelError as error:
            booked = await _book_refused(context, step, attempt, error)
            if not isinstance(error, ModelUnavailable):
                raise
            wait = error.retry_after if error.retry_after is not None else FIRST_SLEEP * 2 ** (attempt - 1)
            if attempt == MODEL_TRIES or wait > LONGEST_SLEEP:
                raise
            if await stops_within(context.stopping, wait):
                return GivenBack(wait, f"its worker is stopping; {error}")
            if booked and (room := await reserve()) in ("none", "held"):
                return _without_room(room)
    raise AssertionError("unreachable")


async def _book_refused(context: RunContext, step: int, attempt: int, error: ModelError) -> bool:
    """Store what a refused turn used, where that is known: it is paid for. Whether it was."""
    if error.usage is None:
        return False
    usage = Usage.model_validate(error.usage)
    await context.journal.book(step, attempt, usage, _cost(context, usage))
    return True


def _cost(context: RunContext, usage: Usage) -> Decimal | None:
    """What a turn costs; None where that is not known: no price, or an endpoint that does not say what it took."""
    return None if usage == Usage() else context.agent.cost(context.model_name, usage)


async def _calls(context: RunContext, step: int, turn: Turn) -> list[CallOutcome] | Parked | GivenBack:
    """What a turn's calls come to, made at once: an outcome of each, or why the run stops here.

    So no turn is ever shown with a call that has no result; one that was cut off is found in the journal, and told as
    what may or may not have run.
    """
    # All of them first: what one is given in a sensitive parameter, another may have in any.
    remember_sensitive(context, turn)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(make_call(context, step, ordinal, call)) for ordinal, call in enumerate(turn.calls)
            ]
    except BaseExceptionGroup as failed:
        # Tools raise nothing; this is the journal, and one reason is enough.
        raise failed.exceptions[0] from None
    came_to = [task.result() for task in tasks]
    for withheld in came_to:
        if isinstance(withheld, GivenBack):
            return withheld
    if waits := Counter(call.waits_for for call in came_to if isinstance(call, Waiting)):
        return Parked(", ".join(name if n == 1 else f"{n} x {name}" for name, n in waits.items()))
    return [outcome for outcome in came_to if isinstance(outcome, CallOutcome)]
