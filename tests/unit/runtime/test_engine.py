"""The ReAct loop: what it writes before it acts, and that it goes on from any point at which it was cut off."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

import pytest

from chaz.asking import GRANTED, Ask, digest_of, nobody_to_ask
from chaz.asking import told as word_told
from chaz.entries import safe_text
from chaz.errors import ModelError, ModelUnavailable, StaleAttempt
from chaz.lineage import Spawn
from chaz.outcomes import CallOutcome, Room, ToolCall, Turn, Usage, typed_error
from chaz.planning import ScheduleCall
from chaz.runtime import calling, engine
from chaz.runtime.agents import Agent
from chaz.runtime.calling import MAY_HAVE_RUN
from chaz.runtime.context import Conversation
from chaz.runtime.delimiting import DATA_RULE, delimited, undelimited
from chaz.runtime.egress import Egress
from chaz.runtime.models import (
    AssistantMessage,
    ChatModel,
    HistoryMessage,
    ToolMessage,
    ToolSchema,
    UserMessage,
    resolve_model,
)
from chaz.runtime.policy import Rate
from chaz.runtime.running import Answered, Failed, GivenBack, Parked, Record, RunContext
from chaz.runtime.threads import ToolThreads
from chaz.runtime.tokens import MESSAGE
from chaz.runtime.tools import CallContext, Tool, tool
from chaz.testing import eventually_async

RUN, SESSION = UUID(int=1), UUID(int=2)
MAX_RESULT = 200_000
"""The most characters of a result that the journal keeps (``chaz.journal.MAX_RESULT``)."""

# The doubles: a journal that keeps a list, a model that takes its turns from one, and the scripted model.


@dataclass(frozen=True)
class Written:
    """One write of the journal."""

    kind: Literal[
        "step",
        "booked",
        "started",
        "finished",
        "refused",
        "spawned",
        "answered",
        "asked",
        "decided",
        "compacting",
    ]
    step: int
    ordinal: int = -1
    turn: Turn | None = None
    usage: Usage | None = None
    call: ToolCall | None = None
    outcome: CallOutcome | None = None
    spawn: Spawn | None = None
    child: UUID | None = None
    cost: Decimal | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.step}" + (f".{self.ordinal}" if self.ordinal >= 0 else "")


@dataclass
class Recorder:
    """The engine's journal, kept in a list."""

    writes: list[Written] = field(default_factory=list[Written])
    events: list[str] = field(default_factory=list[str])
    """The writes in words, and between them what tools and models say they do."""
    lost: bool = False
    room: Room = "free"
    rooms: list[Room] = field(default_factory=list[Room])
    """What there is room for first; ``room`` after that."""
    limited: bool = False
    """Whether a turn that is stored comes under a limit."""
    refusal: CallOutcome | None = None
    """What the journal gives for a spawn or a question for a child; None: a wait."""
    reserved: list[tuple[int, int, Decimal | None]] = field(default_factory=list[tuple[int, int, Decimal | None]])
    said: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    """What people say before a step, by the step."""
    shown: list[str] = field(default_factory=list[str])
    asks: list[Ask] = field(default_factory=list[Ask])
    """What people were asked."""
    word: CallOutcome | None = None
    """What the journal gives for a request to people; None: a wait."""
    waits: list[float] = field(default_factory=list[float])
    """How long the next calls of tools with a rate wait; none, when it is used up."""
    admitted: list[str] = field(default_factory=list[str])

    def _write(self, written: Written) -> None:
        self.writes.append(written)
        self.events.append(str(written))

    async def reserve(self, step: int, tokens: int, cost: Decimal | None) -> Room:
        self.reserved.append((step, tokens, cost))
        return self.rooms.pop(0) if self.rooms else self.room

    async def store_step(self, step: int, turn: Turn, cost: Decimal | None) -> bool:
        self._write(Written("step", step, turn=turn, cost=cost))
        return self.limited

    async def book(self, step: int, attempt: int, usage: Usage, cost: Decimal | None) -> None:
        self._write(Written("booked", step, attempt, usage=usage, cost=cost))

    async def admit(self, tool: str, rate: Rate, *, within: float) -> float:
        self.admitted.append(tool)
        return self.waits.pop(0) if self.waits else 0.0

    async def ask(self, step: int, ordinal: int, call: ToolCall, ask: Ask) -> CallOutcome | None:
        self.asks.append(ask)
        if self.word is None:
            self._write(Written("asked", step, ordinal, call=call))
        return self.word

    async def request_compaction(self, step: int, ordinal: int, call: ToolCall) -> CallOutcome | None:
        outcome = CallOutcome(kind="ok", content="asked for")
        self._write(Written("compacting", step, ordinal, call=call, outcome=outcome))
        return outcome

    def decide(self, step: int, ordinal: int, outcome: CallOutcome) -> None:
        """A person's word, in its own transaction."""
        self._write(Written("decided", step, ordinal, outcome=outcome))

    async def start_call(self, step: int, ordinal: int, call: ToolCall) -> None:
        self._write(Written("started", step, ordinal, call=call))
        self.shown.append(call.arguments if call.shown is None else call.shown)

    async def finish_call(self, step: int, ordinal: int, call: ToolCall, outcome: CallOutcome) -> None:
        self._write(Written("finished", step, ordinal, call=call, outcome=outcome))

    async def refuse_call(self, step: int, ordinal: int, call: ToolCall, outcome: CallOutcome) -> None:
        self._write(Written("refused", step, ordinal, call=call, outcome=outcome))
        self.shown.append(call.arguments if call.shown is None else call.shown)

    async def start_spawn(self, step: int, ordinal: int, call: ToolCall, spawn: Spawn) -> CallOutcome | None:
        return self._asked(Written("spawned", step, ordinal, call=call, spawn=spawn))

    async def schedule(self, step: int, ordinal: int, call: ToolCall, wanted: ScheduleCall) -> CallOutcome:
        outcome = CallOutcome(kind="ok", content=f"{wanted.verb} {wanted.id}")
        self._write(Written("refused", step, ordinal, call=call, outcome=outcome))
        return outcome

    async def ask_for(self, step: int, ordinal: int, call: ToolCall, child: UUID) -> CallOutcome | None:
        return self._asked(Written("spawned", step, ordinal, call=call, child=child))

    def _asked(self, written: Written) -> CallOutcome | None:
        self._write(written)
        if self.refusal is not None:
            self._write(Written("finished", written.step, written.ordinal, outcome=self.refusal))
        return self.refusal

    def answer(self, step: int, ordinal: int, outcome: CallOutcome) -> None:
        """The child's end, in its own transaction."""
        self._write(Written("answered", step, ordinal, outcome=outcome))

    async def hear(self, step: int) -> Sequence[HistoryMessage]:
        return [UserMessage(text=text) for text in self.said.pop(step, [])]

    async def wait_for_lease(self) -> None:
        if self.lost:
            raise StaleAttempt(RUN, 1)

    @property
    def steps(self) -> dict[int, Turn]:
        return {written.step: written.turn for written in self.writes if written.turn is not None}

    @property
    def calls(self) -> dict[tuple[int, int], Record]:
        records: dict[tuple[int, int], Record] = {}
        for written in self.writes:
            place = (written.step, written.ordinal)
            match written.kind:
                case "started":
                    records[place] = Record()
                case "asked":
                    assert written.call is not None
                    records[place] = Record(waiting=True, started=False, digest=digest_of(written.call))
                case "decided":
                    records[place] = replace(records[place], waiting=False, answer=written.outcome)
                case "spawned":
                    records[place] = Record(waiting=True)
                case "answered":
                    records[place] = Record(answer=written.outcome)
                case "finished" | "refused":
                    records[place] = Record(outcome=written.outcome)
                case "compacting":
                    records[place] = Record(outcome=written.outcome)
                case "step" | "booked":
                    pass
        return records

    def outcome(self, step: int, ordinal: int) -> CallOutcome:
        kinds = {"finished", "refused"}
        (found,) = (w.outcome for w in self.writes if w.kind in kinds and (w.step, w.ordinal) == (step, ordinal))
        assert found is not None
        return found


@dataclass
class Asked:
    """What a model was asked."""

    system: str
    history: list[HistoryMessage]
    tools: list[str]
    timeout: float


class Playing:
    """A model that gives these turns, or raises these errors, one after the other; or plays the scripted model."""

    def __init__(self, *turns: Turn | Exception) -> None:
        self.asked: list[Asked] = []
        self._turns = iter(turns)
        self._scripted: ChatModel | None = None if turns else resolve_model("scripted")

    async def complete(
        self,
        system: str,
        history: Sequence[HistoryMessage],
        tools: Sequence[ToolSchema],
        *,
        timeout: float,
        on_delta: Callable[[str], None] | None = None,
    ) -> Turn:
        self.asked.append(Asked(system, list(history), [each.name for each in tools], timeout))
        if self._scripted is not None:
            return await self._scripted.complete(system, history, tools, timeout=timeout)
        turn = next(self._turns)
        if isinstance(turn, Exception):
            raise turn
        return turn


