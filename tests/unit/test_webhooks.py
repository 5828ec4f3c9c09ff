"""Webhooks: what is sent, how it is signed, and which answers count as taken."""

from __future__ import annotations

import json
import threading
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from uuid import UUID

import pytest

from chaz.callbacks import Webhook
from chaz.errors import ConfigurationError
from chaz.outbox import End
from chaz.webhooks import post, signature

# The example of the Standard Webhooks libraries.
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
SIGNED = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


class Receiver:
    """Answers with ``status``, and keeps what it was sent."""

    def __init__(self) -> None:
        self.status = 204
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                receiver.requests.append((self.path, {name.lower(): v for name, v in self.headers.items()}, body))
                self.send_response(receiver.status)
                self.send_header("location", "/elsewhere")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                del format, args

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/ends"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def end(url: str) -> End:
    """The end of a run that took the message of another entry."""
    return End(
        entry=UUID(int=1),
        run=UUID(int=2),
        target=Webhook(url=url),
        session=UUID(int=3),
        agent="solo",
        state="succeeded",
        reason=None,
        result="42",
        usage={"prompt": 1},
        at="2030-01-01T00:00:00+00:00",
    )


def test_a_signature_is_what_receivers_libraries_expect() -> None:
    signed = ("msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", b'{"test": 2432232314}')
    assert signature(SECRET, *signed) == SIGNED
    assert signature(SECRET.removeprefix("whsec_"), *signed) != SIGNED, "without whsec_ it is the text itself"
    with pytest.raises(ConfigurationError, match="no base64 behind whsec_"):
        signature("whsec_?", *signed)


def test_what_is_sent(receiver: Receiver) -> None:
    post(end(receiver.url), SECRET)
    ((path, headers, body),) = receiver.requests
    assert path == "/ends"
    assert (headers["content-type"], headers["webhook-id"]) == ("application/json", str(UUID(int=1)))
    at = headers["webhook-timestamp"]
    assert headers["webhook-signature"] == signature(SECRET, str(UUID(int=1)), at, body)
    assert json.loads(body) == {
        "type": "run.ended",
        "timestamp": "2030-01-01T00:00:00+00:00",
        "data": {
            "id": str(UUID(int=1)),
            "run": str(UUID(int=2)),
            "session": str(UUID(int=3)),
            "agent": "solo",
            "state": "succeeded",
            "reason": None,
            "result": "42",
            "usage": {"prompt": 1},
            "ended_at": "2030-01-01T00:00:00+00:00",
        },
    }


@pytest.mark.parametrize("status", [301, 302, 303, 304, 307, 400, 410, 500])
def test_any_other_answer_is_a_refusal_and_no_redirect_is_followed(receiver: Receiver, status: int) -> None:
    receiver.status = status
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(end(receiver.url), SECRET)
    assert refused.value.code == status
    refused.value.close()
    assert [path for path, *_ in receiver.requests] == ["/ends"]


def test_without_a_secret_nothing_is_sent(receiver: Receiver) -> None:
    with pytest.raises(ConfigurationError, match="CHAZ_WEBHOOK_SECRET is not set"):
        post(end(receiver.url), "")
    assert receiver.requests == []
