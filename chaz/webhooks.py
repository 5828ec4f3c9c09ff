"""Webhooks: the end of a run as a signed HTTP POST, by the conventions of standardwebhooks.com.

The receiver checks ``webhook-signature`` with the secret (any library for Standard Webhooks does), refuses an old
``webhook-timestamp``, and takes a second delivery of the same ``webhook-id`` for the same.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import time
import urllib.error
import urllib.request
from typing import Any

from chaz.callbacks import Webhook
from chaz.errors import ConfigurationError
from chaz.outbox import End

TIMEOUT = 10.0
"""Seconds that a receiver may keep silent."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is a refusal: nobody who may name one URL may lead a listener to another."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def post(end: End, secret: str) -> None:
    """Send it. Raises ConfigurationError without a secret, and OSError where the receiver does not take it."""
    assert isinstance(end.target, Webhook)
    if not secret:
        raise ConfigurationError(
            "CHAZ_WEBHOOK_SECRET is not set for the listener; a webhook is sent signed or not at all"
        )
    body = payload(end)
    id, at = str(end.entry), str(int(time.time()))
    request = urllib.request.Request(
        end.target.url,
        body,
        {
            "content-type": "application/json",
            "user-agent": "chaz",
            "webhook-id": id,
            "webhook-timestamp": at,
            "webhook-signature": signature(secret, id, at, body),
        },
    )
    # Its body is nobody's business: a receiver that has answered has taken it.
    with _OPENER.open(request, timeout=TIMEOUT) as response:
        if response.status >= 300:
            raise urllib.error.HTTPError(end.target.url, response.status, response.reason, response.headers, None)


def payload(end: End) -> bytes:
    """The body: what ended, and how."""
    data = {
        "id": str(end.entry),
        "run": str(end.run),
        "session": str(end.session),
        "agent": end.agent,
        "state": end.state,
        "reason": end.reason,
        "result": end.result,
        "usage": end.usage,
        "ended_at": end.at,
    }
    return json.dumps({"type": "run.ended", "timestamp": end.at, "data": data}).encode()


def signature(secret: str, id: str, at: str, body: bytes) -> str:
    """``v1,`` and the base64 of the HMAC-SHA256 over id, timestamp and body."""
    digest = hmac.new(_key(secret), b".".join((id.encode(), at.encode(), body)), hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def _key(secret: str) -> bytes:
    """The secret's bytes: base64 behind ``whsec_``, as Standard Webhooks writes them, else the text itself."""
    if not secret.startswith("whsec_"):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except binascii.Error as error:
        raise ConfigurationError(f"CHAZ_WEBHOOK_SECRET is no base64 behind whsec_: {error}") from None