def asks(*calls: tuple[str, object]) -> Turn:
    """A turn that calls these tools, under one and the same id, as providers may."""
    return Turn(
        calls=tuple(
            ToolCall(id="same", tool=name, arguments=given if isinstance(given, str) else json.dumps(given))
            for name, given in calls
        )
    )


DONE = Turn(text="done")


def agent(*tools: Tool | str, **changes: Any) -> Agent:
    definition: dict[str, Any] = {"instructions": "Lead.", "model": "scripted", "tools": tools, **changes}
    return Agent("lead", **definition)


@pytest.fixture
def threads() -> ToolThreads:
    return ToolThreads(4)


Make = Callable[..., RunContext]


@pytest.fixture
def make(threads: ToolThreads) -> Make:
    """A run of this agent and model, as its journal has it so far."""

    def make(of: Agent, model: ChatModel, journal: Recorder, *, text: str = "go", **changes: Any) -> RunContext:
        context = RunContext(
            run_id=RUN,
            session_id=SESSION,
            agent=of,
            model=model,
            model_name=of.model,
            journal=journal,
            threads=threads,
            conversation=Conversation((UserMessage(text=text),)),
            room=128_000,
            max_steps=of.max_steps,
            depth_left=of.max_depth,
            egress=Egress("off"),
            steps=journal.steps,
            calls=journal.calls,
        )
        return replace(context, **changes)

    return make


def run(context: RunContext) -> engine.CameTo:
    return asyncio.run(engine.run(context))


def told(asked: Asked) -> list[tuple[str, bool]]:
    """The results that the model was shown, and whether as errors."""
    return [(undelimited(each.content), each.is_error) for each in asked.history if isinstance(each, ToolMessage)]


@tool
def double(n: int) -> int:
    """Double a number."""
    return 2 * n


# One run from beginning to end


def test_text_is_the_answer(make: Make) -> None:
    journal, model = Recorder(), Playing()
    assert run(make(agent(), model, journal, text="hello")) == Answered("You said: hello")
    assert journal.events == ["step 0"]
    assert model.asked[0].history == [UserMessage(text="hello")]


def test_a_blank_turn_is_a_blank_answer(make: Make) -> None:
    assert run(make(agent(), Playing(Turn()), Recorder())) == Answered("")


def test_the_model_is_asked_as_the_agent_says(make: Make) -> None:
    model = Playing(DONE)
    lead = agent(double, "spawn_agent", may_spawn=["reader"], model_timeout=7)
    run(make(lead, model, Recorder()))
    assert model.asked == [
        Asked(f"Lead.\n\n{DATA_RULE}", [UserMessage(text="go")], ["double", "spawn_agent", "agent_result"], 7)
    ]


def test_other_agents_come_last_in_what_the_model_is_told(make: Make) -> None:
    model = Playing(DONE, DONE)
    run(make(agent(double), model, Recorder(), room_note="You share this."))
    run(make(agent(), model, Recorder(), room_note="You share this."))
    assert [asked.system for asked in model.asked] == [
        f"Lead.\n\n{DATA_RULE}\n\nYou share this.",
        "Lead.\n\nYou share this.",
    ]


def test_results_go_back_in_the_order_of_the_calls(make: Make) -> None:
    journal = Recorder()
    first = asks(("double", {"n": 2}), ("double", {"n": 3}))
    model = Playing(first, asks(("double", {"n": 5})), DONE)
    assert run(make(agent(double), model, journal)) == Answered("done")
    assert model.asked[2].history == [
        UserMessage(text="go"),
        AssistantMessage(turn=first),
        ToolMessage(call_id="same", tool="double", content=delimited("4", f"{RUN}:0:0")),
        ToolMessage(call_id="same", tool="double", content=delimited("6", f"{RUN}:0:1")),
        AssistantMessage(turn=journal.steps[1]),
        ToolMessage(call_id="same", tool="double", content=delimited("10", f"{RUN}:1:0")),
    ]


def test_everything_is_written_before_it_is_done(make: Make) -> None:
    journal = Recorder()

    @tool
    def note(text: str) -> str:
        """Note something."""
        journal.events.append(f"did {text}")
        return text

    run(make(agent(note), Playing(asks(("note", {"text": "a"})), asks(("note", {"text": "b"})), DONE), journal))
    assert journal.events == [
        "step 0",
        "started 0.0",
        "did a",
        "finished 0.0",
        "step 1",
        "started 1.0",
        "did b",
        "finished 1.0",
        "step 2",
    ]


def test_the_calls_of_a_turn_run_at_once(make: Make) -> None:
    arrived = {"a": asyncio.Event(), "b": asyncio.Event()}
    barrier = threading.Barrier(2, timeout=10)

    @tool(timeout=10)
    async def meet(me: str, other: str) -> str:
        """Meet the other."""
        arrived[me].set()
        await arrived[other].wait()
        return f"{me} met {other}"

    @tool(timeout=10)
    def meet_sync() -> str:
        """Meet the other."""
        barrier.wait()
        return "met"

    a, b = {"me": "a", "other": "b"}, {"me": "b", "other": "a"}
    model = Playing(asks(("meet", a), ("meet_sync", {}), ("meet", b), ("meet_sync", {})), DONE)
    run(make(agent(meet, meet_sync), model, Recorder()))
    assert told(model.asked[1]) == [("a met b", False), ("met", False), ("b met a", False), ("met", False)]


def test_what_is_said_meanwhile_is_heard_before_the_next_step(make: Make) -> None:
    journal = Recorder(said={0: ["too early"], 1: ["one", "two"], 2: ["three"]})
    model = Playing(asks(("double", {"n": 2})), asks(("double", {"n": 3})), DONE)
    run(make(agent(double), model, journal))
    heard = [[each.text for each in asked.history if isinstance(each, UserMessage)] for asked in model.asked]
    # What it was made with holds all that had been said before its first step.
    assert heard == [["go"], ["go", "one", "two"], ["go", "one", "two", "three"]]
    assert isinstance(model.asked[1].history[-3], ToolMessage)


def test_a_replay_hears_it_before_the_same_step(make: Make) -> None:
    journal = Recorder(said={1: ["one"]})
    turns = asks(("double", {"n": 2})), asks(("double", {"n": 3}))
    run(make(agent(double), first := Playing(*turns, DONE), journal))
    # It was cut off before its last turn was stored; somebody spoke again before the replay came there.
    again = Recorder(journal.writes[:-1], said={2: ["two"]})
    heard: dict[int, list[HistoryMessage]] = {1: [UserMessage(text="one")]}
    run(make(agent(double), second := Playing(DONE), again, heard=heard))
    assert second.asked[0].history == [*first.asked[2].history, UserMessage(text="two")]


def test_a_tool_knows_its_place_in_the_run(make: Make) -> None:
    @tool
    def place(call: CallContext) -> str:
        """Say where this is."""
        return f"{call.run_id == RUN} {call.session_id == SESSION} {call.agent} {call.idempotency_key}"

    model = Playing(asks(("place", {}), ("place", {})), asks(("place", {})), DONE)
    run(make(agent(place), model, Recorder()))
    assert [content for content, _ in told(model.asked[2])] == [
        f"True True lead {RUN}:0:0",
        f"True True lead {RUN}:0:1",
        f"True True lead {RUN}:1:0",
    ]


# Replay


SPAWN = {"agent": "reader", "instruction": "Read it."}
CHILD = CallOutcome(kind="ok", content="I have read it")
SCRIPT = "go\n```script\n" + json.dumps(
    [
        {"calls": [{"tool": "count", "arguments": {"of": "a"}}, {"tool": "count", "arguments": {"of": "b"}}]},
        {"calls": [{"tool": "spawn_agent", "arguments": SPAWN}, {"tool": "count", "arguments": {"of": "c"}}]},
        {"calls": [{"tool": "count", "arguments": "{"}]},
        {"text": "{{0.0}} {{0.1}} {{1.0}} {{1.1}}, {{results}}"},
    ]
) + "\n```"  # fmt: skip


class Counting:
    """Counts what is executed, to see what is repeated."""

    def __init__(self, *, idempotent: bool) -> None:
        self.executed: Counter[str] = Counter()

        @tool(idempotent=idempotent)
        def count(of: str) -> str:
            """Count a letter."""
            self.executed[of] += 1
            return f"counted {of}"

        self.agent = agent(count, "spawn_agent", may_spawn=["reader"])


