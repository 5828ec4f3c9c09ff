"""What a producer sends, checked as far as Python can tell, and the connections that it can be sent on."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypedDict, cast
from uuid import UUID, uuid4

import psycopg
from psycopg.rows import tuple_row

from chaz.callbacks import TaskCallback, Webhook, callback_of
from chaz.database import chaz_errors, translated
from chaz.entries import FROM_PRODUCERS, Author, Budget, EntryType, OnMessage, safe_text, session_id
from chaz.errors import ConfigurationError, InvalidEntry
from chaz.sessionlog import SEND, Submission


class SendOptions(TypedDict, total=False):
    """What every kind of sending takes besides. Times in seconds or as ``timedelta``; instants with a time zone."""

    sender: str
    """Who speaks; default: the program's user."""
    author: Author
    """``human`` or ``program``."""
    id: UUID
    idempotency_key: str
    """The same again, with the same body, is the same entry."""
    metadata: Mapping[str, Any]
    countdown: float | timedelta
    """The run starts so much later."""
    eta: datetime
    """The run starts then or later."""
    expires: float | timedelta | datetime
    """Not started by then, the run fails."""
    timeout: float | timedelta
    """Not ended in this time, the run fails."""
    priority: int
    """Higher goes first, among what waits in the session and what the listener publishes at once."""
    budget: Budget
    """What the run and all that it spawns may use."""
    on_complete: str | Mapping[str, Any] | Webhook | TaskCallback
    """Who is told of the run's end, at least once: a webhook's URL or a Celery signature (:mod:`chaz.callbacks`)."""
    connection: object
    """Send inside the caller's own transaction: a psycopg or SQLAlchemy connection (or SQLAlchemy session)."""


class SessionOptions(TypedDict, total=False):
    """What may be said of a session."""

    on_message: OnMessage
    """What a message does that comes while the session is busy.

    ``coalesce`` (the default): one run answers all that came by its start. ``each``: a run of its own. ``reject``: its
    run fails at once. ``interrupt``: the run at work ends in its favour. ``steer``: the run at work hears it between
    two steps. Directives always wait for their turn.
    """
    approvers: Sequence[str]
    """Who may approve calls and answer questions: names or globs. None named: whatever needs a word is denied."""
    auto_approve: Sequence[str]
    """Tools that need no approval, by globs, unless they always do."""
    approval_timeout: float | timedelta
    """How long a person's word is waited for; seconds, or a ``timedelta``."""
    burst: int
    """How many answers of agents in a row may wake whom they mention, until a person or a directive speaks."""


class Target:
    """A session as a producer names it: by name, by the id of one that exists, or a fresh one."""

    def __init__(self, name: str | None, id: UUID | None) -> None:
        if name is not None and id is not None:
            raise InvalidEntry("give a session's name or its id, not both")
        if name is not None and not 1 <= len(name) <= 200:
            raise InvalidEntry(f"a session's name has 1 to 200 characters, not {len(name)}")
        if name is not None and safe_text(name, 200) != name:
            raise InvalidEntry(f"a session's name cannot hold NUL or lone surrogates, as {name!r} does")
        if name is not None and _UUID.fullmatch(name):
            name, id = None, UUID(name)
        self.name = name
        self.fresh = name is None and id is None
        self.given_id = id or (uuid4() if self.fresh else None)

    def id(self, tenant: str) -> UUID:
        return self.given_id or session_id(self.name or "", tenant)

    def __repr__(self) -> str:
        return repr(self.name or str(self.given_id))


