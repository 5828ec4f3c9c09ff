"""A model that plays a script, for tests and demos: no network, no key, and no state.

The script travels in the conversation, and the step is the number of assistant turns since, so that
any worker gives the same turn after any replay and parallel runs never disturb each other. A script
is a fenced block::

    ```script
    [{"calls": [{"tool": "search", "arguments": {"query": "{{input}}"}}]},
     {"text": "found {{results}}"}]
    ```

It is the one of the newest user message that has one, of several there the last (the step counts
assistant messages after that message), else the one of the system prompt (the step counts them after
the last user message). Without a script the model echoes. The fields of a turn are those of :class:`ScriptedTurn`.
Templates in ``text`` and in the strings of ``arguments``:

``{{input}}``
    the user message that the step is counted from, without its script
``{{results}}``
    the results of the last assistant turn, joined by ``"; "``
``{{S.O}}``
    the result of call ``O`` of step ``S``, both counted from 0
``{{each}}``
    in a call with ``each``: the match that the call is made for
``{{!NAME}}``
    ``{{NAME}}`` itself, for a script that is an argument of a call of this one
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, cast

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, field_validator

from chaz.errors import ModelError, ModelUnavailable
from chaz.outcomes import ToolCall, Turn, Usage
from chaz.runtime.delimiting import undelimited
from chaz.runtime.models import (
    AssistantMessage,
    ChatModel,
    HistoryMessage,
    ToolMessage,
    ToolSchema,
    UserMessage,
)

__all__ = ["Fault", "ScriptedCall", "ScriptedModel", "ScriptedTurn", "model", "plan", "words"]

_FENCE = re.compile(
    r"^[ \t]*```script[ \t]*\r?\n(?P<body>.*?)(?:^[ \t]*(?P<end>```)[ \t]*\r?$|\Z)",
    re.MULTILINE | re.DOTALL,
)
_TEMPLATE = re.compile(r"\{\{\s*([^{}]*?)\s*\}\}")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Fault(_Strict):
    """What :class:`chaz.testing.StubServer` does wrong; the scripted model itself ignores it."""

    times: int | None = None
    """Only the first so many requests of one conversation meet the fault; None: all of them."""
    latency: float = 0.0
    """Seconds before the answer begins."""
    drip: float = 0.0
    """Seconds before each event of a stream."""
    status: int | None = None
    """Answer with this HTTP status and an error body."""
    message: str = "a scripted fault"
    """What that error body says."""
    retry_after: float | None = None
    """Seconds in the Retry-After header of that answer."""
    headers: dict[str, str] = {}
    """More headers of that answer."""
    hang: bool = False
    """Never answer; the client must give up."""
    reset: bool = False
    """Reset the connection instead of answering."""
    truncate: bool = False
    """Cut the answer in two; a stream then ends cleanly without finish reason and ``[DONE]``."""
    malformed: bool = False
    """Answer with invalid JSON."""
    empty_choices: bool = False
    """Answer with an empty list of choices."""
    finish_reason: str | None = None
    """Answer with this finish reason."""


class ScriptedCall(_Strict):
    """A tool call to ask for."""

    tool: str
    arguments: dict[str, Any] | str = {}
    """An object, templated; or text that is handed on as it is, for malformed arguments."""
    each: str | None = None
    """A regular expression: one call for each match in the input (for its group 1, if any)."""
    id: str | None = None
    """The call's id; ``call_{step}_{ordinal}`` if None."""

    @field_validator("each")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern


class ScriptedTurn(_Strict):
    """A turn to give."""

    text: str = ""
    calls: tuple[ScriptedCall, ...] = ()
    usage: Usage | None = None
    """The usage to state; an estimate of a token per 4 characters if None."""
    delay: float = 0.0
    """Seconds before the turn is given."""
    error: Literal["unavailable", "refused"] | None = None
    """Raise ModelUnavailable or ModelError instead, after the delay."""
    retry_after: float | None = None
    """Seconds to wait, told with ``unavailable``."""
    fault: Fault | None = None
    native: dict[str, Any] = {}
    """More fields of the stub server's assistant message, such as ``reasoning_content``."""


_SCRIPT = TypeAdapter(list[ScriptedTurn])


class _Round(NamedTuple):
    """An assistant turn and the results that followed it."""

    turn: Turn
    results: list[ToolMessage]

    def result(self, ordinal: int) -> str | None:
        # Ids may repeat in a turn, so that each call takes the first result of its id that is left.
        left = list(self.results)
        for position, call in enumerate(self.turn.calls):
            found = next((result for result in left if result.call_id == call.id), None)
            if position == ordinal:
                return undelimited(found.content) if found else None
            if found:
                left.remove(found)
        return None