def to_the_end(make: Make, counting: Counting, journal: Recorder) -> tuple[engine.CameTo, Playing]:
    """Run, and answer what it waits for, until it waits for nothing."""
    model = Playing()
    while True:
        came_to = run(make(counting.agent, model, journal, text=SCRIPT))
        if not isinstance(came_to, Parked):
            return came_to, model
        for (step, ordinal), record in journal.calls.items():
            if record.waiting:
                journal.answer(step, ordinal, CHILD)


def whole(make: Make) -> tuple[engine.CameTo, Recorder]:
    journal, counting = Recorder(), Counting(idempotent=True)
    came_to, model = to_the_end(make, counting, journal)
    assert counting.executed == {"a": 1, "b": 1, "c": 1}
    assert len(model.asked) == 4
    return came_to, journal


def test_a_run_goes_on_from_wherever_it_was_cut_off(make: Make) -> None:
    came_to, journal = whole(make)
    assert isinstance(came_to, Answered)
    assert came_to.text.startswith("counted a counted b I have read it counted c, bad arguments for count: ")
    assert len(journal.writes) == 14
    for cut in range(len(journal.writes) + 1):
        counting, again = Counting(idempotent=True), Recorder(journal.writes[:cut])
        found, model = to_the_end(make, counting, again)
        assert found == came_to, cut
        assert again.steps == journal.steps, cut
        assert again.calls == journal.calls, cut
        # Nothing that was finished is done again, nothing that was not is left out.
        finished = {w.call.arguments for w in journal.writes[:cut] if w.kind == "finished" and w.call is not None}
        assert counting.executed == {of: 1 for of in "abc" if f'{{"of": "{of}"}}' not in finished}, cut
        assert len(model.asked) == 4 - sum(written.kind == "step" for written in journal.writes[:cut]), cut
        assert len(again.writes) == len(journal.writes), cut


def test_a_call_that_may_have_run_is_not_run_again(make: Make) -> None:
    _, journal = whole(make)
    for cut in range(len(journal.writes) + 1):
        counting, again = Counting(idempotent=False), Recorder(journal.writes[:cut])
        begun = {place for place, record in again.calls.items() if record == Record()}
        found, _ = to_the_end(make, counting, again)
        assert isinstance(found, Answered)
        assert {place for place, record in again.calls.items() if record.outcome == MAY_HAVE_RUN} == begun, cut
        started = {w.call.arguments for w in journal.writes[:cut] if w.kind == "started" and w.call is not None}
        assert counting.executed == {of: 1 for of in "abc" if f'{{"of": "{of}"}}' not in started}, cut


def test_what_may_have_run_is_told_as_an_error(make: Make) -> None:
    turn = asks(("double", {"n": 2}))
    journal = Recorder([Written("step", 0, turn=turn), Written("started", 0, 0, call=turn.calls[0])])
    model = Playing(DONE)
    assert run(make(agent(double), model, journal)) == Answered("done")
    assert told(model.asked[0]) == [(MAY_HAVE_RUN.content, True)]
    assert "may or may not have run" in MAY_HAVE_RUN.content
    assert journal.outcome(0, 0) == MAY_HAVE_RUN


def test_a_stored_result_is_told_though_its_tool_is_gone(make: Make) -> None:
    turn = asks(("gone", {}), ("gone", {}))
    kept = CallOutcome(kind="error", content="kept")
    journal = Recorder(
        [
            Written("step", 0, turn=turn),
            Written("finished", 0, 0, call=turn.calls[0], outcome=CallOutcome(kind="ok", content="kept")),
            Written("finished", 0, 1, call=turn.calls[1], outcome=kept),
        ]
    )
    model = Playing(DONE)
    run(make(agent(), model, journal))
    assert told(model.asked[0]) == [("kept", False), ("kept", True)]


def test_a_stored_answer_needs_no_model(make: Make) -> None:
    model = Playing(DONE)
    assert run(make(agent(), model, Recorder([Written("step", 0, turn=DONE)]))) == Answered("done")
    assert model.asked == []


# Mistakes of the model and of tools


def test_mistakes_become_error_results_and_the_run_goes_on(make: Make) -> None:
    @tool
    def explode() -> None:
        """Explode."""
        raise RuntimeError("boom")

    @tool
    def leave() -> None:
        """Leave."""
        raise SystemExit(3)

    @tool(timeout=0.05)
    async def hang() -> None:
        """Hang."""
        await asyncio.Event().wait()

    turn = asks(
        ("halve", {}),
        ("double", "{"),
        ("double", {"n": "x"}),
        ("explode", {}),
        ("leave", {}),
        ("hang", {}),
        ("double", {"n": 4}),
    )
    journal, model = Recorder(), Playing(turn, DONE)
    assert run(make(agent(double, explode, leave, hang), model, journal)) == Answered("done")
    expected = [
        "unknown_tool: there is no tool 'halve'; your tools are: double, explode, leave, hang",
        "bad arguments for double: arguments: Invalid JSON",
        "bad arguments for double: n: Input should be a valid integer",
        "explode raised RuntimeError: boom",
        "leave raised SystemExit: 3",
        "hang did not end within 0.05 s",
        "8",
    ]
    results = told(model.asked[1])
    assert [error for _, error in results] == [True] * 6 + [False]
    for (content, _), start in zip(results, expected, strict=True):
        assert content.startswith(start)
    # Each has exactly one start and one result: what could not run at all, both in one write.
    kinds = Counter((written.kind, written.ordinal) for written in journal.writes if written.ordinal >= 0)
    ran = {(kind, ordinal): 1 for kind in ("started", "finished") for ordinal in range(3, 7)}
    assert kinds == ran | {("refused", ordinal): 1 for ordinal in range(3)}


REFUSED: list[tuple[tuple[str, object], dict[str, Any]]] = [
    (("halve", {}), {}),
    (("double", "{"), {}),
    (("double", {"n": "x"}), {}),
    (("double", {"n": 1}), {"scope": [[]]}),
    (("spawn_agent", {}), {}),
    (("spawn_agent", {"agent": "writer", "instruction": "Write."}), {}),
    (("spawn_agent", {"agent": "reader", "instruction": "Read."}), {"depth_left": 0}),
    (("agent_result", {"id": "child 1"}), {}),
]


@pytest.mark.parametrize(("wanted", "changes"), REFUSED)
def test_what_is_refused_is_never_in_doubt(make: Make, wanted: tuple[str, object], changes: dict[str, Any]) -> None:
    lead = agent(double, "spawn_agent", may_spawn=["reader"])
    journal = Recorder()
    assert run(make(lead, Playing(asks(wanted), DONE), journal, **changes)) == Answered("done")
    assert journal.events == ["step 0", "refused 0.0", "step 1"]
    # Wherever its worker was lost, the model is told the same.
    for cut in range(1, len(journal.writes)):
        model = Playing(DONE)
        run(make(lead, model, Recorder(journal.writes[:cut]), **changes))
        assert told(model.asked[0]) == [(journal.outcome(0, 0).content, True)], cut


def test_an_agent_without_tools_is_told_so(make: Make) -> None:
    model = Playing(asks(("double", {})), DONE)
    run(make(agent(), model, Recorder()))
    assert told(model.asked[1]) == [("unknown_tool: there is no tool 'double'; your tools are: none", True)]


def test_a_call_about_schedules_is_stored_with_what_it_does(make: Make) -> None:
    journal = Recorder()
    asked = asks(("schedule_add", {"id": "daily", "prompt": "Report.", "cron": "0 9 * * *"}))
    assert run(make(agent("schedules"), Playing(asked, DONE), journal)) == Answered("done")
    assert journal.outcome(0, 0).content == "add daily"
    journal = Recorder()
    run(make(agent("schedules"), Playing(asks(("schedule_add", {"id": "daily"})), DONE), journal))
    assert journal.events == ["step 0", "refused 0.0", "step 1"]
    assert journal.outcome(0, 0).error == "bad_arguments"


@pytest.mark.parametrize("result", ["x" * 1_000_000, "a\0b\ud800"], ids=["huge", "no-text"])
def test_the_model_is_shown_what_the_journal_can_keep(make: Make, result: str) -> None:
    @tool
    def say() -> str:
        """Say a lot."""
        return result

    journal, model = Recorder(), Playing(asks(("say", {})), DONE)
    run(make(agent(say), model, journal))
    ((content, _),) = told(model.asked[1])
    # In ASCII, because a lone surrogate in a failure's report loses the report.
    assert ascii(content) == ascii(journal.outcome(0, 0).content) == ascii(safe_text(result, MAX_RESULT))


# spawn_agent

