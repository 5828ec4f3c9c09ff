"""The ReAct loop: replay the stored steps, look each call up in the journal, run what is missing, park on a wait,

repeat until the model answers with text. Crash recovery, children and retries are this one path. It knows neither
broker nor database: what it needs of them is the protocol :class:`Journal`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Protocol
from uuid import UUID

from chaz.entries import SecretsPolicy
from chaz.errors import ModelUnavailable
from chaz.lineage import Scope, Spawn, in_scope
from chaz.outcomes import CallOutcome, Room, ToolCall, Turn, Usage, typed_error
from chaz.runtime.agents import Agent
from chaz.runtime.builtin import AGENT_RESULT, SPAWN_AGENT
from chaz.runtime.delimiting import DATA_RULE, delimited
from chaz.runtime.egress import Egress
from chaz.runtime.masking import shown_arguments
from chaz.runtime.models import (
    AssistantMessage,
    ChatModel,
    HistoryMessage,
    ToolMessage,
    ToolSchema,
)
from chaz.runtime.policy import Rate
from chaz.runtime.spawning import waits_for, wanted_result, wanted_spawn
from chaz.runtime.threads import ToolThreads
from chaz.runtime.tools import CallContext

logger = logging.getLogger("chaz.worker")

MODEL_TRIES = 5
FIRST_SLEEP = 0.5
LONGEST_SLEEP = 10.0
"""Seconds that a run may wait in its slot for a model, for longer it is given back; and for a tool, for longer its call
is refused."""
BUDGET_PAUSE = 5.0
"""Seconds that a run waits, without a slot, for others to settle what they hold of its tree's budget."""
ANSWER = 500
"""Tokens that a turn is thought to take besides what the model is shown."""

MAY_HAVE_RUN = CallOutcome(
    kind="unknown",
    content="the worker was lost during this call: it may or may not have run. Check before you repeat it.",
)
LAST_STEP = "This was your last step with tools. Answer now, in text, with what you have."


@dataclass(frozen=True)
class Record:
    """A call as the journal has it. Neither outcome, answer nor waiting: it had started when a worker was lost."""

    outcome: CallOutcome | None = None
    answer: CallOutcome | None = None
    """What its wait was answered with, not yet its result."""
    waiting: bool = False


class Journal(Protocol):
    """What the engine writes before and after each effect."""

    async def reserve(self, step: int, tokens: int, cost: Decimal) -> Room:
        """Hold what a turn is thought to take of its tree's budget, before the model is asked."""
        ...

    async def store_step(self, step: int, turn: Turn, usage: Usage, cost: Decimal) -> None:
        """Store a turn, before any of its calls runs; ``usage`` is the run's so far, ``cost`` the turn's."""
        ...

    async def admit(self, tool: str, rate: Rate, *, within: float) -> float:
        """Seconds until the tool may be called next, on all machines together; it is taken if not above ``within``."""
        ...

    async def start_call(self, step: int, ordinal: int, call: ToolCall, *, shown: str) -> None:
        """Store that a call starts, before it does; ``shown`` is what others may see of its arguments."""
        ...

    async def finish_call(self, step: int, ordinal: int, call: ToolCall, outcome: CallOutcome) -> None:
        """Store what a call came to."""
        ...

    async def refuse_call(self, step: int, ordinal: int, call: ToolCall, outcome: CallOutcome) -> None:
        """Store a call that is refused before anything of it could run, with what it came to, all at once."""
        ...

    async def start_spawn(self, step: int, ordinal: int, call: ToolCall, spawn: Spawn) -> CallOutcome | None:
        """Store the call, a child with its directive, and the wait for its answer, all at once.

        Returns the call's result, stored with it, where there is nothing to wait for: the child's id, or a refusal.
        """
        ...

    async def ask_for(self, step: int, ordinal: int, call: ToolCall, child: UUID) -> CallOutcome | None:
        """Store the call and what it came to: a descendant's answer, or (None) a wait for that."""
        ...

    async def hear(self, step: int) -> Sequence[HistoryMessage]:
        """What was said to the running agent since its last step; from now on part of what this step's model sees."""
        ...

    async def wait_for_lease(self) -> None:
        """Wait until the worker surely still owns the run; what another one took over is cancelled meanwhile."""
        ...


