"""The ReAct loop: replay the stored steps, look each call up in the journal, run what is missing, park on a wait,

repeat until the model answers with text. Crash recovery, children and retries are this one path. It knows neither
broker nor database: what it needs of them is the protocol :class:`Journal`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol
from uuid import UUID

from pydantic import ValidationError

from chaz.errors import ModelUnavailable
from chaz.outcomes import CallOutcome, ToolCall, Turn, Usage
from chaz.runtime.agents import Agent
from chaz.runtime.models import (
    AssistantMessage,
    ChatModel,
    HistoryMessage,
    ToolMessage,
    ToolSchema,
)
from chaz.runtime.threads import ToolThreads
from chaz.runtime.tools import SPAWN_AGENT, CallContext, SpawnArguments

MODEL_TRIES = 5
FIRST_SLEEP = 0.5
LONGEST_SLEEP = 10.0
"""Seconds that a run may wait for a model in its slot; for longer it is given back."""
MAX_DEPTH = 16

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

    async def store_step(self, step: int, turn: Turn, usage: Usage) -> None:
        """Store a turn, before any of its calls runs; ``usage`` is the run's so far."""
        ...

    async def start_call(self, step: int, ordinal: int, call: ToolCall) -> None:
        """Store that a call starts, before it does."""
        ...

    async def finish_call(self, step: int, ordinal: int, call: ToolCall, outcome: CallOutcome) -> None:
        """Store what a call came to."""
        ...

    async def start_spawn(self, step: int, ordinal: int, call: ToolCall, agent: str, instruction: str) -> None:
        """Store the call, a child with its directive, and the wait for its answer, all at once."""
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
    depth: int
    agent: Agent
    model: ChatModel
    journal: Journal
    threads: ToolThreads
    history: list[HistoryMessage]
    max_steps: int
    steps: dict[int, Turn] = field(default_factory=dict[int, Turn])
    """The stored turns."""
    calls: dict[tuple[int, int], Record] = field(default_factory=dict[tuple[int, int], Record])
    """The stored calls by step and ordinal."""
    heard: dict[int, list[HistoryMessage]] = field(default_factory=dict[int, list[HistoryMessage]])
    """What had been said to it before a step, by the step."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the worker wants to stop: the run is given back at the next step boundary."""


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
            try:
                turn = await _ask(context, history, last=step == context.max_steps - 1)
            except ModelUnavailable as error:
                if error.retry_after is None or error.retry_after <= LONGEST_SLEEP:
                    return Failed("model", str(error))
                return GivenBack(error.retry_after, str(error))
            if isinstance(turn, GivenBack):
                return turn
            usage += turn.usage
            await context.journal.store_step(step, turn, usage)
        else:
            usage += turn.usage
        if not turn.calls:
            return Answered(turn.text)
        if step == context.max_steps - 1:
            break
        outcomes = await _calls(context, step, turn)
        waiting = [call for call, outcome in zip(turn.calls, outcomes, strict=True) if outcome is None]
        if waiting:
            counts = Counter(_waits_for(call) for call in waiting)
            return Parked(", ".join(name if n == 1 else f"{n} x {name}" for name, n in counts.items()))
        history.append(AssistantMessage(turn=turn))
        history.extend(
            ToolMessage(call_id=call.id, tool=call.tool, content=outcome.content, is_error=outcome.kind != "ok")
            for call, outcome in zip(turn.calls, outcomes, strict=True)
            if outcome is not None
        )
    return Failed("steps", f"no answer after {context.max_steps} steps, though the last one had no tools")


async def stops_within(stopping: asyncio.Event, seconds: float) -> bool:
    """Wait so long, or until the worker wants to stop; whether it does."""
    try:
        async with asyncio.timeout(seconds):
            return await stopping.wait()
    except TimeoutError:
        return False