LEAD = agent(double, "spawn_agent", may_spawn=["reader", "web.*"])


def test_a_spawn_parks_the_run(make: Make) -> None:
    journal, model = Recorder(), Playing(asks(("spawn_agent", {**SPAWN, "context": "It is long."})))
    assert run(make(LEAD, model, journal)) == Parked("reader")
    assert journal.events == ["step 0", "spawned 0.0"]
    instruction = "Read it.\n\nContext:\nIt is long."
    assert journal.writes[1].spawn == Spawn("reader", instruction, depth_left=LEAD.max_depth - 1)


def test_what_a_spawn_asks_for_is_handed_on_within_what_the_run_has(make: Make) -> None:
    wanted = {"wait": False, "model": "scripted:x", "max_steps": 3, "timeout": 2.5, "tools": ["web.*"]}
    lead = agent("spawn_agent", may_spawn=["reader"], child_tools=["web.*", "read"])
    journal = Recorder(refusal=CHILD)
    context = make(
        lead, Playing(asks(("spawn_agent", {**SPAWN, **wanted})), DONE), journal, scope=[["*"]], depth_left=3
    )
    assert run(context) == Answered("done")
    assert journal.writes[1].spawn == Spawn(
        "reader",
        "Read it.",
        wait=False,
        model="scripted:x",
        max_steps=3,
        timeout=2.5,
        tools=["web.*"],
        scope=(["*"], ("web.*", "read"), ["web.*"]),
        depth_left=2,
    )


def test_null_is_what_a_model_writes_for_what_it_leaves_open(make: Make) -> None:
    wanted = dict.fromkeys(("context", "wait", "model", "max_steps", "timeout", "tools"))
    journal = Recorder()
    assert run(make(LEAD, Playing(asks(("spawn_agent", {**SPAWN, **wanted}))), journal)) == Parked("reader")
    assert journal.writes[1].spawn == Spawn("reader", "Read it.", depth_left=LEAD.max_depth - 1)


def test_a_spawn_that_the_journal_answers_at_once_parks_nothing(make: Make) -> None:
    refusal = typed_error("over_budget", "no more")
    journal, model = Recorder(refusal=refusal), Playing(asks(("spawn_agent", SPAWN)), DONE)
    assert run(make(LEAD, model, journal)) == Answered("done")
    assert told(model.asked[1]) == [("over_budget: no more", True)]
    assert journal.events == ["step 0", "spawned 0.0", "finished 0.0", "step 1"]


def test_asking_for_a_child_parks_the_run_or_gives_its_answer(make: Make) -> None:
    journal, turn = Recorder(), asks(("agent_result", {"id": str(RUN)}))
    assert run(make(LEAD, Playing(turn), journal)) == Parked("agent_result")
    assert journal.writes[1].child == RUN
    model = Playing(turn, DONE)
    assert run(make(LEAD, model, Recorder(refusal=CHILD))) == Answered("done")
    assert told(model.asked[1]) == [(CHILD.content, False)]


@pytest.mark.parametrize("wanted", [{"id": "child 1"}, {}, "{", {"id": str(RUN), "wait": True}])
def test_asking_for_what_is_no_id_is_an_error_result(make: Make, wanted: object) -> None:
    journal = Recorder()
    assert run(make(LEAD, Playing(asks(("agent_result", wanted)), DONE), journal)) == Answered("done")
    assert journal.outcome(0, 0).error == "bad_arguments"


# The scope


def test_a_tool_out_of_scope_is_neither_shown_nor_run(make: Make) -> None:
    journal = Recorder()
    model = Playing(asks(("double", {"n": 1}), ("spawn_agent", SPAWN), ("agent_result", {"id": str(RUN)})), DONE)
    # The third is in scope, and waits.
    assert run(make(LEAD, model, journal, scope=[["*"], ["agent_*"]])) == Parked("agent_result")
    assert model.asked[0].tools == ["agent_result"]
    assert [journal.outcome(0, n).error for n in (0, 1)] == ["not_allowed", "not_allowed"]
    assert journal.outcome(0, 0).content == (
        "not_allowed: you were spawned without the tool 'double'; your tools are: agent_result"
    )


def test_an_idempotent_call_is_not_repeated_out_of_scope(make: Make) -> None:
    @tool(idempotent=True)
    def again() -> None:
        """Do it."""
        raise AssertionError

    journal, turn = Recorder(), asks(("again", {}))
    journal.writes += [Written("step", 0, turn=turn), Written("started", 0, 0, call=turn.calls[0])]
    assert run(make(agent(again), Playing(DONE), journal, scope=[[]])) == Answered("done")
    assert journal.outcome(0, 0).error == "not_allowed"


def test_a_dotted_tool_is_called_by_what_it_is_shown_as(make: Make) -> None:
    @tool(name="web.search")
    def search(text: str) -> str:
        """Search."""
        return f"found {text}"

    journal, model = Recorder(), Playing(asks(("web__search", {"text": "it"})), DONE)
    assert run(make(agent(search), model, journal)) == Answered("done")
    assert journal.outcome(0, 0).content == "found it"
    started = next(written.call for written in journal.writes if written.kind == "started")
    assert started is not None
    # The journal and the audit trail have its name; the model sees what it wrote.
    assert started.tool == "web.search"
    assert [each.tool for each in model.asked[1].history if isinstance(each, ToolMessage)] == ["web__search"]


# The window


@tool
def page(n: int) -> str:
    """A long page."""
    return f"{n} " * 2000


def test_what_does_not_fit_is_left_out_at_each_step_and_the_same_in_a_replay(make: Make) -> None:
    earlier = tuple(UserMessage(text=f"{n} " * 300) for n in range(8))
    conversation = Conversation((UserMessage(text="go"),), earlier)
    turns = [asks(("page", {"n": n})) for n in range(4)]

    def asked(journal: Recorder, *turns: Turn) -> list[list[HistoryMessage]]:
        model = Playing(*turns, DONE)
        run(make(agent(page), model, journal, conversation=conversation, room=4000))
        return [asked.history for asked in model.asked]

    journal = Recorder()
    shown = asked(journal, *turns)
    assert [len(history) for history in shown] == [9, 11, 5, 7, 9]
    assert all(UserMessage(text="go") in history for history in shown)

    for step in (1, 2, 3, 4):
        stored = next(n for n, written in enumerate(journal.writes) if str(written) == f"step {step}")
        assert asked(Recorder(journal.writes[:stored]), *turns[step:]) == shown[step:]


def test_instructions_and_tools_take_of_the_same_room(make: Make) -> None:
    earlier = (UserMessage(text="word " * 1000),)
    conversation = Conversation((UserMessage(text="go"),), earlier)

    def shown(**changes: Any) -> int:
        model = Playing(DONE)
        run(make(agent(**changes), model, Recorder(), conversation=conversation, room=2000))
        return len(model.asked[0].history)

    assert shown() == 2
    assert shown(instructions="Lead. " * 300) == 1


def test_a_model_may_count_by_itself(make: Make) -> None:
    class Counting(Playing):
        def count(self, text: str) -> int:
            return 1_000 * len(text.split())

    conversation = Conversation((UserMessage(text="go"),), (UserMessage(text="one two"), UserMessage(text="three")))
    model = Counting(DONE)
    journal = Recorder()
    run(make(agent(), model, journal, conversation=conversation, room=20_000, limited=True))
    assert model.asked[0].history == [UserMessage(text="three"), UserMessage(text="go")]
    # What is reserved is counted in the same way: 16 words of instructions, 2 of history, 3 frames.
    ((_, reserved, _),) = journal.reserved
    assert reserved - engine.ANSWER == 18_000 + 3 * MESSAGE


# The budget


def test_each_new_turn_is_reserved_if_its_tree_is_limited(make: Make) -> None:
    journal, model = Recorder(), Playing(asks(("double", {"n": 1})), DONE)
    assert run(make(agent(double, prices=(1, 0)), model, journal, limited=True)) == Answered("done")
    (first, second) = journal.reserved
    assert (first[0], second[0]) == (0, 1)
    # What is shown grows.
    assert engine.ANSWER < first[1] < second[1]
    assert first[2] == Decimal(first[1] - engine.ANSWER) / 1_000_000
    # Replayed, nothing is reserved again.
    journal.reserved.clear()
    assert run(make(agent(double), Playing(DONE), journal, limited=True)) == Answered("done")
    assert journal.reserved == []


def test_without_a_budget_nothing_is_reserved(make: Make) -> None:
    journal = Recorder(room="none")
    assert run(make(agent(double), Playing(DONE), journal)) == Answered("done")
    assert journal.reserved == []


