"""Tools: what a model is shown of a function, and what it is told of a call, whatever the function does."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import math
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, Field

from chaz.errors import AgentsError
from chaz.outcomes import CallOutcome
from chaz.runtime.builtin import RESULT_SCHEMA, SPAWN_SCHEMA, ResultArguments, SpawnArguments
from chaz.runtime.models import ToolSchema
from chaz.runtime.threads import ToolThreads
from chaz.runtime.tools import CallContext, Tool, as_text, current_call, tool
from chaz.testing import eventually_async

CALL = CallContext(run_id=UUID(int=1), session_id=UUID(int=2), agent="reader", step=3, ordinal=4)


@pytest.fixture
def threads() -> ToolThreads:
    return ToolThreads(4)


Call = Callable[..., CallOutcome]


@pytest.fixture
def call(threads: ToolThreads) -> Call:
    """Call a tool as the engine does."""

    def call(made: Tool, arguments: str = "{}") -> CallOutcome:
        try:
            return asyncio.run(made.call(arguments, CALL, threads))
        except KeyboardInterrupt:
            # It would end pytest.
            pytest.fail("the tool's KeyboardInterrupt got through")

    return call


def ok(content: str) -> CallOutcome:
    return CallOutcome(kind="ok", content=content)


# What a model is shown


class Order(BaseModel):
    dish: str
    count: int = 1


@tool
def cook(order: Order, speed: Literal["slow", "fast"] = "slow", notes: Annotated[str, Field(max_length=9)] = "") -> str:
    """Cook a dish.

    It takes a while.
    """
    return f"{order.count} {order.dish} {speed} {notes}"


def test_a_schema_is_made_of_name_docstring_and_hints() -> None:
    schema = cook.schema
    assert (schema.name, schema.description) == ("cook", "Cook a dish.\n\nIt takes a while.")
    assert schema.parameters["type"] == "object"
    assert schema.parameters["required"] == ["order"]
    assert schema.parameters["additionalProperties"] is False
    assert schema.parameters["properties"]["speed"]["enum"] == ["slow", "fast"]
    assert schema.parameters["properties"]["speed"]["default"] == "slow"
    assert schema.parameters["properties"]["notes"]["maxLength"] == 9
    assert "title" not in schema.parameters
    assert json.loads(json.dumps(schema.parameters)) == schema.parameters


def test_a_tool_without_parameters_has_the_schema_of_an_empty_object(call: Call) -> None:
    @tool
    def now() -> str:
        """Tell the time."""
        return "noon"

    assert now.schema.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert call(now, "") == ok("noon")


def test_a_tool_is_still_a_function() -> None:
    assert cook(Order(dish="soup"), speed="fast") == "1 soup fast "


def test_options_of_a_tool() -> None:
    @tool(name="other", timeout=7, idempotent=True)
    def mine() -> None:
        """Do."""

    assert (mine.name, mine.schema.name) == ("other", "other")
    assert (mine.policy.timeout, mine.policy.idempotent) == (7, True)
    assert (cook.policy.timeout, cook.policy.idempotent) == (60.0, False)
    assert mine.place.startswith(f"{__file__}:")


# The source of a tool's module, the line that is to blame, and what is said.
MISTAKES = [
    ("@tool\ndef f(x): 'Do.'", 1, "no type hint for 'x'"),
    ("\n\n@tool\ndef f(x: int, y=1): 'Do.'", 3, "no type hint for 'y'"),
    ("@tool\ndef f(x: int): pass", 1, "tool 'f' has no docstring"),
    ("@tool\ndef f(x: int): '  '", 1, "no docstring"),
    ("@tool\ndef f(*args: int): 'Do.'", 1, r"takes \*args: int"),
    ("@tool\ndef f(**more: int): 'Do.'", 1, r"takes \*\*more: int"),
    ("@tool\ndef f(x: int, /): 'Do.'", 1, "takes x: int"),
    ("@tool\ndef f(x: 'Missing'): 'Do.'", 1, "type hint that names nothing: name 'Missing'"),
    ("@tool\ndef f(x: 'int |'): 'Do.'", 1, "type hint"),
    ("import os\n@tool\ndef f(x: 'os.Missing'): 'Do.'", 2, "type hint"),
    ("class C: pass\n@tool\ndef f(x: C): 'Do.'", 2, "that JSON cannot carry"),
    ("from typing import Callable\n@tool\ndef f(x: Callable[[], int]): 'Do.'", 2, "that JSON cannot carry"),
    ("@tool(timeout=0)\ndef f(x: int): 'Do.'", 1, "timeout is 0: input should be greater than 0"),
    ("@tool(timeout=-1)\nasync def f(x: int): 'Do.'", 1, "timeout is -1: input should be"),
    ("\n@tool(name='other')\ndef f(x): 'Do.'", 2, "tool 'other' has no type hint"),
    ("@tool(name='web..search')\ndef f(x: int): 'Do.'", 1, "'web..search'"),
    (f"@tool(name='{'a.' * 22}a')\ndef f(x: int): 'Do.'", 1, "64 in all"),
    ("@tool(name='two words')\ndef f(x: int): 'Do.'", 1, "'two words'"),
]


@pytest.mark.parametrize(("source", "line", "told"), MISTAKES, ids=lambda value: str(value)[-40:])
def test_what_a_model_could_not_call_is_told_with_file_and_line(source: str, line: int, told: str) -> None:
    with pytest.raises(AgentsError, match=told) as error:
        exec(compile(source, "tools.py", "exec", dont_inherit=True), {"tool": tool})
    assert error.value.args[0] == f"tools.py:{line}"


@pytest.mark.parametrize(("schema", "arguments"), [(SPAWN_SCHEMA, SpawnArguments), (RESULT_SCHEMA, ResultArguments)])
def test_a_built_in_tool_is_shown_as_it_is_read(schema: ToolSchema, arguments: type[BaseModel]) -> None:
    shown, read = schema.parameters, arguments.model_json_schema()
    assert set(shown["properties"]) == set(read["properties"])
    assert shown["required"] == read["required"]
    assert shown["additionalProperties"] is read["additionalProperties"] is False


# The call's context


@tool
def who(text: str, call: CallContext) -> str:
    """Say who calls."""
    return f"{text} {call.agent} {call.idempotency_key}"


def test_the_context_is_given_to_the_tool_and_hidden_from_the_model(call: Call) -> None:
    assert list(who.schema.parameters["properties"]) == ["text"]
    assert call(who, '{"text": "hi"}') == ok(f"hi reader {UUID(int=1)}:3:4")
    assert call(who, '{"text": "hi", "call": {}}').kind == "error"


def test_the_context_is_found_by_a_hint_that_is_text_or_optional(call: Call) -> None:
    @tool
    def one(context: "CallContext") -> str:  # noqa: UP037
        """Say who calls."""
        return context.agent

    @tool
    def two(context: CallContext | None = None) -> str:
        """Say who calls."""
        return context.agent if context else "nobody"

    for made in (one, two):
        assert made.schema.parameters["properties"] == {}
        assert call(made) == ok("reader")


def test_the_idempotency_key_is_of_the_place_in_the_run_only() -> None:
    assert CALL.idempotency_key == dataclasses.replace(CALL, agent="other").idempotency_key
    others = [{"run_id": UUID(int=9)}, {"step": 9}, {"ordinal": 9}]
    assert len({CALL.idempotency_key, *(dataclasses.replace(CALL, **other).idempotency_key for other in others)}) == 4


def test_code_in_a_tool_knows_that_it_is_in_one(call: Call) -> None:
    seen: list[CallContext | None] = []

    @tool
    def blocking() -> None:
        """Look."""
        seen.append(current_call.get())

    @tool
    async def cooperative() -> None:
        """Look."""
        seen.append(current_call.get())
        raise ValueError

    call(blocking)
    call(cooperative)
    assert seen == [CALL, CALL]


def test_after_a_tool_nobody_is_in_one(threads: ToolThreads) -> None:
    @tool
    async def fails() -> None:
        """Fail."""
        raise ValueError

    @tool
    def works() -> None:
        """Work."""

    async def both() -> None:
        for made in (fails, works, cook):
            await made.call("{}", CALL, threads)
            assert current_call.get() is None
        await threads.reserve()
        assert await threads.run(current_call.get) is None

    asyncio.run(both())


# Arguments


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("{", "bad arguments for cook: arguments: Invalid JSON"),
        ("[]", "bad arguments for cook: arguments: "),
        ("null", "bad arguments for cook: arguments: "),
        ("", "bad arguments for cook: order: Field required"),
        ('{"order": {}}', "order.dish: Field required"),
        ('{"order": {"dish": "soup"}, "speed": "warp"}', "speed: Input should be 'slow' or 'fast'"),
        ('{"order": {"dish": 3, "count": "x"}}', "order.dish: "),
        ('{"order": {"dish": 3, "count": "x"}}', "; order.count: "),
        ('{"order": {"dish": "soup"}, "salt": 1}', "salt: Extra inputs are not permitted"),
        ('{"order": {"dish": "soup"}, "notes": "0123456789"}', "notes: String should have at most 9"),
        ('{"order": {"dish": "\\ud800"}}', "bad arguments for cook: arguments: Invalid JSON"),
    ],
)
def test_bad_arguments_are_told_in_words(call: Call, arguments: str, told: str) -> None:
    outcome = call(cook, arguments)
    assert outcome.kind == "error"
    assert told in outcome.content
    assert "pydantic.dev" not in outcome.content


def test_arguments_come_as_their_types(call: Call) -> None:
    assert cook.parse('{"order": {"dish": "soup", "count": "2"}}') == {
        "order": Order(dish="soup", count=2),
        "speed": "slow",
        "notes": "",
    }
    assert call(cook, '{"order": {"dish": "soup"}, "speed": "fast", "notes": "hot"}') == ok("1 soup fast hot")


def test_parameters_may_have_the_names_of_a_models_own_methods(call: Call) -> None:
    @tool
    def f(json: str, copy: int, schema: str = "s", model_name: str = "m") -> list[object]:
        """Give it back."""
        return [json, copy, schema, model_name]

    assert call(f, '{"json": "j", "copy": 3}') == ok('["j",3,"s","m"]')


# Results


class Colour(Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int


class Plain:
    def __repr__(self) -> str:
        return "<a plain object>"


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("as it is", "as it is"),
        ("", ""),
        (None, "null"),
        (True, "true"),
        (3, "3"),
        (0.5, "0.5"),
        (math.nan, '"NaN"'),
        ([1.0, math.inf, -math.inf], '[1.0,"Infinity","-Infinity"]'),
        ({"a": [1, None, "é"]}, '{"a":[1,null,"é"]}'),
        ((1, 2), "[1,2]"),
        ({3}, "[3]"),
        (b"text", '"text"'),
        (b"\xff", r"b'\xff'"),
        (Order(dish="soup"), '{"dish":"soup","count":1}'),
        ([Order(dish="soup")], '[{"dish":"soup","count":1}]'),
        (Point(1), '{"x":1}'),
        (Colour.RED, '"red"'),
        (UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (datetime(2030, 1, 2, tzinfo=UTC), '"2030-01-02T00:00:00Z"'),
        (Path("/tmp"), '"/tmp"'),
        (Plain(), "<a plain object>"),
        ([Plain()], "[<a plain object>]"),
        ({"a": Plain()}, "{'a': <a plain object>}"),
        (["\ud800"], r'["\ud800"]'),
    ],
    ids=repr,
)
def test_a_result_is_text_or_json_or_what_it_is_called(call: Call, result: object, text: str) -> None:
    @tool
    def blocking() -> Any:
        """Give it."""
        return result

    @tool
    async def cooperative() -> Any:
        """Give it."""
        return result

    assert as_text(result) == text
    assert call(blocking) == call(cooperative) == ok(text)


def test_a_result_that_holds_itself(call: Call) -> None:
    @tool
    def circle() -> list[Any]:
        """Give a list that is in itself."""
        made: list[Any] = []
        made.append(made)
        return made

    assert call(circle) == ok("[[...]]")


def test_a_result_that_cannot_be_told_is_an_error(call: Call) -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no words")

    @tool
    def broken() -> object:
        """Give something unspeakable."""
        return Broken()

    outcome = call(broken)
    assert outcome.kind == "error"
    assert "RuntimeError" in outcome.content


# Mistakes of a tool


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


MISHAPS: list[tuple[BaseException, str]] = [
    (ValueError("no such dish"), "ValueError: no such dish"),
    (KeyError("dish"), "KeyError: 'dish'"),
    (SystemExit(3), "SystemExit: 3"),
    (GeneratorExit(), "GeneratorExit"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (ExceptionGroup("both", [ValueError("a")]), "ExceptionGroup: both"),
    # Its own, not that of the call.
    (TimeoutError("the oven"), "TimeoutError: the oven"),
    # Of something the tool waited for: nobody has cancelled the run.
    (asyncio.CancelledError(), "CancelledError"),
    (concurrent.futures.CancelledError(), "CancelledError"),
    (StopIteration(), "StopIteration"),
    (Odd(), "Odd"),
]


@pytest.mark.parametrize(("mishap", "told"), MISHAPS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("kind", ["blocking", "cooperative"])
def test_whatever_a_tool_raises_is_an_error_result(call: Call, mishap: BaseException, told: str, kind: str) -> None:
    @tool(timeout=0.5)
    def blocking() -> None:
        """Fail."""
        raise mishap

    @tool(timeout=0.5)
    async def cooperative() -> None:
        """Fail."""
        raise mishap

    outcome = call(blocking if kind == "blocking" else cooperative)
    assert outcome.kind == "error"
    # A coroutine that raises StopIteration raises RuntimeError instead, says Python.
    assert f"{kind} raised " in outcome.content
    assert told in outcome.content


def test_an_async_tool_ends_at_its_time_out(call: Call) -> None:
    ended: list[str] = []

    @tool(timeout=0.05)
    async def waits() -> None:
        """Wait for ever."""
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")

    outcome = call(waits)
    assert outcome == CallOutcome(kind="error", content="waits did not end within 0.05 s; it may still take effect")
    assert ended == ["cleaned up"]


def test_a_sync_tool_is_left_behind_at_its_time_out(threads: ToolThreads) -> None:
    release, ended = threading.Event(), threading.Event()

    @tool(timeout=0.05)
    def hangs() -> None:
        """Wait for ever."""
        release.wait(30)
        ended.set()

    async def in_time() -> CallOutcome:
        try:
            return await hangs.call("{}", CALL, threads)
        finally:
            assert not ended.is_set()
            release.set()

    outcome = asyncio.run(in_time())
    assert outcome.kind == "error"
    assert "did not end within 0.05 s" in outcome.content
    assert ended.wait(30)


def test_a_sync_tool_sees_that_nobody_waits_for_it_any_more(threads: ToolThreads) -> None:
    seen, ended = list[bool](), threading.Event()

    @tool(timeout=0.2)
    def patient(context: CallContext) -> str:
        """Work until told."""
        seen.append(context.cancelled)
        while not context.cancelled:
            threading.Event().wait(0.01)
        ended.set()
        return "too late"

    async def cancelled() -> None:
        task = asyncio.create_task(patient.call("{}", dataclasses.replace(CALL), threads))
        while not seen:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert ended.wait(30)
    ended.clear()
    # Past its time-out too.
    outcome = asyncio.run(patient.call("{}", dataclasses.replace(CALL, ordinal=1), threads))
    assert "did not end within 0.2 s" in outcome.content
    assert ended.wait(30)
    assert seen == [False, False]


def test_a_cancelled_call_is_cancelled(threads: ToolThreads) -> None:
    async def cancel() -> None:
        started = asyncio.Event()

        @tool
        async def waits() -> None:
            """Wait for ever."""
            started.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(waits.call("{}", CALL, threads))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())


def test_sync_tools_do_not_hold_up_the_loop(threads: ToolThreads) -> None:
    together = threading.Barrier(2, timeout=30)

    @tool
    def meet() -> str:
        """Wait for the other."""
        together.wait()
        return "met"

    async def both() -> list[CallOutcome]:
        return await asyncio.gather(*(meet.call("{}", CALL, threads) for _ in range(2)))

    assert asyncio.run(both()) == [ok("met"), ok("met")]


def test_without_a_free_thread_a_sync_tool_is_not_started() -> None:
    ran: list[str] = []
    released = threading.Event()

    @tool(timeout=0.2)
    def hang() -> None:
        """Hang."""
        released.wait(20)

    @tool(timeout=0.2)
    def later() -> None:
        """Run."""
        ran.append("later")

    async def both() -> tuple[CallOutcome, CallOutcome, CallOutcome]:
        threads = ToolThreads(1)
        hung, refused = await hang.call("{}", CALL, threads), await later.call("{}", CALL, threads)
        assert threads.busy == 1
        released.set()
        await eventually_async(lambda: _is(threads.busy == 0))
        return hung, refused, await later.call("{}", CALL, threads)

    hung, refused, done = asyncio.run(both())
    assert hung.content == "hang did not end within 0.2 s; it may still take effect"
    assert refused == CallOutcome(kind="error", content="later was not started: all 1 threads for tools are busy")
    assert (done.kind, ran) == ("ok", ["later"])


async def _is(what: bool) -> bool:
    return what
