"""Models behind the OpenAI API or an endpoint compatible with it, through the ``openai`` SDK.

The environment says where: ``OPENAI_API_KEY``, and ``OPENAI_BASE_URL`` for another endpoint than
OpenAI's, which may want no key. Chat completions are used: compatible endpoints have them.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, cast

import openai
from pydantic import BaseModel, ValidationError

from chaz.errors import ConfigurationError, ModelError, ModelUnavailable
from chaz.outcomes import ToolCall, Turn, Usage
from chaz.runtime.models import (
    AssistantMessage,
    ChatModel,
    HistoryMessage,
    ToolSchema,
    UserMessage,
)

__all__ = ["OpenAIModel", "messages_of", "model", "retry_after"]

# Fields of a streamed message that come whole, and in some endpoints again with each piece.
_WHOLE = frozenset({"role", "type", "id", "name", "format"})
_HINTS = {
    401: "the key in OPENAI_API_KEY is refused",
    403: "the key in OPENAI_API_KEY may not do this",
    404: "no such model or endpoint; check the model's name and OPENAI_BASE_URL",
}


class _Function(BaseModel):
    name: str
    arguments: str = ""


class _Call(BaseModel):
    id: str
    function: _Function


class _Message(BaseModel):
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(BaseModel):
    message: dict[str, Any]
    finish_reason: str | None = None


class _PromptDetails(BaseModel):
    cached_tokens: int | None = None


class _CompletionDetails(BaseModel):
    reasoning_tokens: int | None = None


class _Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None

    def neutral(self) -> Usage:
        prompt, completion = self.prompt_tokens_details, self.completion_tokens_details
        return Usage(
            prompt=self.prompt_tokens,
            completion=self.completion_tokens,
            cached=(prompt and prompt.cached_tokens) or 0,
            reasoning=(completion and completion.reasoning_tokens) or 0,
        )


class _ChunkChoice(BaseModel):
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Chunk(BaseModel):
    choices: list[_ChunkChoice] | None = None
    model: str | None = None
    usage: _Usage | None = None


class _Completion(BaseModel):
    choices: list[_Choice] | None = None
    model: str | None = None
    usage: _Usage | None = None


class OpenAIModel:
    """One model of the endpoint.

    Reads the environment when made, and raises ConfigurationError if the key is missing.
    """

    def __init__(self, name: str) -> None:
        self._model = name
        self._name = f"openai:{name}"
        self._base_url = os.environ.get("OPENAI_BASE_URL") or None
        self._key = os.environ.get("OPENAI_API_KEY", "")
        if not self._key and self._base_url is None:
            raise ConfigurationError(
                f"model {self._name!r} needs a key: set OPENAI_API_KEY"
                " (or OPENAI_BASE_URL, for an endpoint that wants none)"
            )
        self._client: tuple[asyncio.AbstractEventLoop, openai.AsyncOpenAI] | None = None

    async def complete(
        self,
        system: str,
        history: Sequence[HistoryMessage],
        tools: Sequence[ToolSchema],
        *,
        timeout: float,
        on_delta: Callable[[str], None] | None = None,
    ) -> Turn:
        """Ask for one turn, streamed if ``on_delta`` is given; see :meth:`ChatModel.complete`."""
        request = {
            "model": self._model,
            "messages": messages_of(system, history),
            "tools": [_tool(tool) for tool in tools] or openai.omit,
            "timeout": timeout,
        }
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                if on_delta is None:
                    completion = await self._plain(request)
                else:
                    completion = await self._streamed(request, on_delta)
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._unavailable(f"no whole turn within {timeout:g} s") from None
        return self._turn(completion)

    async def aclose(self) -> None:
        """Close the connections, on the loop of the turns; the next turn opens new ones."""
        if self._client is not None:
            _, client = self._client
            self._client = None
            await client.close()

    def _open(self) -> openai.AsyncOpenAI:
        # Connections belong to the loop they were opened on: after a fork, or in a test with a loop
        # of its own, the client of the old loop would fail with "Event loop is closed".
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            client = openai.AsyncOpenAI(api_key=self._key or "none", base_url=self._base_url, max_retries=0)
            self._client = (loop, client)
        return self._client[1]

    async def _plain(self, request: dict[str, Any]) -> _Completion:
        with self._translated():
            # Raw: the native message is to hold what came, and the SDK would take any JSON.
            completions = cast("Any", self._open().chat.completions.with_raw_response)
            response = await completions.create(**request)
            return _Completion.model_validate(json.loads(response.http_response.text))

    async def _streamed(self, request: dict[str, Any], on_delta: Callable[[str], None]) -> _Completion:
        choice = _Choice(message={"role": "assistant", "content": None})
        completion = _Completion(choices=[choice])
        async with aclosing(self._chunks(request)) as chunks:
            async for chunk in chunks:
                completion.model = chunk.model or completion.model
                completion.usage = chunk.usage or completion.usage
                for part in (chunk.choices or [])[:1]:
                    delta = part.delta or {}
                    _merge(choice.message, delta)
                    choice.finish_reason = part.finish_reason or choice.finish_reason
                    if isinstance(text := delta.get("content"), str) and text:
                        on_delta(text)
        for call in choice.message.get("tool_calls", []):
            call.pop("index", None)
        return completion

    async def _chunks(self, request: dict[str, Any]) -> AsyncGenerator[_Chunk]:
        with self._translated():
            stream = await self._open().chat.completions.create(
                **request, stream=True, stream_options={"include_usage": True}
            )
            async with stream:
                async for chunk in stream:
                    # The SDK does not check what comes: any JSON value may be here.
                    value = cast("object", chunk)
                    if isinstance(value, BaseModel):
                        value = value.model_dump(exclude_unset=True, warnings=False)
                    yield _Chunk.model_validate(value)

    def _turn(self, completion: _Completion) -> Turn:
        # What is refused here was paid for all the same.
        usage = completion.usage.neutral() if completion.usage else None
        paid = usage and usage.model_dump()
        if not completion.choices:
            raise self._unavailable("the list of choices is empty", paid=paid)
        choice = completion.choices[0]
        match choice.finish_reason:
            case None:
                raise self._unavailable("the turn ended without a finish reason", paid=paid)
            case "error":
                raise self._unavailable("the endpoint ended the turn with an error", paid=paid)
            case "length":
                raise ModelError(self._name, "the turn was cut off by length", paid)
            case "content_filter":
                raise ModelError(self._name, "the turn was cut off by the content filter", paid)
            case _:
                pass
        try:
            message = _Message.model_validate(choice.message)
        except ValidationError as error:
            raise self._unavailable(_malformed(error), paid=paid) from None
        calls = [
            ToolCall(id=call.id, tool=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or []
        ]
        return Turn(
            text=message.content or message.refusal or "",
            calls=tuple(calls),
            usage=usage or Usage(),
            model=completion.model or self._model,
            native={"provider": "openai", "message": choice.message},
        )

    @contextmanager
    def _translated(self) -> Generator[None]:
        try:
            yield
        except openai.APIStatusError as error:
            raise self._status_error(error) from None
        except openai.APITimeoutError:
            raise self._unavailable("time-out of the connection") from None
        except openai.APIConnectionError as error:
            raise self._unavailable(f"{error.message} {error.__cause__ or ''}".strip()) from error
        except openai.APIError as error:
            raise self._streamed_error(error) from None
        except openai.OpenAIError as error:
            raise ModelError(self._name, self._safe(str(error))) from None
        except (json.JSONDecodeError, UnicodeDecodeError, ValidationError) as error:
            raise self._unavailable(_malformed(error)) from None
        except Exception as error:
            # The SDK's version 2 lets errors of its HTTP library out of a stream. That library is
            # httpx there and httpx2 in version 3, so that neither can be imported.
            if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2"):
                raise
            raise self._unavailable(f"the connection broke: {error!r}") from error

    def _status_error(self, error: openai.APIStatusError) -> ModelError:
        status = error.status_code
        hint = f", {_HINTS[status]}" if status in _HINTS else ""
        body: object = error.body
        if isinstance(body, Mapping):
            body = cast("Mapping[str, object]", body).get("message")
        said = f": {body}" if body else ""
        text = f"HTTP {status}{hint}{said}"
        if _may_pass(status):
            return self._unavailable(text, retry_after(error.response.headers))
        return ModelError(self._name, self._safe(text))

    def _streamed_error(self, error: openai.APIError) -> ModelError:
        code = error.code or ""
        lasting = code.isdecimal() and not _may_pass(int(code))
        if lasting or error.type == "invalid_request_error":
            return ModelError(self._name, self._safe(error.message))
        return self._unavailable(error.message)

    def _unavailable(
        self, reason: str, seconds: float | None = None, *, paid: dict[str, int] | None = None
    ) -> ModelUnavailable:
        return ModelUnavailable(self._name, self._safe(reason), seconds, paid)

    def _safe(self, text: str) -> str:
        # OpenAI's answer to a wrong key quotes most of it.
        text = text.replace(self._key, "***") if self._key else text
        return re.sub(r"\bsk-[\w*.-]+", "***", text)[:500]


def _malformed(error: ValueError) -> str:
    # The errors of pydantic and json quote what they read, which may be long and private.
    return f"malformed answer ({type(error).__name__})"


def _may_pass(status: int) -> bool:
    return status in (408, 409, 425, 429) or status >= 500


def messages_of(system: str, history: Sequence[HistoryMessage]) -> list[dict[str, Any]]:
    """Instructions and history as chat completions have them."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in history:
        if isinstance(message, UserMessage):
            _say(messages, {"role": "user", "content": message.text})
        elif isinstance(message, AssistantMessage):
            _say(messages, _assistant(message.turn))
        else:
            messages.append({"role": "tool", "tool_call_id": message.call_id, "content": message.content})
    return messages