class _Scene(NamedTuple):
    """Where in a conversation the script stands: all that its templates can name."""

    model: str
    place: str
    script: re.Match[str] | None
    input: str
    rounds: list[_Round]

    @property
    def results(self) -> str:
        return "; ".join(undelimited(result.content) for result in self.rounds[-1].results) if self.rounds else ""

    def wrong(self, what: str) -> ModelError:
        return ModelError(self.model, f"the script in {self.place}: {what}")

    def turns(self, script: re.Match[str]) -> list[ScriptedTurn]:
        if script["end"] is None:
            raise self.wrong("the block has no closing fence")
        try:
            return _SCRIPT.validate_python(json.loads(script["body"]))
        except json.JSONDecodeError as error:
            raise self.wrong(f"invalid JSON: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "top level"
            raise self.wrong(f"{where}: {first['msg']}") from None

    def render(self, value: Any, each: str | None = None) -> Any:
        """Fill in the templates of every string in ``value``, but none in what is filled in."""
        if isinstance(value, str):
            return _TEMPLATE.sub(lambda found: self._look_up(found[1], each), value)
        if isinstance(value, list):
            return [self.render(item, each) for item in cast("list[Any]", value)]
        if isinstance(value, dict):
            items = cast("dict[str, Any]", value).items()
            return {key: self.render(item, each) for key, item in items}
        return value

    def _look_up(self, name: str, each: str | None) -> str:
        if name.startswith("!"):
            return "{{" + name[1:] + "}}"
        if name == "input":
            return self.input
        if name == "results":
            return self.results
        if name == "each" and each is not None:
            return each
        if numbers := re.fullmatch(r"(\d+)\.(\d+)", name):
            step, ordinal = int(numbers[1]), int(numbers[2])
            found = self.rounds[step].result(ordinal) if step < len(self.rounds) else None
            if found is not None:
                return found
        raise self.wrong(f"step {len(self.rounds)}: unknown template {{{{{name}}}}}")

    def calls(self, scripted: Iterable[ScriptedCall]) -> tuple[ToolCall, ...]:
        calls: list[ToolCall] = []
        for call in scripted:
            for each in [None] if call.each is None else self._matches(call.each):
                arguments = call.arguments
                if not isinstance(arguments, str):
                    arguments = json.dumps(self.render(arguments, each))
                call_id = f"call_{len(self.rounds)}_{len(calls)}" if call.id is None else call.id
                calls.append(ToolCall(id=call_id, tool=call.tool, arguments=arguments))
        return tuple(calls)

    def _matches(self, pattern: str) -> list[str]:
        compiled = re.compile(pattern)
        group = 1 if compiled.groups else 0
        return [found[group] or "" for found in compiled.finditer(self.input)]


def _scene(model: str, system: str, history: Sequence[HistoryMessage]) -> _Scene:
    users = [(index, each) for index, each in enumerate(history) if isinstance(each, UserMessage)]
    for index, message in reversed(users):
        # Of several the last: a message may be neighbours that were joined.
        for script in list(_FENCE.finditer(message.text))[-1:]:
            said = f"{message.text[: script.start()]}{message.text[script.end() :]}".strip()
            place = f"message {index} of the history"
            return _Scene(model, place, script, said, _rounds(history[index + 1 :]))
    index, said = (users[-1][0], users[-1][1].text) if users else (-1, "")
    script = _FENCE.search(system)
    return _Scene(model, "the system prompt", script, said, _rounds(history[index + 1 :]))


def _rounds(history: Sequence[HistoryMessage]) -> list[_Round]:
    rounds: list[_Round] = []
    for message in history:
        if isinstance(message, AssistantMessage):
            rounds.append(_Round(message.turn, []))
        elif isinstance(message, ToolMessage) and rounds:
            rounds[-1].results.append(message)
    return rounds


def _estimate(system: str, history: Sequence[HistoryMessage], turn: Turn) -> Usage:
    def size(turn: Turn) -> int:
        return len(turn.text) + sum(len(call.arguments) for call in turn.calls)

    prompt = len(system)
    for message in history:
        match message:
            case UserMessage():
                prompt += len(message.text)
            case AssistantMessage():
                prompt += size(message.turn)
            case ToolMessage():
                prompt += len(message.content)
    return Usage(prompt=prompt // 4, completion=size(turn) // 4)


def plan(
    model: str, system: str, history: Sequence[HistoryMessage], tools: Sequence[ToolSchema]
) -> tuple[ScriptedTurn, Turn]:
    """Find the step of the script: as it was written, and as the turn that it comes to.

    ``model`` is the name for errors. With no ``tools``, a turn that would call some answers with
    the results so far. Raises :class:`~chaz.errors.ModelError` for a malformed script, an unknown
    template and a step past the end.
    """
    scene = _scene(model, system, history)
    if scene.script is None:
        scripted = ScriptedTurn()
        turn = Turn(text=f"You said: {scene.input}", model=model)
    else:
        turns = scene.turns(scene.script)
        step = len(scene.rounds)
        if step >= len(turns):
            raise scene.wrong(f"step {step} is past the end of its {len(turns)} turns")
        scripted = turns[step]
        calls = scene.calls(scripted.calls)
        if calls and not tools:
            turn = Turn(text=f"(no tools left) {scene.results}", model=model)
        else:
            turn = Turn(text=scene.render(scripted.text), calls=calls, model=model)
    usage = scripted.usage or _estimate(system, history, turn)
    return scripted, turn.model_copy(update={"usage": usage})


def words(text: str) -> list[str]:
    """Cut a text into words with the space after them; joined they are the text again."""
    return re.findall(r"\s*\S+\s*|\s+", text)


class ScriptedModel:
    """Plays the script of the conversation; see the module."""

    def __init__(self, name: str) -> None:
        self._name = f"scripted:{name}" if name else "scripted"

    async def complete(
        self,
        system: str,
        history: Sequence[HistoryMessage],
        tools: Sequence[ToolSchema],
        *,
        timeout: float,
        on_delta: Callable[[str], None] | None = None,
    ) -> Turn:
        """Give the scripted turn, or an echo; raises what the script says, or that it is wrong."""
        scripted, turn = plan(self._name, system, history, tools)
        await asyncio.sleep(min(scripted.delay, timeout))
        if scripted.delay > timeout:
            raise ModelUnavailable(self._name, f"no whole turn within {timeout:g} s", None)
        if scripted.error == "unavailable":
            raise ModelUnavailable(self._name, "the script says so", scripted.retry_after)
        if scripted.error == "refused":
            raise ModelError(self._name, "refused, as the script says")
        if on_delta is not None:
            for word in words(turn.text):
                on_delta(word)
        return turn


def model(name: str) -> ChatModel:
    """Make the scripted model; its ``name`` may be empty, and is only told in errors and turns."""
    return ScriptedModel(name)