_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def submission(
    target: Target, tenant: str, type: EntryType, content: str, recipient: str | None, options: SendOptions
) -> Submission:
    """What is sent. Raises InvalidEntry for what Python can tell; PostgreSQL tells the rest."""
    if type not in FROM_PRODUCERS:
        allowed = ", ".join(sorted(FROM_PRODUCERS))
        raise InvalidEntry(f"a producer cannot send an entry of type {type!r}; it may send: {allowed}")
    known = SendOptions.__annotations__.keys()
    if unknown := options.keys() - known:
        raise InvalidEntry(f"unknown option {min(unknown)!r}; there are: {', '.join(sorted(known))}")
    expires = options.get("expires")
    countdown, eta = options.get("countdown"), options.get("eta")
    if countdown is not None and eta is not None:
        raise InvalidEntry("give a countdown or an eta, not both")
    for name, instant in (("eta", eta), ("expires", expires)):
        if isinstance(instant, datetime) and instant.tzinfo is None:
            raise InvalidEntry(f"{name} has no time zone: {instant}; use an aware datetime")
    sender = options.get("sender") or os.environ.get("USER") or "program"
    for name, text in (
        ("recipient", recipient),
        ("idempotency key", options.get("idempotency_key")),
    ):
        if text is not None and safe_text(text, len(text)) != text:
            raise InvalidEntry(f"a {name} cannot hold NUL or lone surrogates, as {text!r} does")
    try:
        json.dumps(dict(options.get("metadata", {})))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidEntry(f"metadata is what JSON can hold: {error}") from None
    return Submission(
        session=target.name or str(target.given_id),
        type=type,
        sender=safe_text(sender, 200),
        content=safe_text(content, len(content)),
        recipient=recipient,
        author=options.get("author", "program"),
        id=options.get("id"),
        idempotency_key=options.get("idempotency_key"),
        metadata=options.get("metadata", {}),
        tenant=tenant,
        countdown=_seconds(countdown),
        eta=eta,
        expires_at=expires if isinstance(expires, datetime) else None,
        expires_in=None if isinstance(expires, datetime) else _seconds(expires),
        timeout=_seconds(options.get("timeout")),
        priority=options.get("priority"),
        budget=options.get("budget"),
        open_session=target.fresh,
        on_complete=_callback(options.get("on_complete")),
    )


def _callback(value: object) -> Webhook | TaskCallback | None:
    try:
        return None if value is None else callback_of(value)
    except ValueError as error:
        raise InvalidEntry(f"on_complete is a webhook's URL or a Celery signature; {error}") from None


def _seconds(value: float | timedelta | None) -> timedelta | None:
    try:
        return timedelta(seconds=value) if isinstance(value, int | float) else value
    except (ValueError, OverflowError):
        raise InvalidEntry(f"{value} is no number of seconds that a run can wait or take") from None


# The one statement, with SQLAlchemy's way of naming parameters.
_SEND_NAMED = re.sub(r"%\((\w+)\)s", r":\1", SEND)


def _is_sqlalchemy(connection: object) -> bool:
    return type(connection).__module__.partition(".")[0] == "sqlalchemy"


def _not_a_connection(connection: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(
        f"connection is {type(connection).__qualname__}; here it must be {wanted} of psycopg or SQLAlchemy"
    )


def agent_name(agent: str) -> str:
    """The name, if an agent may be attached by it. Raises InvalidEntry."""
    if safe_text(agent, len(agent)) != agent:
        raise InvalidEntry(f"an agent's name cannot hold NUL or lone surrogates, as {agent!r} does")
    return agent


def send_on(connection: object, parameters: Mapping[str, Any]) -> UUID:
    """Send on the caller's own synchronous connection, in its transaction."""
    with chaz_errors():
        if isinstance(connection, psycopg.Connection):
            given = cast("psycopg.Connection[Any]", connection)
            with given.cursor(row_factory=tuple_row) as cursor:
                row = cursor.execute(SEND, parameters).fetchone()
            assert row is not None
            return row[0]
        if _is_sqlalchemy(connection) and not type(connection).__name__.startswith("Async"):
            from sqlalchemy import text

            with _sqlalchemy_errors():
                return cast("Any", connection).execute(text(_SEND_NAMED), parameters).scalar_one()
    raise _not_a_connection(connection, "a connection")


async def send_on_async(connection: object, parameters: Mapping[str, Any]) -> UUID:
    """Send on the caller's own async connection, in its transaction."""
    with chaz_errors():
        if isinstance(connection, psycopg.AsyncConnection):
            given = cast("psycopg.AsyncConnection[Any]", connection)
            async with given.cursor(row_factory=tuple_row) as cursor:
                row = await (await cursor.execute(SEND, parameters)).fetchone()
            assert row is not None
            return row[0]
        if _is_sqlalchemy(connection) and type(connection).__name__.startswith("Async"):
            from sqlalchemy import text

            with _sqlalchemy_errors():
                return (await cast("Any", connection).execute(text(_SEND_NAMED), parameters)).scalar_one()
    raise _not_a_connection(connection, "an async connection")


class _sqlalchemy_errors:
    """Raise SQLAlchemy's wrapped psycopg errors in chaz's words."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        original = getattr(error, "orig", None)
        if isinstance(original, psycopg.Error) and (found := translated(original, "the given connection")):
            raise found from error