def _say(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add what one side says; to what it said right before, since some endpoints want the sides to take turns."""
    before = messages[-1] if messages else {}
    if _is_plain(message) and _is_plain(before) and message["role"] == before["role"]:
        messages[-1] = {**message, "content": f"{before['content']}\n\n{message['content']}"}
    else:
        messages.append(message)


def _is_plain(message: Mapping[str, Any]) -> bool:
    if set(message) != {"role", "content"} or message["role"] == "system":
        return False
    return isinstance(message["content"], str)


def _assistant(turn: Turn) -> dict[str, Any]:
    if turn.native is not None and turn.native.get("provider") == "openai":
        return turn.native["message"]
    message: dict[str, Any] = {"role": "assistant", "content": turn.text or None}
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.tool, "arguments": call.arguments},
            }
            for call in turn.calls
        ]
    return message


def _tool(tool: ToolSchema) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
        },
    }


def _merge(whole: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Add a piece of a streamed message to what there is, unknown fields included."""
    for key, piece in delta.items():
        held = whole.get(key)
        if piece is None:
            continue
        if isinstance(held, str) and isinstance(piece, str):
            whole[key] = (piece or held) if key in _WHOLE else held + piece
        elif isinstance(held, dict) and isinstance(piece, dict):
            _merge(cast("dict[str, Any]", held), cast("dict[str, Any]", piece))
        elif isinstance(piece, list):
            _merge_list(whole.setdefault(key, []), cast("list[Any]", piece))
        else:
            whole[key] = piece


def _merge_list(whole: list[Any], pieces: list[Any]) -> None:
    for piece in pieces:
        index = _index(piece)
        held = next((item for item in whole if index is not None and _index(item) == index), None)
        if held is None:
            whole.append(piece)
        else:
            _merge(held, piece)


def _index(item: Any) -> Any:
    return cast("dict[str, Any]", item).get("index") if isinstance(item, dict) else None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Read the seconds to wait from ``retry-after-ms`` or ``retry-after`` (seconds or a date)."""
    milliseconds, value = headers.get("retry-after-ms"), headers.get("retry-after", "")
    try:
        seconds = float(value) if milliseconds is None else float(milliseconds) / 1000
    except ValueError:
        try:
            then = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = (then.replace(tzinfo=then.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def model(name: str) -> ChatModel:
    """Make the model that the endpoint calls ``name``.

    Raises :class:`~chaz.errors.ConfigurationError` if OPENAI_API_KEY is missing.
    """
    return OpenAIModel(name)