def test_a_used_up_budget_fails_the_run_before_the_model_is_asked(make: Make) -> None:
    model = Playing(DONE)
    failed = run(make(agent(double), model, Recorder(room="none"), limited=True))
    assert failed == Failed("budget", "the budget of its tree of runs is used up")
    assert model.asked == []


def test_a_budget_that_others_hold_gives_the_run_back(make: Make) -> None:
    model = Playing(DONE)
    came_to = run(make(agent(double), model, Recorder(room="held"), limited=True))
    assert isinstance(came_to, GivenBack)
    assert model.asked == []


def test_the_last_step_of_a_budget_is_for_the_answer(make: Make) -> None:
    model = Playing(DONE)
    assert run(make(agent(double), model, Recorder(room="last"), limited=True)) == Answered("done")
    assert model.asked[0].tools == []
    assert model.asked[0].system.endswith(engine.LAST_STEP)


def test_a_turn_is_stored_with_its_cost(make: Make) -> None:
    turn = Turn(text="done", usage=Usage(prompt=1000, completion=10))
    journal = Recorder()
    assert run(make(agent(prices=(2, 100)), Playing(turn), journal)) == Answered("done")
    assert journal.writes[0].cost == Decimal("0.003")


def test_a_turn_of_a_model_without_a_price_costs_what_nobody_knows(make: Make) -> None:
    journal = Recorder()
    run(make(agent(), Playing(Turn(text="done", usage=Usage(prompt=1))), journal, limited=True))
    assert (journal.writes[0].cost, journal.reserved[0][2]) == (None, None)


def test_so_does_one_of_an_endpoint_that_does_not_say_what_it_took(make: Make) -> None:
    journal = Recorder()
    run(make(agent(prices=(2, 100)), Playing(DONE), journal))
    assert journal.writes[0].cost is None


def test_a_run_that_comes_under_a_limit_reserves_its_next_turns(make: Make) -> None:
    journal = Recorder(limited=True)
    run(make(agent(double), Playing(asks(("double", {"n": 2})), DONE), journal))
    assert [step for step, _, _ in journal.reserved] == [1]


PAID = {"prompt": 1000, "completion": 10}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "FIRST_SLEEP", 0)


@pytest.mark.usefixtures("hasty")
def test_turns_that_are_refused_are_booked_with_their_cost(make: Make) -> None:
    journal = Recorder()
    model = Playing(
        ModelUnavailable("scripted", "no finish reason", None, PAID),
        ModelUnavailable("scripted", "HTTP 503", None),
        ModelUnavailable("scripted", "malformed", None, PAID),
        DONE,
    )
    assert run(make(agent(prices=(2, 100)), model, journal)) == Answered("done")
    assert journal.events == ["booked 0.1", "booked 0.3", "step 0"]
    assert [(each.usage, each.cost) for each in journal.writes[:2]] == [(Usage(**PAID), Decimal("0.003"))] * 2


def test_a_turn_that_ends_the_run_is_booked_too(make: Make) -> None:
    journal = Recorder()
    with pytest.raises(ModelError, match="cut off by length"):
        run(make(agent(), Playing(ModelError("scripted", "cut off by length", PAID)), journal))
    assert journal.events == ["booked 0.1"]


@pytest.mark.usefixtures("hasty")
def test_a_paid_try_is_not_followed_by_another_when_nothing_is_left(make: Make) -> None:
    model = Playing(ModelUnavailable("scripted", "malformed", None, PAID), DONE)
    failed = run(make(agent(), model, Recorder(rooms=["free", "none"]), limited=True))
    assert failed == Failed("budget", "the budget of its tree of runs is used up")
    assert len(model.asked) == 1


# What waits


@pytest.mark.parametrize("detached", [True, False])
def test_a_child_may_be_spawned_to_outlive_its_parents_cancelling(make: Make, detached: bool) -> None:
    journal, model = Recorder(), Playing(asks(("spawn_agent", {**SPAWN, "detached": detached})))
    assert run(make(LEAD, model, journal)) == Parked("reader")
    spawn = journal.writes[1].spawn
    assert spawn is not None
    assert spawn.detached is detached


def test_several_spawns_are_waited_for_together(make: Make) -> None:
    journal = Recorder()
    turn = asks(("spawn_agent", SPAWN), ("spawn_agent", {**SPAWN, "agent": "web.search"}))
    assert run(make(LEAD, Playing(turn), journal)) == Parked("reader, web.search")
    # One answer is not enough; with the second it goes on, and asks no model in between.
    journal.answer(0, 0, CHILD)
    assert run(make(LEAD, Playing(DONE), journal)) == Parked("web.search")
    journal.answer(0, 1, CallOutcome(kind="error", content="failed"))
    model = Playing(DONE)
    assert run(make(LEAD, model, journal)) == Answered("done")
    assert told(model.asked[0]) == [("I have read it", False), ("failed", True)]
    assert journal.outcome(0, 0) == CHILD
    assert Counter(written.kind for written in journal.writes)["finished"] == 2


def test_children_of_one_name_are_counted(make: Make) -> None:
    turn = asks(*[("spawn_agent", {**SPAWN, "agent": name}) for name in ("reader", "web.search", "reader")])
    assert run(make(LEAD, Playing(turn), Recorder())) == Parked("2 x reader, web.search")


def test_a_wait_that_cannot_be_read_is_named_by_its_tool(make: Make) -> None:
    turn = asks(("spawn_agent", "{"))
    journal = Recorder([Written("step", 0, turn=turn), Written("spawned", 0, 0, call=turn.calls[0])])
    assert run(make(LEAD, Playing(DONE), journal)) == Parked("spawn_agent")


def test_the_other_calls_of_the_turn_run_before_it_parks(make: Make) -> None:
    journal = Recorder()
    turn = asks(("double", {"n": 1}), ("spawn_agent", SPAWN), ("double", {"n": 2}))
    assert run(make(LEAD, Playing(turn), journal)) == Parked("reader")
    assert journal.outcome(0, 0).content == "2"
    assert journal.outcome(0, 2).content == "4"
    assert journal.calls[0, 1].waiting
    # Parked, it does nothing but wait.
    writes = len(journal.writes)
    assert run(make(LEAD, Playing(DONE), journal)) == Parked("reader")
    assert len(journal.writes) == writes


@pytest.mark.parametrize(
    ("arguments", "told_of"),
    [
        ({**SPAWN, "agent": "writer"}, "not_allowed: you may not spawn 'writer'; you may spawn: reader, web.*"),
        ("{", "bad_arguments: spawn_agent: arguments: Invalid JSON"),
        ("", "bad_arguments: spawn_agent: agent: Field required"),
        ({"agent": "reader"}, "bad_arguments: spawn_agent: instruction: Field required"),
        ({**SPAWN, "instruction": " \n"}, "bad_arguments: spawn_agent: instruction: "),
        ({**SPAWN, "agent": 3}, "bad_arguments: spawn_agent: agent: "),
        ({**SPAWN, "more": 1}, "bad_arguments: spawn_agent: more: "),
        ({**SPAWN, "max_steps": 0}, "bad_arguments: spawn_agent: max_steps: "),
        ({**SPAWN, "max_steps": 1.5}, "bad_arguments: spawn_agent: max_steps: "),
        ({**SPAWN, "timeout": 0}, "bad_arguments: spawn_agent: timeout: "),
        ({**SPAWN, "timeout": 1e300}, "bad_arguments: spawn_agent: timeout: "),
        ({**SPAWN, "tools": "web.*"}, "bad_arguments: spawn_agent: tools: "),
        ({**SPAWN, "tools": [""]}, "bad_arguments: spawn_agent: tools.0: "),
        ({**SPAWN, "wait": "later"}, "bad_arguments: spawn_agent: wait: "),
        ({**SPAWN, "model": "gpt-5"}, "bad_arguments: model 'gpt-5' has the unknown provider"),
        ({**SPAWN, "model": "openai:"}, "bad_arguments: model 'openai:' names no model"),
    ],
)
def test_a_spawn_that_is_not_allowed_is_an_error_result(make: Make, arguments: object, told_of: str) -> None:
    journal, model = Recorder(), Playing(asks(("spawn_agent", arguments)), DONE)
    assert run(make(LEAD, model, journal)) == Answered("done")
    assert journal.events == ["step 0", "refused 0.0", "step 1"]
    ((content, error),) = told(model.asked[1])
    assert error
    assert content.startswith(told_of)


@pytest.mark.parametrize("name", ["", " "])
def test_an_agent_without_a_name_is_not_spawned(make: Make, name: str) -> None:
    anybody = agent("spawn_agent", may_spawn=["*"])
    journal = Recorder()
    turn = asks(("spawn_agent", {**SPAWN, "agent": name}))
    assert run(make(anybody, Playing(turn, DONE), journal)) == Answered("done")
    assert journal.outcome(0, 0).kind == "error"