@dataclass(frozen=True)
class Answered:
    """The run's answer."""

    text: str


@dataclass(frozen=True)
class Parked:
    """The run waits, and needs no worker meanwhile; ``waits_for`` is for people."""

    waits_for: str


@dataclass(frozen=True)
class GivenBack:
    """The run stops at a step boundary and may go on anywhere after ``wait`` seconds."""

    wait: float
    reason: str


@dataclass(frozen=True)
class Failed:
    """The run cannot go on."""

    reason: str
    text: str


CameTo = Answered | Parked | GivenBack | Failed


@dataclass
class RunContext:
    """One run, as the engine needs it."""

    run_id: UUID
    session_id: UUID
    agent: Agent
    model: ChatModel
    model_name: str
    journal: Journal
    threads: ToolThreads
    history: list[HistoryMessage]
    max_steps: int
    depth_left: int
    """How many levels deep it may spawn."""
    egress: Egress
    """What takes the secrets out of all that leaves."""
    scope: Scope = ()
    """Which of its agent's tools it may use."""
    limited: bool = False
    """Whether its tree has a budget, so that each turn is reserved first."""
    steps: dict[int, Turn] = field(default_factory=dict[int, Turn])
    """The stored turns."""
    calls: dict[tuple[int, int], Record] = field(default_factory=dict[tuple[int, int], Record])
    """The stored calls by step and ordinal."""
    heard: dict[int, list[HistoryMessage]] = field(default_factory=dict[int, list[HistoryMessage]])
    """What had been said to it before a step, by the step."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the worker wants to stop: the run is given back at the next step boundary."""
    shutdown: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the worker's process is to end: no call waits any longer for its turn, or for another try."""


async def run(context: RunContext) -> CameTo:
    """Bring the run as far as it goes. Raises what the journal raises, and ModelError."""
    history = list(context.history)
    usage = Usage()
    for step in range(context.max_steps):
        turn = context.steps.get(step)
        history.extend(context.heard.get(step, []))
        if turn is None:
            if context.stopping.is_set():
                return GivenBack(0, "its worker is stopping")
            if step > 0:
                history.extend(await context.journal.hear(step))
            room = await _reserve(context, step, history)
            if room == "none":
                return Failed("budget", "the budget of its tree of runs is used up")
            if room == "held":
                return GivenBack(BUDGET_PAUSE, "others of its tree hold what is left of the budget")
            last = room == "last" or step == context.max_steps - 1
            try:
                turn = await _ask(context, history, last=last)
            except ModelUnavailable as error:
                if error.retry_after is None or error.retry_after <= LONGEST_SLEEP:
                    return Failed("model", str(error))
                return GivenBack(error.retry_after, str(error))
            if isinstance(turn, GivenBack):
                return turn
            usage += turn.usage
            cost = context.agent.cost(context.model_name, turn.usage)
            await context.journal.store_step(step, turn, usage, cost)
        else:
            usage += turn.usage
        if not turn.calls:
            return Answered(turn.text)
        if step == context.max_steps - 1:
            break
        came_to = await _calls(context, step, turn)
        outcomes = [outcome for outcome in came_to if not isinstance(outcome, GivenBack)]
        for withheld in came_to:
            if isinstance(withheld, GivenBack):
                return withheld
        waiting = [call for call, outcome in zip(turn.calls, outcomes, strict=True) if outcome is None]
        if waiting:
            counts = Counter(waits_for(call) for call in waiting)
            return Parked(", ".join(name if n == 1 else f"{n} x {name}" for name, n in counts.items()))
        history.append(AssistantMessage(turn=turn))
        history.extend(
            _result(context, step, ordinal, call, outcome)
            for ordinal, (call, outcome) in enumerate(zip(turn.calls, outcomes, strict=True))
            if outcome is not None
        )
    return Failed("steps", f"no answer after {context.max_steps} steps, though the last one had no tools")


