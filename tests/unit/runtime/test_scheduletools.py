"""The built-in tools for schedules: who gets them, and what a model's words become."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from chaz import Agent, Schedule
from chaz.errors import AgentsError
from chaz.outcomes import CallOutcome, ToolCall
from chaz.planning import ScheduleCall
from chaz.runtime.scheduletools import SCHEDULE_TOOLS, wanted_scheduling

HERE = UUID(int=3)


def wanted(tool: str, **arguments: Any) -> ScheduleCall:
    found = tried(tool, **arguments)
    assert isinstance(found, ScheduleCall), found
    return found


def tried(tool: str, **arguments: Any) -> ScheduleCall | CallOutcome:
    return wanted_scheduling(ToolCall(id="c", tool=tool, arguments=json.dumps(arguments)), "solo", HERE)


def test_an_agent_gets_them_all_by_one_word_or_each_by_its_name() -> None:
    whole = Agent("a", instructions="", model="scripted", tools=["schedules"])
    assert set(whole.tool_names) == SCHEDULE_TOOLS
    some = Agent("a", instructions="", model="scripted", tools=["schedule_once", "schedule_list"])
    assert some.tool_names == ["schedule_once", "schedule_list"]
    assert Agent("a", instructions="", model="scripted").tool_names == []
    with pytest.raises(AgentsError, match="two tools named 'schedule_add'"):
        Agent("a", instructions="", model="scripted", tools=["schedules", "schedule_add"])


def test_spawning_needs_its_own_tool() -> None:
    with pytest.raises(AgentsError, match="'spawn_agent' is not among its tools"):
        Agent("a", instructions="", model="scripted", tools=["schedules"], may_spawn=["b"])


def test_what_a_model_leaves_open_is_null_or_missing() -> None:
    daily = Schedule("daily", "Report.", cron="0 9 * * *", time_zone="Asia/Kolkata", session=HERE)
    said: dict[str, Any] = {"id": "daily", "prompt": "Report.", "cron": "0 9 * * *", "time_zone": "Asia/Kolkata"}
    assert wanted("schedule_add", **said) == ScheduleCall("add", "solo", daily, id="daily")
    nulls = dict.fromkeys(("every", "max_fires", "target", "agent", "enabled", "catch_up", "expires_at"))
    assert wanted("schedule_add", **said, **nulls).schedule == daily
    assert wanted("schedule_list") == ScheduleCall("list", "solo")
    assert wanted("schedule_list", agent="other").agent == "other"
    assert wanted("schedule_remove", id="daily") == ScheduleCall("remove", "solo", id="daily")


def test_it_wakes_in_this_session_or_in_a_new_one() -> None:
    for target, session in ((None, HERE), ("pinned", HERE), ("fresh", None)):
        found = wanted("schedule_add", id="a", prompt="x", every=60, target=target)
        assert found.schedule is not None
        assert found.schedule.session == session
    assert wanted("schedule_modify", id="a", target="fresh").changes == {"session": None}
    assert wanted("schedule_modify", id="a", target="pinned").changes == {"session": HERE}


def test_a_time_has_an_offset_or_is_in_the_zone() -> None:
    eight = datetime(2027, 1, 31, 8, tzinfo=UTC)
    for at in ("2027-01-31T09:00:00+01:00", "2027-01-31T09:00", "2027-01-31 09:00"):
        found = wanted("schedule_once", id="a", prompt="x", at=at, time_zone="Europe/Berlin")
        assert found.schedule is not None
        assert found.schedule.at == eight


def test_a_change_names_what_it_changes() -> None:
    changes = wanted("schedule_modify", id="a", enabled=False, max_fires=3, cron=None).changes
    assert changes == {"enabled": False, "max_fires": 3}


@pytest.mark.parametrize(
    ("tool", "arguments", "what"),
    [
        ("schedule_add", {"id": "a", "prompt": "x"}, "cron: give one of cron, every and at, not none of them"),
        ("schedule_add", {"id": "a", "prompt": "x", "cron": "nine"}, "cron: 'nine' does not have the five fields"),
        ("schedule_add", {"id": "a", "prompt": "x", "every": 60, "time_zone": "Here"}, "time_zone: there is no time"),
        ("schedule_add", {"id": "a", "prompt": "x", "at": "2027-01-31"}, "at: schedule_add fires again and again"),
        ("schedule_add", {"id": "a", "every": 60}, "prompt: what are you to be told?"),
        ("schedule_add", {"id": "a", "prompt": "x", "every": "soon"}, "every: Input should be a valid number"),
        ("schedule_add", {"id": "a\0", "prompt": "x", "every": 60}, "id: it has 1 to 50 letters"),
        ("schedule_add", {"id": "a", "prompt": "x", "every": 60, "when": 1}, "when: Extra inputs are not permitted"),
        ("schedule_once", {"id": "a", "prompt": "x"}, "at: when is it due?"),
        ("schedule_once", {"id": "a", "prompt": "x", "at": "tomorrow"}, "at: Invalid isoformat string: 'tomorrow'"),
        ("schedule_once", {"id": "a", "prompt": "x", "at": "9999-12-31T23:59:59-05:00"}, "at: it lies between"),
        (
            "schedule_add",
            {"id": "a", "prompt": "x", "every": 60, "expires_at": "soon"},
            "expires_at: Invalid isoformat",
        ),
        ("schedule_modify", {"prompt": "x"}, "id: Field required"),
        ("schedule_remove", {}, "id: Field required"),
    ],
)
def test_what_is_wrong_is_told_with_its_field(tool: str, arguments: dict[str, Any], what: str) -> None:
    outcome = tried(tool, **arguments)
    assert isinstance(outcome, CallOutcome)
    assert outcome.error == "bad_arguments"
    assert outcome.content.startswith(f"bad_arguments: {tool}: {what}")