def test_a_spawn_goes_no_deeper_than_the_limit(make: Make) -> None:
    turn = asks(("spawn_agent", SPAWN))
    assert run(make(LEAD, Playing(turn), Recorder(), depth_left=1)) == Parked("reader")
    journal = Recorder()
    assert run(make(LEAD, Playing(turn, DONE), journal, depth_left=0)) == Answered("done")
    assert journal.outcome(0, 0).content.startswith("too_deep: ")
    assert (journal.outcome(0, 0).kind, journal.outcome(0, 0).error) == ("error", "too_deep")


def test_who_has_no_spawn_agent_has_no_such_tool(make: Make) -> None:
    journal = Recorder()
    run(make(agent(double), Playing(asks(("spawn_agent", SPAWN)), DONE), journal))
    assert journal.outcome(0, 0).content == "unknown_tool: there is no tool 'spawn_agent'; your tools are: double"
    # Nor does a name that is allowed help.
    journal = Recorder()
    run(make(agent("spawn_agent"), Playing(asks(("spawn_agent", SPAWN)), DONE), journal))
    assert "you may spawn: no agent" in journal.outcome(0, 0).content


# Limits


def test_the_last_step_has_no_tools_and_says_so(make: Make) -> None:
    model = Playing(asks(("double", {"n": 1})), asks(("double", {"n": 2})), DONE)
    assert run(make(agent(double), model, Recorder(), max_steps=3)) == Answered("done")
    assert [asked.tools for asked in model.asked] == [["double"], ["double"], []]
    assert [engine.LAST_STEP in asked.system for asked in model.asked] == [False, False, True]


def test_a_run_that_does_not_come_to_an_end_fails(make: Make) -> None:
    model = Playing(*[asks(("double", {"n": 1}))] * 3)
    failed = run(make(agent(double), model, Recorder(), max_steps=3))
    assert isinstance(failed, Failed)
    assert failed.reason == "steps"
    assert "3 steps" in failed.text
    assert len(model.asked) == 3


def test_the_limit_counts_steps_of_earlier_attempts(make: Make) -> None:
    journal = Recorder([Written("step", step, turn=asks(("double", {"n": 1}))) for step in range(2)])
    model = Playing(DONE)
    assert run(make(agent(double), model, journal, max_steps=3)) == Answered("done")
    assert [asked.tools for asked in model.asked] == [[]]


