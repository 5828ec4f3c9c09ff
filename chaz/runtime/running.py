"""One run as the engine needs it: what it knows, what it writes through, and what it can come to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Protocol
from uuid import UUID

from chaz.asking import Ask
from chaz.lineage import Scope, Spawn
from chaz.outcomes import CallOutcome, Room, ToolCall, Turn, Usage
from chaz.planning import ScheduleCall
from chaz.runtime.agents import Agent
from chaz.runtime.context import Conversation
from chaz.runtime.egress import Egress
from chaz.runtime.models import ChatModel, HistoryMessage
from chaz.runtime.policy import Rate
from chaz.runtime.threads import ToolThreads

FIRST_SLEEP = 0.5
LONGEST_SLEEP = 10.0
"""Seconds that a run may wait in its slot for a model, for longer it is given back; and for a tool, for longer its call
is refused."""


@dataclass(frozen=True)
class Record:
    """A call as the journal has it. Started, but neither outcome, answer nor waiting: a worker was lost during it."""

    outcome: CallOutcome | None = None
    answer: CallOutcome | None = None
    """What its wait was answered with, not yet its result."""
    waiting: bool = False
    started: bool = True
    """Not so: people were asked whether it may be made."""
    digest: str | None = None
    """Of the call that they were asked about."""


class Journal(Protocol):
    """What the engine writes before and after each effect."""

    async def reserve(self, step: int, tokens: int, cost: Decimal | None) -> Room:
        """Hold what a turn is thought to take of its tree's budget, before the model is asked. None: not known.

        Raises LimitReached, and UnknownPrice where a cost that is not known is limited.
        """
        ...

    async def store_step(self, step: int, turn: Turn, cost: Decimal | None) -> bool:
        """Store a turn, before any of its calls runs, and what it used and cost (None: not known).

        Returns whether its next turn has to be reserved: its tree has a budget, or it has come under a limit.
        """
        ...

    async def book(self, step: int, attempt: int, usage: Usage, cost: Decimal | None) -> None:
        """Store what a turn used and cost that the model gave at this attempt, from 1, and that is refused."""
        ...

    async def admit(self, tool: str, rate: Rate, *, within: float) -> float:
        """Seconds until the tool may be called next, on all machines together; it is taken if not above ``within``."""
        ...

    async def ask(self, step: int, ordinal: int, call: ToolCall, ask: Ask) -> CallOutcome | None:
        """Store a request to people, and the wait for their word (None); of a question its call, too.

        Returns what it came to, where there is nothing to wait for: GRANTED, or a refusal.
        """
        ...

    async def start_call(self, step: int, ordinal: int, call: ToolCall) -> None:
        """Store that a call starts, before it does."""
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

    async def request_compaction(self, step: int, ordinal: int, call: ToolCall) -> CallOutcome | None:
        """Store the call, a request that the session be summarised, and the call's result, all at once; that result."""
        ...

    async def schedule(self, step: int, ordinal: int, call: ToolCall, wanted: ScheduleCall) -> CallOutcome:
        """Store the call, what it does to schedules, and its result, all at once; the result."""
        ...

    async def hear(self, step: int) -> Sequence[HistoryMessage]:
        """What was said to the running agent since its last step; from now on part of what this step's model sees."""
        ...

    async def wait_for_lease(self) -> None:
        """Wait until the worker surely still owns the run; what another one took over is cancelled meanwhile."""
        ...


@dataclass(frozen=True)
class Waiting:
    """A call that waits; ``waits_for`` is for people."""

    waits_for: str


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
    conversation: Conversation
    room: int
    """Tokens that its model can be shown: instructions, tools and history."""
    max_steps: int
    depth_left: int
    """How many levels deep it may spawn."""
    egress: Egress
    """What takes the secrets out of all that leaves."""
    scope: Scope = ()
    """Which of its agent's tools it may use."""
    system: str | None = None
    """What its model is told in place of its agent's instructions; then it is shown no tools at all."""
    room_note: str = ""
    """What its model is told of the session's other agents; empty where there are none."""
    limited: bool = False
    """Whether its tree has a budget or there is a limit for it, so that each turn is reserved first."""
    steps: dict[int, Turn] = field(default_factory=dict[int, Turn])
    """The stored turns."""
    calls: dict[tuple[int, int], Record] = field(default_factory=dict[tuple[int, int], Record])
    """The stored calls by step and ordinal."""
    heard: dict[int, list[HistoryMessage]] = field(default_factory=dict[int, list[HistoryMessage]])
    """What had been said to it before a step, by the step."""
    sensitive: set[str] = field(default_factory=set[str])
    """What its calls were given in sensitive parameters, and nobody else is to see."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the worker wants to stop: the run is given back at the next step boundary."""
    shutdown: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the worker's process is to end: no call waits any longer for its turn, or for another try."""


async def stops_within(stopping: asyncio.Event, seconds: float) -> bool:
    """Wait so long, or until the worker wants to stop; whether it does."""
    try:
        async with asyncio.timeout(seconds):
            return await stopping.wait()
    except TimeoutError:
        return False
