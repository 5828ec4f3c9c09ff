"""The scripted model: where its script is found, what its step is, and what a turn may say."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from chaz.errors import ModelError, ModelUnavailable
from chaz.outcomes import ToolCall, Turn, Usage
from chaz.runtime.models import (
    AssistantMessage,
    HistoryMessage,
    ToolMessage,
    ToolSchema,
    UserMessage,
    resolve_model,
)

TOOLS = [ToolSchema(name="search", description="", parameters={"type": "object"})]


def script(*turns: dict[str, Any]) -> str:
    return f"```script\n{json.dumps(turns)}\n```"


def complete(
    *history: HistoryMessage,
    system: str = "",
    tools: list[ToolSchema] = TOOLS,
    timeout: float = 5.0,
    deltas: list[str] | None = None,
) -> Turn:
    model = resolve_model("scripted")
    on_delta = None if deltas is None else deltas.append
    return asyncio.run(model.complete(system, history, tools, timeout=timeout, on_delta=on_delta))


def user(text: str, *turns: dict[str, Any]) -> UserMessage:
    return UserMessage(text=f"{text}\n{script(*turns)}" if turns else text)


def said(text: str = "", *ids: str) -> AssistantMessage:
    calls = tuple(ToolCall(id=call_id, tool="search", arguments="{}") for call_id in ids)
    return AssistantMessage(turn=Turn(text=text, calls=calls))


def got(call_id: str, content: str) -> ToolMessage:
    return ToolMessage(call_id=call_id, tool="search", content=content)


def call(tool: str = "search", **fields: Any) -> dict[str, Any]:
    return {"calls": [{"tool": tool, **fields}]}


def arguments(turn: Turn) -> list[Any]:
    return [json.loads(each.arguments) for each in turn.calls]


def test_echoes_the_last_user_message_without_a_script() -> None:
    assert complete(user("one"), said("x"), user("two")).text == "You said: two"


def test_a_block_of_another_language_is_no_script() -> None:
    assert complete(user("```json\n[]\n```")).text == "You said: ```json\n[]\n```"


def test_the_step_is_the_number_of_assistant_turns_since_the_script() -> None:
    history = [said("before"), user("go", {"text": "zero"}, {"text": "one"}, {"text": "two"})]
    assert complete(*history).text == "zero"
    assert complete(*history, said()).text == "one"
    assert complete(*history, said(), user("steer"), said()).text == "two"


def test_the_same_conversation_gives_the_same_turn() -> None:
    history = [user("a b", call(each=r"\w", arguments={"of": "{{each}}"}))]
    assert complete(*history) == complete(*history)


def test_of_several_scripts_in_a_message_the_last_wins() -> None:
    joined = user(f"{user('one', {'text': 'first'}).text}\n\ntwo", {"text": "second"})
    assert complete(joined).text == "second"


def test_the_newest_user_message_with_a_script_wins() -> None:
    history = [user("go", {"text": "old"}), said("x"), user("again", {"text": "new"}), user("hm")]
    assert complete(*history, system=script({"text": "system"})).text == "new"


def test_a_script_of_the_system_prompt_counts_from_the_last_user_message() -> None:
    system = f"You are a test.\n{script({'text': 'zero {{input}}'}, {'text': 'one'})}"
    assert complete(user("first"), said("x"), user("second"), system=system).text == "zero second"
    assert complete(user("first"), user("second"), said(), system=system).text == "one"
    assert complete(said(), system=system).text == "one"


def test_a_script_that_a_tool_or_an_assistant_says_is_not_played() -> None:
    history = [user("hi"), said(script({"text": "x"}), "a"), got("a", script({"text": "y"}))]
    assert complete(*history).text == "You said: hi"


def test_past_the_end_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"message 0 .* step 1 is past the end of its 1 turns"):
        complete(user("go", {"text": "only"}), said("only"))


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ("```script\n[{]\n```", r"invalid JSON: .*line 1 column 3"),
        ("```script\n{}\n```", r"top level: .*valid list"),
        ('```script\n[{"texts": ""}]\n```', r"0\.texts: Extra inputs"),
        ('```script\n[{}, {"calls": [{}]}]\n```', r"1\.calls\.0\.tool: Field required"),
        ('```script\n[{"calls": [{"tool": "a", "each": "("}]}]\n```', "not a regular expression"),
        ('```script\n[{"text": ""}]', "no closing fence"),
    ],
)
def test_a_malformed_script_is_an_error_that_names_the_place(block: str, reason: str) -> None:
    with pytest.raises(ModelError, match=f"message 1 of the history: .*{reason}") as error:
        complete(said(), UserMessage(text=block))
    assert not isinstance(error.value, ModelUnavailable)
    with pytest.raises(ModelError, match=f"the system prompt: .*{reason}"):
        complete(system=block)


def test_arguments_are_json_with_templates_filled_in_at_any_depth() -> None:
    turn = call(arguments={"q": ["{{input}}", {"deep": "<{{ input }}>"}], "n": 3, "{{input}}": None})
    answer = complete(user('say "hi"', turn))
    assert arguments(answer) == [{"q": ['say "hi"', {"deep": '<say "hi">'}], "n": 3, "{{input}}": None}]


def test_input_is_the_message_without_its_script() -> None:
    message = UserMessage(text=f"before\n{script({'text': '{{input}}'})}\nafter")
    assert complete(message).text == "before\n\nafter"


def test_results_are_those_of_the_last_assistant_turn() -> None:
    history = [user("go", {}, {}, {"text": "{{results}}"}), said("", "a"), got("a", "old")]
    assert complete(*history, said("", "b", "c"), got("b", "x"), got("c", "y")).text == "x; y"
    assert complete(user("go", {"text": "<{{results}}>"})).text == "<>"


def test_a_result_is_named_by_step_and_ordinal() -> None:
    last = {"text": "{{0.1}} {{1.0}} {{0.0}}"}
    history = [user("go", {}, {}, last), said("", "a", "b"), got("b", "B"), got("a", "A")]
    assert complete(*history, said("", "c"), got("c", "C")).text == "B C A"


def test_calls_with_the_same_id_take_the_results_in_order() -> None:
    history = [user("go", {}, {"text": "{{0.0}} {{0.1}}"}), said("", "a", "a")]
    assert complete(*history, got("a", "first"), got("a", "second")).text == "first second"


@pytest.mark.parametrize("name", ["nope", "each", "0.0", "1.0", "input.x", ""])
def test_an_unknown_template_is_an_error(name: str) -> None:
    with pytest.raises(ModelError, match=r"step 1: unknown template"):
        complete(user("go", {}, {"text": "{{" + name + "}}"}), said())


def test_what_is_filled_in_is_not_a_template_itself() -> None:
    assert complete(user("{{nope}}", {"text": "{{input}}"})).text == "{{nope}}"


def test_a_bang_keeps_a_template_for_the_script_of_a_child() -> None:
    child = script({"text": "child of {{!input}}: {{input}}, {{!!input}}"})
    answer = complete(user("p", call("spawn_agent", arguments={"instruction": child})))
    instruction = arguments(answer)[0]["instruction"]
    assert "child of {{input}}: p, {{!input}}" in instruction
    assert complete(UserMessage(text=f"c\n{instruction}")).text == "child of c: p, {{input}}"


def test_each_makes_a_call_for_every_match_of_the_input() -> None:
    turn = {
        "calls": [
            {"tool": "fetch", "each": r"https?://(\w+)", "arguments": {"host": "{{each}}"}},
            {"tool": "note", "each": r"\d+", "arguments": {"n": "{{each}}"}},
            {"tool": "done"},
        ]
    }
    answer = complete(user("see http://a and https://b, 12", turn))
    assert [each.tool for each in answer.calls] == ["fetch", "fetch", "note", "done"]
    assert arguments(answer) == [{"host": "a"}, {"host": "b"}, {"n": "12"}, {}]
    assert [each.id for each in answer.calls] == ["call_0_0", "call_0_1", "call_0_2", "call_0_3"]


def test_ids_name_the_step_unless_forced() -> None:
    turn = {"calls": [{"tool": "a", "id": "same"}, {"tool": "b", "id": "same"}, {"tool": "c"}]}
    answer = complete(user("go", {}, turn), said())
    assert [each.id for each in answer.calls] == ["same", "same", "call_1_2"]


def test_arguments_given_as_text_are_handed_on_as_they_are() -> None:
    answer = complete(user("go", call(arguments='{"q": {{input}}')))
    assert answer.calls[0].arguments == '{"q": {{input}}'


def test_text_may_come_with_calls() -> None:
    answer = complete(user("go", {"text": "on {{input}}", **call()}))
    assert (answer.text, len(answer.calls)) == ("on go", 1)


def test_without_tools_a_turn_with_calls_answers_with_what_is_known() -> None:
    history = [user("go", {}, call()), said("", "a"), got("a", "found")]
    answer = complete(*history, tools=[])
    assert (answer.text, answer.calls) == ("(no tools left) found", ())
    assert complete(user("go", {"text": "plain"}), tools=[]).text == "plain"


def test_a_delay_is_waited_for() -> None:
    begun = time.monotonic()
    assert complete(user("go", {"text": "late", "delay": 0.1})).text == "late"
    assert time.monotonic() - begun >= 0.1


def test_a_delay_longer_than_the_timeout_is_unavailable_in_time() -> None:
    begun = time.monotonic()
    with pytest.raises(ModelUnavailable, match=r"within 0\.1 s"):
        complete(user("go", {"text": "late", "delay": 60}), timeout=0.1)
    assert 0.1 <= time.monotonic() - begun < 5


def test_errors_are_raised_as_scripted() -> None:
    with pytest.raises(ModelUnavailable) as unavailable:
        complete(user("go", {"error": "unavailable", "retry_after": 7}))
    assert unavailable.value.retry_after == 7
    with pytest.raises(ModelError) as refused:
        complete(user("go", {"error": "refused"}))
    assert not isinstance(refused.value, ModelUnavailable)


def test_a_fault_is_for_the_stub_server_only_but_its_shape_is_checked() -> None:
    assert complete(user("go", {"text": "fine", "fault": {"status": 500}})).text == "fine"
    with pytest.raises(ModelError, match=r"0\.fault\.state"):
        complete(user("go", {"fault": {"state": 500}}))


def test_usage_is_estimated_or_as_stated() -> None:
    assert complete(UserMessage(text="x" * 40), system="y" * 8).usage == Usage(
        prompt=12, completion=len("You said: " + "x" * 40) // 4
    )
    stated = {"prompt": 9, "completion": 8, "cached": 7, "reasoning": 6}
    assert complete(user("go", {"usage": stated})).usage == Usage(**stated)


def test_deltas_are_words_that_make_up_the_text() -> None:
    deltas: list[str] = []
    answer = complete(user("go", {"text": " two  words\nand more "}), deltas=deltas)
    assert "".join(deltas) == answer.text
    assert len(deltas) == 4


def test_the_model_is_named_in_turns_and_errors() -> None:
    assert complete(user("go", {"text": ""})).model == "scripted"
    named = resolve_model("scripted:fast")
    with pytest.raises(ModelError, match="model scripted:fast:"):
        asyncio.run(named.complete("```script\nx\n```", [], [], timeout=1))