# Models that fail


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the engine would have slept."""
    waits: list[float] = []

    async def stops_within(stopping: asyncio.Event, seconds: float) -> bool:
        waits.append(seconds)
        return stopping.is_set()

    monkeypatch.setattr(engine, "stops_within", stops_within)
    monkeypatch.setattr(calling, "stops_within", stops_within)
    return waits


def unavailable(retry_after: float | None = None) -> ModelUnavailable:
    return ModelUnavailable("m", "busy", retry_after)


def test_what_may_pass_is_tried_again_with_growing_waits(make: Make, waits: list[float]) -> None:
    model = Playing(*[unavailable()] * (engine.MODEL_TRIES - 1), DONE)
    journal = Recorder()
    assert run(make(agent(), model, journal)) == Answered("done")
    assert waits == [0.5, 1, 2, 4]
    assert journal.events == ["step 0"]


def test_a_short_wait_that_the_provider_asks_for_is_kept(make: Make, waits: list[float]) -> None:
    model = Playing(unavailable(0), unavailable(3.5), unavailable(engine.LONGEST_SLEEP), DONE)
    assert run(make(agent(), model, Recorder())) == Answered("done")
    assert waits == [0, 3.5, engine.LONGEST_SLEEP]


@pytest.mark.parametrize("retry_after", [None, 1.0])
def test_what_does_not_pass_fails_the_run(make: Make, waits: list[float], retry_after: float | None) -> None:
    model = Playing(*[unavailable(retry_after)] * 9)
    assert run(make(agent(), model, Recorder())) == Failed("model", "model m is not available: busy")
    assert len(model.asked) == engine.MODEL_TRIES
    assert len(waits) == engine.MODEL_TRIES - 1


def test_a_worker_that_stops_does_not_wait_for_a_model(make: Make) -> None:
    journal, model = Recorder(), Playing(unavailable(9.0), DONE)
    context = make(agent(), model, journal)

    async def stop_in_the_wait() -> engine.CameTo:
        running = asyncio.create_task(engine.run(context))
        await eventually_async(lambda: _true_if(len(model.asked) == 1))
        context.stopping.set()
        return await asyncio.wait_for(running, 5)

    came_to = asyncio.run(stop_in_the_wait())
    assert isinstance(came_to, GivenBack)
    assert came_to.wait == 9.0
    assert came_to.reason.startswith("its worker is stopping")


async def _true_if(what: bool) -> bool:
    return what


def test_a_run_with_another_task_is_told_that_alone_and_shown_no_tools(make: Make) -> None:
    journal, model = Recorder(), Playing(DONE)
    of = agent("ask_human", "compact")
    assert run(make(of, model, journal, system="Summarise.", max_steps=1, limited=True)) == Answered("done")
    assert [(asked.system, asked.tools) for asked in model.asked] == [("Summarise.", [])]
    assert len(journal.reserved) == 1


def test_a_run_with_another_task_calls_nothing(make: Make) -> None:
    journal = Recorder()
    came_to = run(make(agent("compact"), Playing(asks(("compact", {}))), journal, system="x", max_steps=1))
    assert isinstance(came_to, Failed)
    assert [str(written) for written in journal.writes] == ["step 0"]


def test_the_tool_that_asks_for_a_summary_is_stored_with_its_result_at_once(make: Make) -> None:
    journal, model = Recorder(), Playing(asks(("compact", {})), DONE)
    assert run(make(agent("compact"), model, journal)) == Answered("done")
    assert told(model.asked[1]) == [("asked for", False)]
    assert [str(written) for written in journal.writes] == ["step 0", "compacting 0.0", "step 1"]


def test_what_is_asked_of_tools_in_the_last_step_is_not_done(make: Make) -> None:
    journal = Recorder()
    model = Playing(asks(("double", {"n": 1})), asks(("double", {"n": 2})))
    failed = run(make(agent(double), model, journal, max_steps=2))
    assert isinstance(failed, Failed)
    assert [event for event in journal.events if "1." in event] == []
    assert journal.events[-1] == "step 1"


def test_a_long_wait_gives_the_run_back(make: Make, waits: list[float]) -> None:
    journal, model = Recorder(), Playing(unavailable(1), unavailable(60))
    assert run(make(agent(), model, journal)) == GivenBack(60, "model m is not available: busy")
    assert (waits, journal.writes) == ([1], [])


def test_what_asking_again_does_not_help_is_raised_at_once(make: Make, waits: list[float]) -> None:
    model = Playing(ModelError("m", "refused"), DONE)
    with pytest.raises(ModelError, match="refused"):
        run(make(agent(), model, Recorder()))
    assert (len(model.asked), waits) == (1, [])


# Policies


class Flaky:
    """Fails so many times before it does not."""

    def __init__(self, failures: int, **policy: Any) -> None:
        self.keys: list[str] = []

        said: dict[str, Any] = {"idempotent": True, "retries": 5, "sensitive_params": ["token"], **policy}

        @tool(**said)
        def flaky(token: str, context: CallContext) -> str:
            """Do something."""
            self.keys.append(context.idempotency_key)
            if len(self.keys) <= failures:
                raise RuntimeError(f"refused {token}")
            return f"done with {len(self.keys)}"

        self.agent = agent(flaky)


FLAKY = asks(("flaky", {"token": "hunter2"}))


def test_an_idempotent_tool_that_fails_is_tried_again(
    make: Make, waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    flaky, journal = Flaky(6, retries=6), Recorder()
    model = Playing(FLAKY, DONE)
    run(make(flaky.agent, model, journal))
    assert told(model.asked[1]) == [("done with 7", False)]
    assert flaky.keys == [f"{RUN}:0:0"] * 7
    assert waits == [0.5, 1, 2, 4, 8, 10]
    assert journal.events == ["step 0", "started 0.0", "finished 0.0", "step 1"]
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [each.partition(" failed in ")[2] for each in said] == [
        *(f"try {n} of 7; again in {pause:g} s" for n, pause in enumerate(waits, start=1)),
    ]
    assert "hunter2" not in caplog.text


def test_the_last_outcome_counts(make: Make, waits: list[float]) -> None:
    flaky, model = Flaky(9, retries=2), Playing(FLAKY, DONE)
    run(make(flaky.agent, model, Recorder()))
    assert told(model.asked[1]) == [("flaky raised RuntimeError: refused ***", True)]
    assert (len(flaky.keys), waits) == (3, [0.5, 1])


def test_what_takes_too_long_is_tried_again(make: Make, waits: list[float]) -> None:
    tries: list[int] = []

    @tool(idempotent=True, retries=1, timeout=60)
    async def hang() -> str:
        """Take long at first."""
        tries.append(1)
        if len(tries) == 1:
            await asyncio.Event().wait()
        return "there"

    model = Playing(asks(("hang", {})), DONE)
    # The agent's word, not the tool's, is what the call is held to.
    run(make(agent(hang, policies={"hang": {"timeout": 0.05}}), model, Recorder()))
    assert (told(model.asked[1]), waits) == ([("there", False)], [0.5])


def test_bad_arguments_are_not_tried_again(make: Make, waits: list[float]) -> None:
    flaky, journal = Flaky(0, rate_limit="1/s"), Recorder()
    run(make(flaky.agent, Playing(asks(("flaky", {"tokn": "hunter2"})), DONE), journal))
    assert (journal.outcome(0, 0).kind, flaky.keys, waits, journal.admitted) == ("error", [], [], [])


def test_a_worker_that_shuts_down_tries_nothing_again(make: Make, waits: list[float]) -> None:
    flaky, journal, shutdown = Flaky(9), Recorder(), asyncio.Event()
    shutdown.set()
    run(make(flaky.agent, Playing(FLAKY, DONE), journal, shutdown=shutdown))
    assert (len(flaky.keys), journal.outcome(0, 0).kind) == (1, "error")


def test_a_tool_with_a_rate_waits_for_its_turn_before_it_starts(make: Make, waits: list[float]) -> None:
    flaky, journal = Flaky(0, rate_limit="1/s"), Recorder(waits=[7.5])
    model = Playing(FLAKY, DONE)
    run(make(flaky.agent, model, journal))
    assert told(model.asked[1]) == [("done with 1", False)]
    assert (journal.admitted, waits) == (["flaky"], [7.5])


def test_a_tool_that_is_called_too_often_is_refused(make: Make, waits: list[float]) -> None:
    flaky, journal = Flaky(0, rate_limit="1/h"), Recorder(waits=[10.1])
    model = Playing(FLAKY, DONE)
    run(make(flaky.agent, model, journal))
    assert told(model.asked[1]) == [("rate_limited: flaky is called too often; try again in 11 s", True)]
    assert (flaky.keys, waits, journal.outcome(0, 0).error) == ([], [], "rate_limited")
    assert journal.events == ["step 0", "refused 0.0", "step 1"]


def test_each_try_takes_its_turn(make: Make, waits: list[float]) -> None:
    flaky, journal = Flaky(9, rate_limit="1/s"), Recorder(waits=[0, 0, 3600])
    run(make(flaky.agent, Playing(FLAKY, DONE), journal))
    assert (len(flaky.keys), len(journal.admitted)) == (2, 3)
    assert journal.outcome(0, 0).content == "flaky raised RuntimeError: refused ***"


def test_a_call_whose_turn_has_not_come_is_left_to_another_worker(make: Make, waits: list[float]) -> None:
    flaky, journal, shutdown = Flaky(0, rate_limit="1/s"), Recorder(waits=[4]), asyncio.Event()
    shutdown.set()
    both = agent(*flaky.agent.tools.values(), double)
    turn = asks(("flaky", {"token": "hunter2"}), ("double", {"n": 2}))
    assert run(make(both, Playing(turn), journal, shutdown=shutdown)) == GivenBack(4, "its worker is stopping")
    assert (flaky.keys, set(journal.calls)) == ([], {(0, 1)})
    model = Playing(DONE)
    run(make(both, model, journal))
    assert told(model.asked[0]) == [("done with 1", False), ("4", False)]


def test_a_call_that_is_done_takes_no_turn_and_one_that_is_made_again_does(make: Make) -> None:
    flaky, journal = Flaky(0, rate_limit="1/s"), Recorder()
    run(make(flaky.agent, Playing(FLAKY, DONE), journal))
    for cut, taken in ((3, 0), (2, 1)):
        again = Recorder(journal.writes[:cut])
        run(make(flaky.agent, Playing(DONE), again))
        assert len(again.admitted) == taken, cut


def test_what_is_sensitive_is_not_shown_and_is_what_the_tool_gets(make: Make) -> None:
    got: list[str] = []

    @tool
    def pay(card: str, amount: int) -> None:
        """Pay."""
        got.append(card)

    turn = asks(("pay", {"card": "4111", "amount": 3}), ("pay", '{"card": "4111"'), ("other", {"card": "4111"}))
    journal = Recorder()
    run(make(agent(pay, policies={"pay": {"sensitive_params": ["card"]}}), Playing(turn, DONE), journal))
    # Nor where it stands elsewhere.
    assert sorted(journal.shown) == ["***", '{"card": "***", "amount": 3}', '{"card": "***"}']
    asked = [written.call.arguments for written in journal.writes if written.call is not None]
    assert (set(asked), got) == ({call.arguments for call in turn.calls}, ["4111"])


# Stopping


def test_a_stopping_worker_gives_the_run_back_before_the_next_turn(make: Make) -> None:
    async def stopping() -> engine.CameTo:
        context = make(agent(), model, journal)
        context.stopping.set()
        return await engine.run(context)

    journal, model = Recorder(), Playing(DONE)
    found = asyncio.run(stopping())
    assert isinstance(found, GivenBack)
    assert (found.wait, model.asked, journal.writes) == (0, [], [])


def test_a_step_that_has_begun_is_brought_to_its_end(make: Make) -> None:
    stopping = asyncio.Event()

    @tool
    async def stop() -> str:
        """Stop the worker."""
        stopping.set()
        return "stopping"

    journal, model = Recorder(), Playing(asks(("stop", {}), ("double", {"n": 1})), DONE)
    assert isinstance(run(make(agent(stop, double), model, journal, stopping=stopping)), GivenBack)
    assert len(model.asked) == 1
    assert journal.outcome(0, 0).content == "stopping"
    assert journal.outcome(0, 1).content == "2"
    # And elsewhere it goes on from there.
    assert run(make(agent(stop, double), Playing(DONE), journal)) == Answered("done")


def test_what_is_stored_is_brought_to_its_end_though_the_worker_stops(make: Make) -> None:
    stopping = asyncio.Event()
    stopping.set()
    journal = Recorder([Written("step", 0, turn=DONE)])
    assert run(make(agent(), Playing(), journal, stopping=stopping)) == Answered("done")


# An attempt that is over


@dataclass
class Refusing(Recorder):
    """A journal that refuses this write, as PostgreSQL does a stale attempt's, once ``when`` is set."""

    refused: str = ""
    when: asyncio.Event | None = None

    def _write(self, written: Written) -> None:
        if str(written) == self.refused:
            raise StaleAttempt(RUN, 1)
        super()._write(written)

    async def start_call(self, step: int, ordinal: int, call: ToolCall) -> None:
        if self.when is not None and f"started {step}.{ordinal}" == self.refused:
            await self.when.wait()
        await super().start_call(step, ordinal, call)


@pytest.mark.parametrize("refused", ["step 0", "started 0.0", "finished 0.0", "spawned 0.1", "step 1"])
def test_a_refused_write_stops_everything(make: Make, refused: str) -> None:
    journal, model = Refusing(refused=refused), Playing(asks(("double", {"n": 1}), ("spawn_agent", SPAWN)), DONE)
    if refused == "step 1":
        model = Playing(asks(("double", {"n": 1})), DONE)
    with pytest.raises(StaleAttempt, match="attempt 1"):
        run(make(LEAD, model, journal))
    assert refused not in journal.events
    assert "step 1" not in journal.events


def test_a_refused_write_cancels_the_calls_beside_it(make: Make) -> None:
    started = asyncio.Event()
    ended: list[str] = []

    @tool(timeout=10)
    async def hang() -> None:
        """Hang."""
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    journal = Refusing(refused="started 0.1", when=started)
    with pytest.raises(StaleAttempt):
        run(make(agent(hang), Playing(asks(("hang", {}), ("hang", {}))), journal))
    assert ended == ["cancelled"]
    assert journal.events == ["step 0", "started 0.0"]


def test_two_refusals_at_once_are_one_error(make: Make) -> None:
    @dataclass
    class All(Recorder):
        async def start_call(self, step: int, ordinal: int, call: ToolCall) -> None:
            raise StaleAttempt(RUN, ordinal)

    with pytest.raises(StaleAttempt):
        run(make(agent(double), Playing(asks(("double", {"n": 1}), ("double", {"n": 2}))), All()))


