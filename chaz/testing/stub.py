"""An OpenAI-compatible HTTP endpoint that plays scripts, and their faults.

The scripts are those of :mod:`chaz.runtime.models.scripted`; the step is found by the same code.

Point ``OPENAI_BASE_URL`` at it, in this process or another::

    with StubServer() as stub:
        environ["OPENAI_BASE_URL"] = stub.base_url

It keeps nothing between requests but what it counts: the requests received, and those that met a
fault with ``times``.
"""

from __future__ import annotations

import hashlib
import json
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self, cast

from chaz.errors import ModelError
from chaz.outcomes import ToolCall, Turn
from chaz.runtime.models import (
    AssistantMessage,
    HistoryMessage,
    ToolMessage,
    ToolSchema,
    UserMessage,
)
from chaz.runtime.models.scripted import Fault, ScriptedTurn, plan, words

__all__ = ["StubServer"]

_NO_FAULT = Fault()


class StubServer:
    """The endpoint, on a free port of 127.0.0.1, from ``__enter__`` to ``__exit__``.

    It closes each connection after its answer, or an idle one would outlive the client's event
    loop; ``keep_alive`` lets those of plain answers be used again.
    """

    def __init__(self, *, keep_alive: bool = False) -> None:
        self.keep_alive = keep_alive
        self.requests: list[dict[str, Any]] = []
        """The bodies of the chat completion requests, in the order of their arrival."""
        self.aborted = 0
        """How many requests the client gave up before their answer was complete."""
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._met: Counter[str] = Counter()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def base_url(self) -> str:
        """What OPENAI_BASE_URL is to be."""
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def received(self, body: dict[str, Any]) -> None:
        """Keep the body of a request."""
        with self._lock:
            self.requests.append(body)

    def gave_up(self) -> None:
        """Count a request whose client is gone."""
        with self._lock:
            self.aborted += 1

    def fault(self, scripted: ScriptedTurn, body: dict[str, Any]) -> Fault:
        """Give the fault that this request meets; counts those of a fault with ``times``."""
        fault = scripted.fault or _NO_FAULT
        if fault.times is None:
            return fault
        conversation = json.dumps(body.get("messages"), sort_keys=True).encode()
        key = hashlib.sha256(conversation).hexdigest()
        with self._lock:
            self._met[key] += 1
            return fault if self._met[key] <= fault.times else _NO_FAULT


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, stub: StubServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.stub = stub

    def handle_error(self, request: Any, client_address: Any) -> None:
        if isinstance(sys.exception(), ConnectionError):
            self.stub.gave_up()
        else:
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def _stub(self) -> StubServer:
        return cast("_Server", self.server).stub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": "scripted", "object": "model"}]})
        else:
            self._send_error(404, f"no such path: {self.path}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self._send_error(404, f"no such path: {self.path}")
            return
        self._stub.received(body)
        system, history = _conversation(body["messages"])
        tools = [ToolSchema.model_validate(tool["function"]) for tool in body.get("tools", [])]
        try:
            scripted, turn = plan(f"stub:{body['model']}", system, history, tools)
        except ModelError as error:
            self._send_error(400, str(error))
            return
        fault = self._stub.fault(scripted, body)
        if self._gone_within(scripted.delay + fault.latency):
            return
        if fault.hang:
            self._gone_within(float("inf"))
        elif fault.reset:
            self._reset()
        elif fault.status is not None:
            self._send_error(fault.status, fault.message, _answer_headers(fault))
        elif scripted.error == "unavailable":
            headers = _answer_headers(Fault(retry_after=scripted.retry_after))
            self._send_error(503, "unavailable, as the script says", headers)
        elif scripted.error == "refused":
            self._send_error(400, "refused, as the script says")
        elif body.get("stream"):
            self._stream(body, scripted, turn, fault)
        else:
            self._answer(body, scripted, turn, fault)

    def _answer(self, body: dict[str, Any], scripted: ScriptedTurn, turn: Turn, fault: Fault) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": turn.text or None}
        if turn.calls:
            message["tool_calls"] = [_call(call) for call in turn.calls]
        message |= scripted.native
        choice = {"index": 0, "message": message, "finish_reason": _reason(turn, fault)}
        answer = _envelope(body, "chat.completion", [] if fault.empty_choices else [choice])
        answer["usage"] = _usage(turn)
        text = json.dumps(answer).encode()
        if fault.malformed:
            self._send_bytes(200, b'{"choices": [')
        elif fault.truncate:
            self._send_bytes(200, text[: len(text) // 2], announced=len(text))
            self.close_connection = True
        else:
            self._send_bytes(200, text)

    def _stream(self, body: dict[str, Any], scripted: ScriptedTurn, turn: Turn, fault: Fault) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        if fault.malformed:
            self.wfile.write(b'data: {"choices": [\n\n')
            return
        deltas = [] if fault.empty_choices else list(_deltas(scripted, turn))
        if fault.truncate:
            deltas = deltas[: len(deltas) // 2]
        choices: list[list[dict[str, Any]]]
        choices = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
        if not fault.empty_choices and not fault.truncate:
            choices.append([{"index": 0, "delta": {}, "finish_reason": _reason(turn, fault)}])
        for choice in choices:
            if self._gone_within(fault.drip):
                return
            self._event(json.dumps(_envelope(body, "chat.completion.chunk", choice)))
        if fault.truncate:
            return
        options: dict[str, Any] = body.get("stream_options") or {}
        if options.get("include_usage"):
            chunk = _envelope(body, "chat.completion.chunk", [])
            self._event(json.dumps(chunk | {"usage": _usage(turn)}))
        self._event("[DONE]")

    def _event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())

    def _send_error(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        error = {"message": message, "type": "stub_error", "code": None}
        self._send(status, {"error": error}, headers)

    def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self._send_bytes(status, json.dumps(body).encode(), headers)

    def _send_bytes(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        announced: int | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) if announced is None else announced))
        if not self._stub.keep_alive:
            self.send_header("Connection", "close")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _reset(self) -> None:
        # Closing with a linger of 0 s sends RST instead of FIN.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _gone_within(self, seconds: float) -> bool:
        """Wait so long; True at once when the client is gone or the server stops."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            readable, _, _ = select.select([self.connection], [], [], min(left, 0.02))
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                self._stub.gave_up()
                self.close_connection = True
                return True
            if self._stub.stopping.is_set():
                self.close_connection = True
                return True
        return False


def _conversation(messages: list[dict[str, Any]]) -> tuple[str, list[HistoryMessage]]:
    system: list[str] = []
    history: list[HistoryMessage] = []
    for message in messages:
        text = _text(message.get("content"))
        match message["role"]:
            case "system" | "developer":
                system.append(text)
            case "user":
                history.append(UserMessage(text=text))
            case "assistant":
                asked: list[dict[str, Any]] = message.get("tool_calls") or []
                calls = tuple(_asked(call) for call in asked)
                history.append(AssistantMessage(turn=Turn(text=text, calls=calls)))
            case _:
                history.append(ToolMessage(call_id=message["tool_call_id"], tool="", content=text))
    return "\n".join(system), history


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _asked(call: dict[str, Any]) -> ToolCall:
    function = call["function"]
    return ToolCall(id=call["id"], tool=function["name"], arguments=function["arguments"])


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.tool, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _deltas(scripted: ScriptedTurn, turn: Turn) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": None if turn.calls else ""}
    for field, value in scripted.native.items():
        for piece in words(value) if isinstance(value, str) else [value]:
            yield {field: piece}
    for word in words(turn.text):
        yield {"content": word}
    for index, call in enumerate(turn.calls):
        begun = _call(call.model_copy(update={"arguments": ""}))
        yield {"tool_calls": [{"index": index} | begun]}
        half = len(call.arguments) // 2
        for piece in (call.arguments[:half], call.arguments[half:]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _envelope(body: dict[str, Any], kind: str, choices: list[Any]) -> dict[str, Any]:
    return {
        "id": "stub",
        "object": kind,
        "created": 0,
        "model": body["model"],
        "choices": choices,
    }


def _usage(turn: Turn) -> dict[str, Any]:
    usage = turn.usage
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def _reason(turn: Turn, fault: Fault) -> str:
    return fault.finish_reason or ("tool_calls" if turn.calls else "stop")


def _answer_headers(fault: Fault) -> dict[str, str]:
    after = {} if fault.retry_after is None else {"Retry-After": f"{fault.retry_after:g}"}
    return after | fault.headers