async def _ask(context: RunContext, history: Sequence[HistoryMessage], *, last: bool) -> Turn | GivenBack:
    """The model's next turn; what may pass is tried again, unless the wait is too long for a slot."""
    # On the last step an answer is asked for without tools, so that a run ends in text.
    system = context.agent.instructions + (f"\n\n{LAST_STEP}" if last else "")
    tools: Sequence[ToolSchema] = [] if last else context.agent.schemas
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


async def _calls(context: RunContext, step: int, turn: Turn) -> list[CallOutcome | None]:
    """The outcomes of a turn's calls, run at once; None where one waits."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_call(context, step, ordinal, call)) for ordinal, call in enumerate(turn.calls)]
    except BaseExceptionGroup as failed:
        # Tools raise nothing; this is the journal, and one reason is enough.
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _call(context: RunContext, step: int, ordinal: int, call: ToolCall) -> CallOutcome | None:
    """One call: from the journal as far as it is there, else for real. None while it waits."""
    journal = context.journal
    tool = context.agent.tools.get(call.tool)
    record = context.calls.get((step, ordinal))
    if record is not None:
        if record.outcome is not None or record.waiting:
            return record.outcome
        if record.answer is not None:
            outcome = record.answer
        elif tool is not None and tool.idempotent:
            outcome = await _execute(context, step, ordinal, call)
        else:
            outcome = MAY_HAVE_RUN
        await journal.finish_call(step, ordinal, call, outcome)
        return outcome
    await journal.wait_for_lease()
    if call.tool == SPAWN_AGENT and SPAWN_AGENT in context.agent.built_in:
        spawn = _checked_spawn(context, call)
        if isinstance(spawn, SpawnArguments):
            instruction = spawn.instruction
            if spawn.context:
                instruction += f"\n\nContext:\n{spawn.context}"
            await journal.start_spawn(step, ordinal, call, spawn.agent, instruction)
            return None
        await journal.start_call(step, ordinal, call)
        outcome = spawn
    else:
        await journal.start_call(step, ordinal, call)
        outcome = await _execute(context, step, ordinal, call)
    await journal.finish_call(step, ordinal, call, outcome)
    return outcome


async def _execute(context: RunContext, step: int, ordinal: int, call: ToolCall) -> CallOutcome:
    tool = context.agent.tools.get(call.tool)
    if tool is None:
        known = ", ".join(schema.name for schema in context.agent.schemas) or "none"
        return CallOutcome(kind="error", content=f"there is no tool {call.tool!r}; your tools are: {known}")
    # To store the start may have taken long.
    await context.journal.wait_for_lease()
    return await tool.call(
        call.arguments,
        CallContext(context.run_id, context.session_id, context.agent.name, step, ordinal),
        context.threads,
    )


def _checked_spawn(context: RunContext, call: ToolCall) -> SpawnArguments | CallOutcome:
    """The arguments of a spawn that is allowed, else what the model is told."""
    try:
        arguments = SpawnArguments.model_validate_json(call.arguments or "{}")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "arguments"
        return CallOutcome(kind="error", content=f"bad arguments for {SPAWN_AGENT}: {where}: {first['msg']}")
    if not arguments.agent.strip():
        return CallOutcome(kind="error", content=f"bad arguments for {SPAWN_AGENT}: the agent is empty")
    if not arguments.instruction.strip():
        return CallOutcome(kind="error", content=f"bad arguments for {SPAWN_AGENT}: the instruction is empty")
    if not context.agent.may_spawn_agent(arguments.agent):
        allowed = ", ".join(context.agent.may_spawn) or "no agent"
        return CallOutcome(kind="error", content=f"you may not spawn {arguments.agent!r}; you may spawn: {allowed}")
    if context.depth + 1 > MAX_DEPTH:
        return CallOutcome(kind="error", content=f"too deep: agents may spawn agents {MAX_DEPTH} levels deep")
    return arguments


def _waits_for(call: ToolCall) -> str:
    """What a parked call waits for, in a word: its child agent's name."""
    try:
        return SpawnArguments.model_validate_json(call.arguments).agent
    except ValidationError:
        return call.tool
