"""The built-in tools for schedules: what a model is shown of them, and what it says to them. Pure.

What only the database knows (which schedules there are, how many, what time it is) is for the store to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, ValidationError

from chaz.errors import InvalidSchedule
from chaz.outcomes import CallOutcome, ToolCall, typed_error
from chaz.planning import Schedule, ScheduleCall
from chaz.runtime.models import ToolSchema

SCHEDULES = "schedules"
"""What an agent names to get all of them."""
ADD, ONCE, MODIFY, REMOVE, LIST = (
    *("schedule_add", "schedule_once", "schedule_modify", "schedule_remove", "schedule_list"),
)
SCHEDULE_TOOLS = frozenset({ADD, ONCE, MODIFY, REMOVE, LIST})


class _Arguments(BaseModel):
    """Models that fill every field in write null for what they leave open, so that null leaves a thing as it is."""

    model_config = ConfigDict(extra="forbid")

    agent: str | None = None

    def given(self) -> dict[str, Any]:
        """What a schedule is made of, as far as it was given."""
        said = self.model_dump(exclude={"agent", "id", "target"}, exclude_none=True)
        return {name: _time(name, said[name]) if name in {"at", "expires_at"} else said[name] for name in said}


def _time(name: str, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidSchedule(name, f"{error}; write a time like 2027-01-31T09:00") from None


class ChangeArguments(_Arguments):
    """The arguments of ``schedule_modify``, and of ``schedule_add`` and ``schedule_once`` those that these have."""

    id: str
    prompt: str | None = None
    cron: str | None = None
    time_zone: str | None = None
    every: float | None = None
    at: str | None = None
    target: Literal["pinned", "fresh"] | None = None
    enabled: bool | None = None
    expires_at: str | None = None
    max_fires: int | None = None
    max_failures: int | None = None
    jitter: float | None = None
    catch_up: Literal["skip", "once"] | None = None


class NamedArguments(_Arguments):
    """The arguments of ``schedule_remove``."""

    id: str


class ListArguments(_Arguments):
    """The arguments of ``schedule_list``."""


_AGENT = {"type": "string", "description": "Another agent whose schedule it is, where that is allowed."}
_ID = {"type": "string", "description": "What it is called, such as daily-report; of your own, none may be the same."}
_FIELDS: Mapping[str, Any] = {
    "prompt": {"type": "string", "description": "What you are told then, complete in itself."},
    "cron": {
        "type": "string",
        "description": "When: minute, hour, day of month, month, day of week, such as 30 9 * * MON-FRI.",
    },
    "time_zone": {
        "type": "string",
        "description": "Of cron, and of times without an offset, such as Europe/Berlin; UTC if left out.",
    },
    "every": {"type": "number", "exclusiveMinimum": 0, "description": "When: so many seconds apart."},
    "at": {"type": "string", "description": "When: once, such as 2027-01-31T09:00 or 2027-01-31T09:00:00+01:00."},
    "target": {
        "type": "string",
        "enum": ["pinned", "fresh"],
        "description": "Where you wake: in this session (pinned), unless it is busy then, or each time in a new one.",
    },
    "enabled": {"type": "boolean", "description": "Whether it fires."},
    "expires_at": {"type": "string", "description": "Nothing fires after it; a time like at."},
    "max_fires": {"type": "integer", "minimum": 1, "description": "It fires so often at most."},
    "max_failures": {"type": "integer", "minimum": 1, "description": "So many failures in a row disable it."},
    "jitter": {"type": "number", "minimum": 0, "description": "Seconds by which it may be late."},
    "catch_up": {
        "type": "string",
        "enum": ["skip", "once"],
        "description": "What is done about times that passed while nothing could fire: nothing, or one firing for all.",
    },
}


def schedule_schemas() -> tuple[ToolSchema, ...]:
    """The tools, as a model is shown them."""
    once = {name: _FIELDS[name] for name in ("prompt", "at", "time_zone", "target", "jitter")}
    added = {name: field for name, field in _FIELDS.items() if name != "at"}
    return (
        _schema(
            ADD,
            "Wake yourself again and again: by cron or every so many seconds. You are told the prompt then; whatever "
            "you answer is sent, and nothing if that is empty.",
            {"id": _ID, **added},
            ["id", "prompt"],
        ),
        _schema(ONCE, "Wake yourself once, and be told the prompt then.", {"id": _ID, **once}, ["id", "prompt", "at"]),
        _schema(MODIFY, "Change a schedule; what is left out stays.", {"id": _ID, **_FIELDS}, ["id"]),
        _schema(REMOVE, "Remove a schedule.", {"id": _ID}, ["id"]),
        _schema(LIST, "List your schedules: when each is due next, or why it is not.", {}, []),
    )


def _schema(name: str, description: str, fields: Mapping[str, Any], required: list[str]) -> ToolSchema:
    return ToolSchema(
        name=name,
        description=description,
        parameters={
            "type": "object",
            "properties": {**fields, "agent": _AGENT},
            "required": required,
            "additionalProperties": False,
        },
    )


def wanted_scheduling(call: ToolCall, agent: str, session: UUID) -> ScheduleCall | CallOutcome:
    """What the call asks for, of ``agent`` in this session; or what is wrong with it."""
    try:
        return _wanted(call, agent, session)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where, what = ".".join(map(str, first["loc"])) or "arguments", first["msg"]
    except InvalidSchedule as error:
        where, what = error.args
    return typed_error("bad_arguments", f"{call.tool}: {where}: {what}")


def _wanted(call: ToolCall, agent: str, session: UUID) -> ScheduleCall:
    text = call.arguments or "{}"
    match call.tool:
        case t if t == LIST:
            return ScheduleCall("list", ListArguments.model_validate_json(text).agent or agent)
        case t if t == REMOVE:
            named = NamedArguments.model_validate_json(text)
            return ScheduleCall("remove", named.agent or agent, id=named.id)
        case t if t == MODIFY:
            wanted = ChangeArguments.model_validate_json(text)
            changes = wanted.given()
            if wanted.target is not None:
                changes["session"] = session if wanted.target == "pinned" else None
            return ScheduleCall("modify", wanted.agent or agent, id=wanted.id, changes=changes)
        case _:
            wanted = ChangeArguments.model_validate_json(text)
            if (wanted.at is None) == (call.tool == ONCE):
                what = "when is it due?" if wanted.at is None else f"{call.tool} fires again and again; use {ONCE}"
                raise InvalidSchedule("at", what)
            if wanted.prompt is None:
                raise InvalidSchedule("prompt", "what are you to be told?")
            pinned = None if wanted.target == "fresh" else session
            schedule = Schedule(wanted.id, **wanted.given(), session=pinned)
            return ScheduleCall("add", wanted.agent or agent, schedule, id=wanted.id)
