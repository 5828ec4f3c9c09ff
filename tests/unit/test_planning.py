"""A schedule as it is asked for: what it may say, and what is refused."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pytest

from chaz import Agent, Schedule
from chaz.errors import AgentsError, InvalidSchedule
from chaz.planning import Ceilings
from chaz.triggers import At, Cron, Every


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({}, "cron"),
        ({"cron": "0 9 * * *", "every": 60}, "every"),
        ({"cron": "0 9 * *"}, "cron"),
        ({"cron": "0 9 * * *", "time_zone": "Nowhere"}, "time_zone"),
        ({"every": 0}, "every"),
        ({"every": -1}, "every"),
        ({"every": float("nan")}, "every"),
        ({"every": float("inf")}, "every"),
        ({"every": 60, "jitter": 60}, "jitter"),
        ({"every": 60, "jitter": -1}, "jitter"),
        ({"every": 60, "max_fires": 0}, "max_fires"),
        ({"every": 60, "max_failures": 2**31}, "max_failures"),
        ({"every": 60, "catch_up": "twice"}, "catch_up"),
        ({"every": 60, "prompt": " \n"}, "prompt"),
        ({"every": 60, "prompt": "x" * 100_001}, "prompt"),
        ({"every": 60, "id": "no spaces"}, "id"),
        ({"every": 60, "id": ""}, "id"),
        ({"at": datetime(1800, 1, 1, tzinfo=UTC)}, "at"),
        ({"every": 60, "expires_at": datetime(9999, 1, 1, tzinfo=UTC)}, "expires_at"),
        ({"every": 60, "expires_at": datetime.max, "time_zone": "America/New_York"}, "expires_at"),
        ({"at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-5)))}, "at"),
        ({"at": datetime.min, "time_zone": "Asia/Kolkata"}, "at"),
        # What else a program may say, of whatever type.
        ({"every": 60, "id": 5}, "id"),
        ({"every": 60, "prompt": None}, "prompt"),
        ({"cron": 5}, "cron"),
        ({"cron": b"0 9 * * *"}, "cron"),
        ({"cron": "0 9 * * *", "time_zone": None}, "time_zone"),
        ({"cron": "0 9 * * *", "time_zone": "localtime"}, "time_zone"),
        ({"every": "60"}, "every"),
        ({"every": True}, "every"),
        ({"at": "2027-01-01"}, "at"),
        ({"at": date(2027, 1, 1)}, "at"),
        ({"every": 60, "session": 5}, "session"),
        ({"every": 60, "session": "a\0b"}, "session"),
        ({"every": 60, "session": "\ud800"}, "session"),
        ({"every": 60, "enabled": "no"}, "enabled"),
        ({"every": 60, "max_fires": 1.5}, "max_fires"),
        ({"every": 60, "max_fires": True}, "max_fires"),
        ({"every": 60, "jitter": None}, "jitter"),
        ({"every": 60, "jitter": "5"}, "jitter"),
        ({"every": 60, "catch_up": None}, "catch_up"),
    ],
)
def test_what_is_wrong_is_refused_with_its_field(wanted: dict[str, Any], field: str) -> None:
    said: dict[str, Any] = {"id": "daily", "prompt": "Report.", **wanted}
    with pytest.raises(InvalidSchedule) as refused:
        Schedule(**said)
    assert refused.value.args[0] == field


def test_its_trigger() -> None:
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    assert Schedule("a", "x", cron="0 9 * * *").trigger == Cron("0 9 * * *", "UTC")
    assert Schedule("a", "x", every=60).trigger_from(begin) == Every(timedelta(minutes=1), begin)
    # A time without a zone is in the schedule's; a skipped one is when the clock has jumped.
    winter = Schedule("a", "x", at=datetime(2026, 1, 1, 9), time_zone="Europe/Berlin")
    assert winter.trigger == At(datetime(2026, 1, 1, 8, tzinfo=UTC))
    skipped = Schedule("a", "x", at=datetime(2026, 3, 29, 2, 30), time_zone="Europe/Berlin")
    assert skipped.trigger == At(datetime(2026, 3, 29, 1, tzinfo=UTC))


def test_a_change_keeps_the_rest_and_one_trigger_takes_the_place_of_another() -> None:
    daily = Schedule("daily", "Report.", cron="0 9 * * *", time_zone="Asia/Kolkata", max_fires=3)

    changed = daily.changed({"every": 3600, "max_fires": None})

    assert changed == Schedule("daily", "Report.", every=3600, time_zone="Asia/Kolkata")
    with pytest.raises(InvalidSchedule, match="when: a schedule has no such field"):
        daily.changed({"when": 1})
    with pytest.raises(InvalidSchedule, match="cron: give one of cron, every and at, not none"):
        daily.changed({"cron": None})


def test_a_deployment_says_how_often_at_most() -> None:
    hourly = Ceilings(shortest=timedelta(hours=1))
    hourly.check(Schedule("a", "x", cron="0 * * * *"))
    hourly.check(Schedule("a", "x", at=datetime(2030, 1, 1, tzinfo=UTC)))
    with pytest.raises(InvalidSchedule, match="every: it is due every 60 s; here the shortest is 3600 s"):
        hourly.check(Schedule("a", "x", every=60))
    with pytest.raises(InvalidSchedule, match="cron: it is due every 300 s"):
        hourly.check(Schedule("a", "x", cron="*/5 9 * * *"))


def test_one_is_due_before_the_next_slot_comes() -> None:
    with pytest.raises(InvalidSchedule, match="jitter: it is less than the 3600 s between two slots"):
        Ceilings().check(Schedule("a", "x", cron="0 * * * *", jitter=3600))
    Ceilings().check(Schedule("a", "x", cron="0 * * * *", jitter=3599))
    Ceilings().check(Schedule("a", "x", at=datetime(2030, 1, 1, tzinfo=UTC), jitter=86_400))


def test_a_prompt_is_as_postgresql_can_hold_it() -> None:
    assert Schedule("a", "a\0b\ud800", every=60).prompt == "a\ufffdb\ufffd"


def test_an_agent_names_each_schedule_once() -> None:
    with pytest.raises(AgentsError, match="two schedules 'a'"):
        Agent("x", instructions="", model="scripted", schedules=[Schedule("a", "x", every=60)] * 2)