def _result(context: RunContext, step: int, ordinal: int, call: ToolCall, outcome: CallOutcome) -> ToolMessage:
    """A call's result as the model sees it: what a tool or an agent gave, as data; chaz's own words as they are."""
    own = outcome.kind in {"cancelled", "unknown"} or outcome.error not in {"", "failed"}
    content = outcome.content if own else delimited(outcome.content, f"{context.run_id}:{step}:{ordinal}")
    return ToolMessage(call_id=call.id, tool=call.tool, content=content, is_error=outcome.kind != "ok")


def _system(context: RunContext) -> str:
    """The agent's instructions; where it has tools, with the rule for what they give."""
    instructions = context.agent.instructions
    return f"{instructions}\n\n{DATA_RULE}" if context.agent.tool_names else instructions


async def stops_within(stopping: asyncio.Event, seconds: float) -> bool:
    """Wait so long, or until the worker wants to stop; whether it does."""
    try:
        async with asyncio.timeout(seconds):
            return await stopping.wait()
    except TimeoutError:
        return False


async def _reserve(context: RunContext, step: int, history: Sequence[HistoryMessage]) -> Room:
    """Hold what the next turn is thought to take: about a token for 4 characters, and some for the answer."""
    if not context.limited:
        return "free"
    shown = [_system(context), *(message.model_dump_json() for message in history)]
    shown += [schema.model_dump_json() for schema in context.agent.schemas(context.scope)]
    usage = Usage(prompt=sum(map(len, shown)) // 4, completion=ANSWER)
    cost = context.agent.cost(context.model_name, usage)
    return await context.journal.reserve(step, usage.prompt + usage.completion, cost)


async def _ask(context: RunContext, history: Sequence[HistoryMessage], *, last: bool) -> Turn | GivenBack:
    """The model's next turn; what may pass is tried again, unless the wait is too long for a slot."""
    # On the last step an answer is asked for without tools, so that a run ends in text.
    system = _system(context) + (f"\n\n{LAST_STEP}" if last else "")
    tools: Sequence[ToolSchema] = [] if last else context.agent.schemas(context.scope)
    for attempt in range(1, MODEL_TRIES + 1):
        await context.journal.wait_for_lease()
        try:
            return await context.model.complete(system, history, tools, timeout=context.agent.model_timeout)
        except ModelUnavailable as error:
            wait = error.retry_after if error.retry_after is not None else FIRST_SLEEP * 2 ** (attempt - 1)
            if attempt == MODEL_TRIES or wait > LONGEST_SLEEP:
                raise
            if await stops_within(context.stopping, wait):
                return GivenBack(wait, f"its worker is stopping; {error}")
    raise AssertionError("unreachable")


async def _calls(context: RunContext, step: int, turn: Turn) -> list[CallOutcome | GivenBack | None]:
    """The outcomes of a turn's calls, run at once; None where one waits."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_call(context, step, ordinal, call)) for ordinal, call in enumerate(turn.calls)]
    except BaseExceptionGroup as failed:
        # Tools raise nothing; this is the journal, and one reason is enough.
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _call(context: RunContext, step: int, ordinal: int, call: ToolCall) -> CallOutcome | GivenBack | None:
    """One call: from the journal as far as it is there, else for real. None while it waits.

    GivenBack, with nothing written, where it has not begun (again) when the worker's process is to end.
    """
    journal = context.journal
    call = call.model_copy(update={"tool": context.agent.named(call.tool)})
    policy = context.agent.policy(call.tool)
    record = context.calls.get((step, ordinal))
    if record is not None and (record.outcome is not None or record.waiting):
        return record.outcome
    masked = shown_arguments(call.arguments, policy.sensitive_params)
    call = await context.egress.shown(call, masked, _secrets(context, call))
    if record is not None:
        if record.answer is not None:
            outcome = record.answer
        elif policy.idempotent:
            outcome = _refused(context, call) or await _turn_of(context, call)
            if isinstance(outcome, GivenBack):
                return outcome
            if outcome is None:
                outcome = await _execute(context, step, ordinal, call)
        else:
            outcome = MAY_HAVE_RUN
        await journal.finish_call(step, ordinal, call, outcome)
        return outcome
    await journal.wait_for_lease()
    outcome = _refused(context, call)
    # What another agent is told goes to the log and to its model.
    asked = call if call.shown is None else call.model_copy(update={"arguments": call.shown})
    if outcome is None and call.tool == SPAWN_AGENT:
        spawn = wanted_spawn(asked, context.agent, context.scope, context.depth_left)
        if isinstance(spawn, Spawn):
            return await journal.start_spawn(step, ordinal, call, spawn)
        outcome = spawn
    elif outcome is None and call.tool == AGENT_RESULT:
        child = wanted_result(asked)
        if isinstance(child, UUID):
            return await journal.ask_for(step, ordinal, call, child)
        outcome = child
    elif outcome is None:
        outcome = context.agent.tools[call.tool].refusal(call.arguments)
    if outcome is None:
        outcome = await _turn_of(context, call)
    if isinstance(outcome, GivenBack):
        return outcome
    if outcome is not None:
        await journal.refuse_call(step, ordinal, call, outcome)
        return outcome
    await journal.start_call(step, ordinal, call)
    outcome = await _execute(context, step, ordinal, call)
    await journal.finish_call(step, ordinal, call, outcome)
    return outcome


def _refused(context: RunContext, call: ToolCall) -> CallOutcome | None:
    """Why the run may not call this tool; None if it may."""
    if call.tool not in context.agent.tool_names:
        word, why = "unknown_tool", f"there is no tool {call.tool!r}"
    elif not in_scope(context.scope, call.tool):
        word, why = "not_allowed", f"you were spawned without the tool {call.tool!r}"
    elif call.secrets and _secrets(context, call) == "block":
        what = ", ".join(call.secrets)
        return typed_error("secret_arguments", f"{call.tool} was not called: its arguments contain a secret ({what})")
    else:
        return None
    known = ", ".join(schema.name for schema in context.agent.schemas(context.scope)) or "none"
    return typed_error(word, f"{why}; your tools are: {known}")


def _secrets(context: RunContext, call: ToolCall) -> SecretsPolicy:
    return context.agent.policy(call.tool).secrets or context.egress.policy


async def _turn_of(context: RunContext, call: ToolCall) -> CallOutcome | GivenBack | None:
    """Wait until the tool may be called at its rate. None then; else a refusal, or that its worker is to end."""
    rate = context.agent.policy(call.tool).rate
    if rate is None or context.agent.tools[call.tool].refusal(call.arguments) is not None:
        return None
    wait = await context.journal.admit(call.tool, rate, within=LONGEST_SLEEP)
    if wait > LONGEST_SLEEP:
        return typed_error("rate_limited", f"{call.tool} is called too often; try again in {math.ceil(wait)} s")
    if wait > 0 and await stops_within(context.shutdown, wait):
        return GivenBack(wait, "its worker is stopping")
    return None


async def _execute(context: RunContext, step: int, ordinal: int, call: ToolCall) -> CallOutcome:
    """Call a tool whose turn it is, as often as its policy has it tried; the last outcome counts."""
    tool, policy = context.agent.tools[call.tool], context.agent.policy(call.tool)
    tries = 1 + (0 if tool.refusal(call.arguments) else policy.retries)
    for attempt in range(1, tries + 1):
        # To store the start, or to wait for this try, may have taken long.
        await context.journal.wait_for_lease()
        outcome = await tool.call(
            call.arguments,
            CallContext(context.run_id, context.session_id, context.agent.name, step, ordinal),
            context.threads,
            timeout=policy.timeout,
        )
        outcome = await context.egress.outcome(call.tool, outcome, _secrets(context, call))
        if outcome.kind == "ok" or attempt == tries:
            return outcome
        pause = min(FIRST_SLEEP * 2 ** (attempt - 1), LONGEST_SLEEP)
        # Not what it raised: that may hold what it was called with.
        logger.warning(
            "tool %s of run=%s failed in try %d of %d; again in %g s",
            *(call.tool, context.run_id, attempt, tries, pause),
        )
        if await stops_within(context.shutdown, pause) or await _turn_of(context, call) is not None:
            return outcome
    raise AssertionError("unreachable")
