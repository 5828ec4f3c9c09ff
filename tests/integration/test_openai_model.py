"""The openai adapter over HTTP, against the stub server: turns, faults, time-outs, cancelling."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from chaz.errors import ConfigurationError, ModelError, ModelUnavailable
from chaz.outcomes import ToolCall, Turn, Usage
from chaz.runtime.models import (
    AssistantMessage,
    HistoryMessage,
    ToolMessage,
    ToolSchema,
    UserMessage,
    resolve_model,
)
from chaz.runtime.models.openai import OpenAIModel, retry_after
from chaz.testing import StubServer, eventually, eventually_async

TOOLS = [ToolSchema(name="search", description="Find.", parameters={"type": "object"})]
CALLS = {
    "text": "let me look",
    "calls": [
        {"tool": "search", "arguments": {"q": "{{input}}"}},
        {"tool": "search", "arguments": '{"q": broken', "id": "mine"},
    ],
}


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubServer]:
    with StubServer() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "the-key-of-the-test")
        yield server


def user(text: str, *turns: dict[str, Any]) -> UserMessage:
    return UserMessage(text=f"{text}\n```script\n{json.dumps(turns)}\n```")


def complete(
    *history: HistoryMessage,
    system: str = "",
    tools: Sequence[ToolSchema] = TOOLS,
    timeout: float = 10.0,
    on_delta: Callable[[str], None] | None = None,
) -> Turn:
    model = OpenAIModel("gpt-stub")
    return asyncio.run(model.complete(system, history, tools, timeout=timeout, on_delta=on_delta))


def drop(_: str) -> None:
    pass


both_ways = pytest.mark.parametrize("on_delta", [None, drop], ids=["plain", "streamed"])


def test_a_plain_turn(stub: StubServer) -> None:
    usage = {"prompt": 9, "completion": 8, "cached": 7, "reasoning": 6}
    turn = complete(user("go", {"text": "hello {{input}}", "usage": usage}), system="be brief")
    assert (turn.text, turn.calls, turn.model) == ("hello go", (), "gpt-stub")
    assert turn.usage == Usage(**usage)
    [body] = stub.requests
    assert body["model"] == "gpt-stub"
    assert body["messages"][0] == {"role": "system", "content": "be brief"}
    assert body["messages"][1]["role"] == "user"
    assert not body.get("stream")


def test_a_tool_is_shown_with_its_schema_and_no_tools_as_none(stub: StubServer) -> None:
    complete(user("go", {"text": ""}))
    complete(user("go", {"text": ""}), tools=[])
    function = {"name": "search", "description": "Find.", "parameters": {"type": "object"}}
    assert stub.requests[0]["tools"] == [{"type": "function", "function": function}]
    assert "tools" not in stub.requests[1]


def test_a_streamed_turn_gives_its_text_as_it_comes(stub: StubServer) -> None:
    deltas: list[str] = []
    usage = {"prompt": 9, "completion": 8, "cached": 7, "reasoning": 6}
    script = {"text": "one two three", "usage": usage}
    turn = complete(user("go", script), on_delta=deltas.append)
    assert deltas == ["one ", "two ", "three"]
    assert (turn.text, turn.model, turn.usage) == ("one two three", "gpt-stub", Usage(**usage))
    assert stub.requests[0]["stream"] is True


@both_ways
def test_calls_keep_their_arguments_exactly(stub: StubServer, on_delta: Callable[[str], None] | None) -> None:
    turn = complete(user('a "b"', CALLS), on_delta=on_delta)
    assert turn.text == "let me look"
    assert turn.calls == (
        ToolCall(id="call_0_0", tool="search", arguments=json.dumps({"q": 'a "b"'})),
        ToolCall(id="mine", tool="search", arguments='{"q": broken'),
    )


@both_ways
def test_the_native_message_goes_back_unchanged(stub: StubServer, on_delta: Callable[[str], None] | None) -> None:
    details = [{"type": "reasoning.text", "text": "hm", "index": 0, "signature": "abc"}]
    extra = {"reasoning_content": "a long thought", "reasoning_details": details}
    asked = user("go", {**CALLS, "native": extra}, {"text": "got {{0.1}}"})
    turn = complete(asked, on_delta=on_delta)
    assert turn.native is not None
    # As the journal keeps it.
    turn = Turn.model_validate_json(turn.model_dump_json())
    results = [
        ToolMessage(call_id="call_0_0", tool="search", content="x"),
        ToolMessage(call_id="mine", tool="search", content="y", is_error=True),
    ]
    assert complete(asked, AssistantMessage(turn=turn), *results).text == "got y"
    _, sent, *answers = stub.requests[1]["messages"]
    functions = [
        {"name": "search", "arguments": '{"q": "go"}'},
        {"name": "search", "arguments": '{"q": broken'},
    ]
    assert sent == {
        "role": "assistant",
        "content": "let me look",
        "tool_calls": [
            {"id": call_id, "type": "function", "function": function}
            for call_id, function in zip(["call_0_0", "mine"], functions, strict=True)
        ],
        **extra,
    }
    assert answers == [
        {"role": "tool", "tool_call_id": "call_0_0", "content": "x"},
        {"role": "tool", "tool_call_id": "mine", "content": "y"},
    ]


def test_what_one_side_says_in_a_row_is_joined(stub: StubServer) -> None:
    said = [AssistantMessage(turn=Turn(text=text)) for text in ("three", "four")]
    complete(UserMessage(text="one"), UserMessage(text="two"), *said, UserMessage(text="five"), system="Be brief.")
    assert stub.requests[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\n\ntwo"},
        {"role": "assistant", "content": "three\n\nfour"},
        {"role": "user", "content": "five"},
    ]


def test_a_turn_of_another_provider_is_built_from_its_neutral_fields(stub: StubServer) -> None:
    call = ToolCall(id="a", tool="search", arguments="{oops")
    turn = Turn(text="hm", calls=(call,), native={"provider": "other", "message": {"x": 1}})
    result = ToolMessage(call_id="a", tool="search", content="x")
    complete(user("go", {}, {"text": "done"}), AssistantMessage(turn=turn), result)
    function = {"name": "search", "arguments": "{oops"}
    assert stub.requests[0]["messages"][1] == {
        "role": "assistant",
        "content": "hm",
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }


@both_ways
@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
def test_a_status_that_may_pass_is_unavailable_and_asked_once(
    stub: StubServer, status: int, on_delta: Callable[[str], None] | None
) -> None:
    fault = {"status": status, "retry_after": 1.5, "message": "come back"}
    with pytest.raises(ModelUnavailable, match=f"HTTP {status}: come back") as error:
        complete(user("go", {"fault": fault}), on_delta=on_delta)
    assert error.value.retry_after == 1.5
    assert len(stub.requests) == 1


@both_ways
@pytest.mark.parametrize(
    ("status", "text"),
    [
        (400, "HTTP 400: no"),
        (401, "HTTP 401, the key in OPENAI_API_KEY is refused"),
        (403, "HTTP 403, the key"),
        (404, "HTTP 404, no such model"),
        (422, "HTTP 422: no"),
    ],
)
def test_a_status_that_lasts_is_an_error_without_secrets(
    stub: StubServer, status: int, text: str, on_delta: Callable[[str], None] | None
) -> None:
    fault = {"status": status, "message": "no: the-key-of-the-test or sk-sec****test"}
    with pytest.raises(ModelError, match=text) as error:
        complete(user("go", {"fault": fault}), on_delta=on_delta)
    assert not isinstance(error.value, ModelUnavailable)
    assert str(error.value).endswith("no: *** or ***")
    assert len(stub.requests) == 1


@both_ways
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"reset": True}, "onnection"),
        ({"malformed": True}, "malformed answer"),
        ({"empty_choices": True}, "choices is empty|without a finish reason"),
        ({"truncate": True}, "onnection|without a finish reason"),
        ({"finish_reason": "error"}, "with an error"),
    ],
)
def test_a_broken_answer_is_unavailable(
    stub: StubServer,
    fault: dict[str, Any],
    reason: str,
    on_delta: Callable[[str], None] | None,
) -> None:
    usage = {"prompt": 9, "completion": 8, "cached": 7, "reasoning": 6}
    with pytest.raises(ModelUnavailable, match=reason) as error:
        complete(user("go", {"text": "some words here", "usage": usage, "fault": fault}), on_delta=on_delta)
    assert error.value.retry_after is None
    # What was given and is refused was paid for; of what did not come whole nobody knows.
    assert error.value.usage == (usage if {"empty_choices", "finish_reason"} & fault.keys() else None)
    assert len(stub.requests) == 1


@both_ways
@pytest.mark.parametrize(("finish_reason", "text"), [("length", "cut off by length"), ("content_filter", "filter")])
def test_a_turn_that_was_cut_off_is_refused(
    stub: StubServer,
    finish_reason: str,
    text: str,
    on_delta: Callable[[str], None] | None,
) -> None:
    usage = {"prompt": 9, "completion": 8, "cached": 7, "reasoning": 6}
    asked = user("go", {**CALLS, "usage": usage, "fault": {"finish_reason": finish_reason}})
    with pytest.raises(ModelError, match=text) as error:
        complete(asked, on_delta=on_delta)
    assert not isinstance(error.value, ModelUnavailable)
    # It was paid for.
    assert error.value.usage == usage


def test_a_fault_with_times_passes_when_asked_again(stub: StubServer) -> None:
    asked = user("go", {"text": "at last", "fault": {"status": 503, "times": 2}})
    for _ in range(2):
        with pytest.raises(ModelUnavailable):
            complete(asked)
    assert complete(asked).text == "at last"


def test_latency_is_waited_for(stub: StubServer) -> None:
    begun = time.monotonic()
    assert complete(user("go", {"text": "late", "fault": {"latency": 0.2}})).text == "late"
    assert time.monotonic() - begun >= 0.2


def test_the_errors_of_a_script_come_over_http(stub: StubServer) -> None:
    with pytest.raises(ModelUnavailable) as error:
        complete(user("go", {"error": "unavailable", "retry_after": 3}))
    assert error.value.retry_after == 3
    with pytest.raises(ModelError, match="HTTP 400: refused"):
        complete(user("go", {"error": "refused"}))
    with pytest.raises(ModelError, match=r"HTTP 400: .*past the end"):
        complete(user("go", {"text": ""}), AssistantMessage(turn=Turn(text="")))


@pytest.mark.parametrize(
    ("fault", "on_delta"),
    [({"hang": True}, None), ({"hang": True}, drop), ({"drip": 0.15}, drop)],
    ids=["plain", "streamed", "dripping"],
)
def test_the_whole_turn_is_within_its_timeout(
    stub: StubServer, fault: dict[str, Any], on_delta: Callable[[str], None] | None
) -> None:
    asked = user("go", {"text": "a " * 999, "fault": fault})

    async def give_up() -> None:
        model = OpenAIModel("gpt-stub")
        # Making the client takes time of its own on a busy machine.
        await model.complete("", [UserMessage(text="hi")], [], timeout=60)
        begun = time.monotonic()
        with pytest.raises(ModelUnavailable, match=r"within 1 s|time-out"):
            await model.complete("", [asked], TOOLS, timeout=1, on_delta=on_delta)
        assert 0.9 <= time.monotonic() - begun < 5

    asyncio.run(give_up())
    eventually(lambda: stub.aborted == 1)


@both_ways
def test_cancelling_aborts_the_request(stub: StubServer, on_delta: Callable[[str], None] | None) -> None:
    async def cancel() -> None:
        model = OpenAIModel("gpt-stub")
        turn = asyncio.create_task(
            model.complete(
                "",
                [user("go", {"text": "a " * 999, "fault": {"hang": True}})],
                TOOLS,
                timeout=60,
                on_delta=on_delta,
            )
        )

        async def arrived() -> bool:
            return len(stub.requests) == 1

        await eventually_async(arrived)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn

    asyncio.run(cancel())
    eventually(lambda: stub.aborted == 1)


def test_cancelling_in_the_middle_of_a_stream_aborts_the_request(stub: StubServer) -> None:
    async def cancel() -> None:
        begun = asyncio.Event()
        asked = user("go", {"text": "a " * 999, "fault": {"drip": 0.02}})
        turn = asyncio.create_task(
            OpenAIModel("gpt-stub").complete("", [asked], TOOLS, timeout=60, on_delta=lambda _: begun.set())
        )
        await begun.wait()
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn

    asyncio.run(cancel())
    eventually(lambda: stub.aborted == 1)


def test_what_on_delta_raises_is_not_taken_for_the_models_error(stub: StubServer) -> None:
    def refuse(_: str) -> None:
        raise json.JSONDecodeError("of the caller", "", 0)

    with pytest.raises(json.JSONDecodeError, match="of the caller"):
        complete(user("go", {"text": "words"}), on_delta=refuse)


def test_one_adapter_serves_many_turns_at_once(stub: StubServer) -> None:
    model = OpenAIModel("gpt-stub")

    async def turns() -> list[str]:
        asked = [user(f"n{number}", {"text": "{{input}}"}) for number in range(20)]
        answers = [model.complete("", [each], [], timeout=20) for each in asked]
        return [turn.text for turn in await asyncio.gather(*answers)]

    assert asyncio.run(turns()) == [f"n{number}" for number in range(20)]


# The first loop leaves an idle connection that nobody can close any more.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_one_adapter_serves_loop_after_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    with StubServer(keep_alive=True) as stub:
        monkeypatch.setenv("OPENAI_BASE_URL", stub.base_url)
        model = OpenAIModel("gpt-stub")
        asyncio.run(model.complete("", [UserMessage(text="hi")], [], timeout=10))

        async def again() -> Turn:
            try:
                return await model.complete("", [UserMessage(text="hi")], [], timeout=10)
            finally:
                await model.aclose()

        assert asyncio.run(again()).text == "You said: hi"
    # Here, where its warning is ignored, and not in the middle of another test.
    gc.collect()


def test_closing_is_no_end(stub: StubServer) -> None:
    async def twice() -> None:
        model = OpenAIModel("gpt-stub")
        for _ in range(2):
            await model.complete("", [user("go", {"text": "x"})], [], timeout=10)
            await model.aclose()

    asyncio.run(twice())
    assert len(stub.requests) == 2


def test_the_stub_stops_at_once_while_a_request_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stop() -> None:
        with StubServer() as stub:
            monkeypatch.setenv("OPENAI_BASE_URL", stub.base_url)
            asked = user("go", {"fault": {"hang": True}})
            model = OpenAIModel("gpt-stub")
            turn = asyncio.create_task(model.complete("", [asked], TOOLS, timeout=60))

            async def arrived() -> bool:
                return len(stub.requests) == 1

            await eventually_async(arrived)
        with pytest.raises(ModelUnavailable):
            await turn

    begun = time.monotonic()
    asyncio.run(stop())
    assert time.monotonic() - begun < 10


def test_nobody_listening_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{taken.getsockname()[1]}/v1")
        with pytest.raises(ModelUnavailable, match=r"Connection error\. \w"):
            complete(UserMessage(text="hi"))


def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ConfigurationError, match="set OPENAI_API_KEY"):
        resolve_model("openai:gpt-stub")


def test_another_endpoint_needs_no_key(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    assert complete(user("go", {"text": "hello"})).text == "hello"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "12"}, 12.0),
        ({"retry-after": "-1"}, 0.0),
        ({"retry-after": "12", "retry-after-ms": "250"}, 0.25),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
    ],
)
def test_retry_after_is_read(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


def test_retry_after_may_be_a_date(stub: StubServer) -> None:
    then = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    fault = {"status": 429, "headers": {"Retry-After": then}}
    with pytest.raises(ModelUnavailable) as error:
        complete(user("go", {"fault": fault}))
    assert error.value.retry_after is not None
    assert 50 < error.value.retry_after <= 60
