"""What is told of a run's end, and to whom: a webhook, or Celery tasks. Kept as JSON, with the entry and the run."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, cast
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError


def _web_address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("a webhook is an http:// or https:// URL with a host")
    return url


class Webhook(BaseModel):
    """An HTTP POST of the run's end, however it ended, signed with ``CHAZ_WEBHOOK_SECRET``.

    A listener sends it, from inside the deployment's network. Only who may insert entries can name the URL (no agent
    and no tool can): a program that takes it from others has to check it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["webhook"] = "webhook"
    url: Annotated[str, Field(max_length=2000), AfterValidator(_web_address)]


class TaskCallback(BaseModel):
    """Celery tasks, with the manners of ``link`` and ``link_error``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["task"] = "task"
    success: dict[str, Any] | None = None
    """A signature, called with the answer (before its own arguments, unless it is immutable)."""
    failure: tuple[dict[str, Any], ...] = ()
    """Signatures, each called with the run's id where the run failed or was cancelled."""


Callback = Annotated[Webhook | TaskCallback, Field(discriminator="kind")]
_CALLBACK: TypeAdapter[Webhook | TaskCallback] = TypeAdapter(Callback)


def callback_of(value: object) -> Webhook | TaskCallback:
    """What a producer names as ``on_complete``: a URL, a Celery signature, or a callback. Raises ValueError."""
    if isinstance(value, Webhook | TaskCallback):
        return value
    given: Any = {"kind": "webhook", "url": value} if isinstance(value, str) else _plain(value)
    if isinstance(given, dict) and "task" in given:
        signature = cast("dict[str, Any]", given)
        options: dict[str, Any] = dict(signature.get("options") or {})
        errbacks: Any = options.pop("link_error", None) or []
        failure = cast("object", [errbacks] if isinstance(errbacks, dict) else errbacks)
        given = {"kind": "task", "success": signature | {"options": options}, "failure": failure}
    try:
        return _CALLBACK.validate_python(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'][1:])) or 'it'}: {first['msg']}") from None


def _plain(value: object) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it has to be what JSON can hold: {error}") from None
