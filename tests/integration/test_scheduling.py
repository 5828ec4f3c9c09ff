"""An agent's calls about schedules: each happens once, with its result, within what the deployment allows."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from chaz import children, scheduling
from chaz.asking import Approving
from chaz.deliveries import AuditEvent
from chaz.entries import Budget
from chaz.errors import StaleAttempt
from chaz.outcomes import CallOutcome
from chaz.planning import Ceilings, Schedule, ScheduleCall
from chaz.runjournal import RunJournal
from chaz.runs import Claim
from tests.fixtures.schedules import FREE, Calendar
from tests.fixtures.stations import Stations, a_call

pytestmark = pytest.mark.anyio

Do = Callable[..., Awaitable[CallOutcome]]
DAILY = ScheduleCall("add", "solo", Schedule("daily", "Report.", every=3600), id="daily")


async def claimed(stations: Stations) -> Claim:
    claim = await stations.claimed("s")
    await stations.step(claim, *[a_call("schedule_add")] * 9)
    return claim


def keeper(stations: Stations, claim: Claim, told: list[AuditEvent], ceilings: Ceilings = FREE) -> RunJournal:
    async def no_wait() -> None:
        pass

    return RunJournal(stations.database, claim, "v1", "scripted", Budget(), Approving(), told.extend, no_wait, ceilings)


async def test_a_call_adds_changes_lists_and_removes(calendar: Calendar, stations: Stations) -> None:
    claim, told = await claimed(stations), list[AuditEvent]()
    do = partial(keeper(stations, claim, told).schedule, 0)

    added = await do(0, a_call("schedule_add"), DAILY)
    row = await calendar.row()
    assert added.content == f"daily is due next at {row['next_at'].isoformat()}"
    assert row["created_by"] == "agent solo"
    changed = await do(
        1, a_call("schedule_modify"), ScheduleCall("modify", "solo", id="daily", changes={"max_fires": 3})
    )
    assert changed.kind == "ok"
    listed = await do(2, a_call("schedule_list"), ScheduleCall("list", "solo"))
    (shown,) = [json.loads(line) for line in listed.content.splitlines()]
    assert (shown["id"], shown["prompt"], shown["max_fires"]) == ("daily", "Report.", 3)
    removed = await do(3, a_call("schedule_remove"), ScheduleCall("remove", "solo", id="daily"))
    assert removed.content == "daily is removed"
    assert (await do(4, a_call("schedule_list"), ScheduleCall("list", "solo"))).content == "none"
    assert [event.kind for event in told] == ["tool_call", "tool_result"] * 5
    assert (await calendar.row())["retired_by"] == "agent solo"


@pytest.mark.parametrize(
    ("wanted", "ceilings", "word", "what"),
    [
        (DAILY, Ceilings(most=0), "bad_arguments", "may have 0 (CHAZ_MAX_SCHEDULES)"),
        (DAILY, Ceilings(), None, "daily is due next at"),
        (
            *(ScheduleCall("add", "solo", Schedule("fast", "x", every=1)), Ceilings(), "bad_arguments"),
            "every: it is due every 1 s; here the shortest is 60 s",
        ),
        (ScheduleCall("remove", "solo", id="none"), FREE, "unknown_schedule", "agent 'solo' has no schedule 'none'"),
        (ScheduleCall("list", "parent"), FREE, "not_allowed", "the schedules of 'parent' are its own"),
        (ScheduleCall("list", "parent"), Ceilings(of_others=True), None, "none"),
        (
            ScheduleCall("add", "x", DAILY.schedule),
            Ceilings(of_others=True),
            "unknown_schedule",
            "no worker has registered",
        ),
        (
            *(ScheduleCall("add", "solo", Schedule("a", "x", every=60, session="nowhere")), FREE, "unknown_schedule"),
            "no session 'nowhere'",
        ),
    ],
)
async def test_what_is_not_allowed_is_the_calls_result(
    stations: Stations, wanted: ScheduleCall, ceilings: Ceilings, word: str | None, what: str
) -> None:
    claim = await claimed(stations)
    outcome = await keeper(stations, claim, [], ceilings).schedule(0, 0, a_call("schedule_add"), wanted)
    assert (outcome.error or None) == word
    assert what in outcome.content
    (call,) = await stations.fetch("select state, result from chaz.calls")
    assert call == {"state": "done", "result": outcome.content}


async def test_a_lost_worker_leaves_neither_half(stations: Stations, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = await claimed(stations)

    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("lost")

    with monkeypatch.context() as patched:
        patched.setattr(scheduling, "finish_call", broken)
        with pytest.raises(RuntimeError):
            await keeper(stations, claim, []).schedule(0, 0, a_call("schedule_add"), DAILY)
    assert await stations.fetch("select from chaz.schedules union all select from chaz.calls") == []


async def test_a_commit_in_doubt_is_found_and_a_stale_attempt_adds_nothing(stations: Stations) -> None:
    claim = await claimed(stations)
    call: dict[str, Any] = {"step": 0, "ordinal": 0}
    done = await stations.transact(
        lambda tx: scheduling.perform(tx, claim, **call, call=a_call("schedule_add"), wanted=DAILY, ceilings=FREE)
    )
    assert await stations.transact(lambda tx: children.told(tx, claim, **call)) == done
    await stations.give_back(claim)
    await stations.claim(claim.run_id)
    other = ScheduleCall("add", "solo", Schedule("other", "x", every=60))
    with pytest.raises(StaleAttempt):
        await keeper(stations, claim, []).schedule(0, 1, a_call("schedule_add"), other)
    assert len(await stations.fetch("select from chaz.schedules")) == 1


async def test_whatever_a_model_writes_can_be_stored(calendar: Calendar, stations: Stations) -> None:
    claim = await claimed(stations)
    odd = ScheduleCall("add", "solo", Schedule("odd", "a\0b\ud800", every=60))
    assert (await keeper(stations, claim, []).schedule(0, 0, a_call("schedule_add"), odd)).kind == "ok"
    assert (await calendar.row("odd"))["prompt"] == "a\ufffdb\ufffd"