def test_without_a_fresh_lease_no_model_is_asked(make: Make) -> None:
    model = Playing(DONE)
    with pytest.raises(StaleAttempt):
        run(make(agent(), model, Recorder(lost=True)))
    assert model.asked == []


def test_without_a_fresh_lease_a_model_is_not_asked_again(make: Make, waits: list[float]) -> None:
    journal = Recorder()

    class Losing(Playing):
        async def complete(self, *args: Any, **options: Any) -> Turn:
            journal.lost = True
            return await super().complete(*args, **options)

    model = Losing(unavailable(), DONE)
    with pytest.raises(StaleAttempt):
        run(make(agent(), model, journal))
    assert len(model.asked) == 1


@pytest.mark.parametrize(("idempotent", "begun"), [(False, False), (True, False), (True, True)])
def test_without_a_fresh_lease_no_call_is_made(make: Make, idempotent: bool, begun: bool) -> None:
    counting = Counting(idempotent=idempotent)
    turn = asks(("count", {"of": "a"}))
    writes = [Written("step", 0, turn=turn)] + ([Written("started", 0, 0, call=turn.calls[0])] if begun else [])
    with pytest.raises(StaleAttempt):
        run(make(counting.agent, Playing(DONE), Recorder(writes, lost=True)))
    assert counting.executed == {}


def test_a_run_that_is_cut_off_finishes_no_call(make: Make) -> None:
    async def cut_off() -> None:
        started = asyncio.Event()

        @tool(timeout=10)
        async def hang() -> None:
            """Hang."""
            started.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(engine.run(make(agent(hang), Playing(asks(("hang", {}))), journal)))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    journal = Recorder()
    asyncio.run(cut_off())
    assert journal.events == ["step 0", "started 0.0"]


# A person's word


@tool(approval="always", risk="high", approval_timeout=9, sensitive_params=["key"])
def wipe(disk: str, key: str = "") -> str:
    """Wipe a disk."""
    return f"wiped {disk} with {key}"


WIPE = asks(("wipe", {"disk": "b", "key": "s3cr3t-key"}))


def test_a_call_that_needs_a_word_is_asked_about_and_not_made(make: Make) -> None:
    journal = Recorder()
    assert run(make(agent(wipe), Playing(WIPE), journal)) == Parked("approval of wipe")
    assert journal.events == ["step 0", "asked 0.0"]
    (ask,) = journal.asks
    assert (ask.kind, ask.tool, ask.risk, ask.timeout) == ("approval", "wipe", "high", 9)
    assert ask.shown == '{"disk": "b", "key": "***"}'
    assert not ask.unless_auto_approved
    # It goes on waiting, and is not asked about again.
    assert run(make(agent(wipe), Playing(), journal)) == Parked("approval of wipe")
    assert len(journal.asks) == 1


def test_an_approved_call_is_made_once_as_it_was_asked_about(make: Make) -> None:
    journal = Recorder()
    run(make(agent(wipe), Playing(WIPE), journal))
    journal.decide(0, 0, GRANTED)
    model = Playing(Turn(text="done with s3cr3t-key"))
    assert run(make(agent(wipe), model, journal)) == Answered("done with ***")
    assert journal.events == ["step 0", "asked 0.0", "decided 0.0", "started 0.0", "finished 0.0", "step 1"]
    assert told(model.asked[0]) == [("wiped b with ***", False)]
    assert journal.shown == ['{"disk": "b", "key": "***"}']


@pytest.mark.parametrize("decision", ["deny", "timed_out"])
def test_a_call_that_is_not_approved_is_not_made_and_the_model_is_told(make: Make, decision: Any) -> None:
    journal = Recorder()
    run(make(agent(wipe), Playing(WIPE), journal))
    word = word_told("approval", decision, "ada", "no")
    journal.decide(0, 0, word)
    model = Playing(DONE)
    assert run(make(agent(wipe), model, journal)) == Answered("done")
    assert journal.events == ["step 0", "asked 0.0", "decided 0.0", "refused 0.0", "step 1"]
    assert told(model.asked[0]) == [(word.content, True)]


def test_another_call_than_the_approved_one_is_not_made(make: Make) -> None:
    journal = Recorder()
    run(make(agent(wipe), Playing(WIPE), journal))
    journal.decide(0, 0, GRANTED)
    model = Playing(DONE)
    other = {0: asks(("wipe", {"disk": "a"}))}
    assert run(make(agent(wipe), model, journal, steps=other)) == Answered("done")
    assert told(model.asked[0]) == [("denied: this is not the call that was approved; it was not made", True)]


@pytest.mark.parametrize(("word", "made"), [(GRANTED, True), (nobody_to_ask(), False)])
def test_a_word_that_is_there_at_once_is_not_waited_for(make: Make, word: CallOutcome, made: bool) -> None:
    journal = Recorder(word=word)
    assert run(make(agent(wipe), Playing(WIPE, DONE), journal)) == Answered("done")
    assert ("started 0.0" in journal.events) == made
    assert ("refused 0.0" in journal.events) == (not made)


@pytest.mark.parametrize(
    ("name", "given", "scope"), [("wipe", {"disc": "b"}, None), ("wipe", {"disk": "b"}, []), ("wipes", {}, None)]
)
def test_nobody_is_asked_about_what_cannot_be_called(
    make: Make, name: str, given: dict[str, object], scope: list[str] | None
) -> None:
    journal = Recorder()
    context = make(agent(wipe), Playing(asks((name, given)), DONE), journal, scope=() if scope is None else [scope])
    assert run(context) == Answered("done")
    assert journal.asks == []


def test_of_several_calls_each_waits_for_its_own_word_and_the_others_are_made(make: Make) -> None:
    journal = Recorder()
    turn = asks(("wipe", {"disk": "a"}), ("double", {"n": 2}), ("wipe", {"disk": "b"}))
    assert run(make(agent(wipe, double), Playing(turn), journal)) == Parked("2 x approval of wipe")
    assert journal.outcome(0, 1).content == "4"
    journal.decide(0, 0, GRANTED)
    assert run(make(agent(wipe, double), Playing(), journal)) == Parked("approval of wipe")


def test_a_spawn_can_need_a_word(make: Make) -> None:
    journal = Recorder()
    lead = agent("spawn_agent", may_spawn=["child"], policies={"spawn_agent": {"approval": "unless_auto_approved"}})
    spawn = asks(("spawn_agent", {"agent": "child", "instruction": "go"}))
    assert run(make(lead, Playing(spawn), journal)) == Parked("approval of spawn_agent")
    assert journal.asks[0].unless_auto_approved
    journal.decide(0, 0, GRANTED)
    assert run(make(lead, Playing(), journal)) == Parked("child")


def test_a_question_waits_for_its_answer(make: Make) -> None:
    journal = Recorder()
    # No glob makes it need a word itself.
    curious = agent("ask_human", policies={"*": {"approval": "always"}})
    question = asks(("ask_human", {"question": "Which?", "options": ["a", "b"], "timeout": 5}))
    assert run(make(curious, Playing(question), journal)) == Parked("an answer")
    (ask,) = journal.asks
    assert (ask.kind, ask.shown, ask.choices, ask.timeout) == ("question", "Which?", ["a", "b"], 5)


@pytest.mark.parametrize(
    "given", [{}, {"question": " "}, {"question": "?", "options": []}, {"question": "?", "timeout": 0}]
)
def test_a_question_that_is_none_is_refused(make: Make, given: dict[str, object]) -> None:
    journal = Recorder()
    model = Playing(asks(("ask_human", given)), DONE)
    assert run(make(agent("ask_human"), model, journal)) == Answered("done")
    assert told(model.asked[1])[0][0].startswith("bad_arguments: ask_human: ")


def test_what_is_sensitive_in_one_call_of_a_turn_is_masked_in_those_before_it(make: Make) -> None:
    journal = Recorder()
    turn = asks(("double", {"n": "s3cr3t-key"}), ("wipe", {"disk": "b", "key": "s3cr3t-key"}))
    run(make(agent(wipe, double), Playing(turn), journal))
    assert journal.shown == ['{"n": "***"}']


@pytest.mark.parametrize("key", ["true", "question", '": "', "null", "options"])
def test_a_sensitive_value_that_is_also_how_json_is_written_spoils_no_arguments(make: Make, key: str) -> None:
    journal = Recorder(word=GRANTED)
    question = {"question": f"Is {key} right?", "options": [key, "no"], "timeout": None}
    turn = asks(("wipe", {"disk": "b", "key": key}), ("ask_human", question))
    run(make(agent(wipe, "ask_human"), Playing(turn, DONE), journal))
    (ask,) = [ask for ask in journal.asks if ask.kind == "question"]
    assert (ask.shown, ask.choices) == ("Is *** right?", ["***", "no"])
