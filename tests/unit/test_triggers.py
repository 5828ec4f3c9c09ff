"""When a schedule is due: in real zones, on the days on which their clocks change, and what is missed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest

from chaz.errors import InvalidSchedule
from chaz.triggers import At, Cron, Due, Every, Trigger, due_at, judge, latest

KEY = UUID(int=7)
NO_TIME = timedelta(0)
MINUTE = timedelta(minutes=1)


def slots(expression: str, zone: str, begin: str, end: str) -> list[str]:
    """The slots between two times on the wall, as the clock shows them, with its offset."""
    place = ZoneInfo(zone)
    instant = datetime.fromisoformat(begin).replace(tzinfo=place)
    last = datetime.fromisoformat(end).replace(tzinfo=place)
    found: list[str] = []
    slot = Cron(expression, zone).after(instant)
    while slot is not None and slot <= last:
        found.append(f"{slot.astimezone(place):%dT%H:%M%z}")
        slot = Cron(expression, zone).after(slot)
    return found


BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"
# 2026: Berlin's clocks jump from 2 to 3 on 29 March and go back from 3 to 2 on 25 October; New York's jump from 2 to 3
# on 8 March and go back from 2 to 1 on 1 November.
CHANGES = [
    (BERLIN, "2026-03-28T12:00", "2026-03-30T12:00", "30 2 * * *", ["29T03:00+0200", "30T02:30+0200"]),
    (BERLIN, "2026-10-24T12:00", "2026-10-26T12:00", "30 2 * * *", ["25T02:30+0200", "26T02:30+0100"]),
    (NEW_YORK, "2026-03-07T12:00", "2026-03-09T12:00", "30 2 * * *", ["08T03:00-0400", "09T02:30-0400"]),
    (NEW_YORK, "2026-10-31T12:00", "2026-11-02T12:00", "30 1 * * *", ["01T01:30-0400", "02T01:30-0500"]),
    # Several skipped times are one, and of a time that comes twice the first counts, whatever the minutes are.
    (BERLIN, "2026-03-28T12:00", "2026-03-29T12:00", "*/20 2 * * *", ["29T03:00+0200"]),
    (BERLIN, "2026-03-28T12:00", "2026-03-29T12:00", "0 2,3 * * *", ["29T03:00+0200"]),
    (BERLIN, "2026-10-24T12:00", "2026-10-25T12:00", "*/30 2 * * *", ["25T02:00+0200", "25T02:30+0200"]),
    (
        BERLIN,
        "2026-03-28T23:00",
        "2026-03-29T05:00",
        "0 */2 * * *",
        ["29T00:00+0100", "29T03:00+0200", "29T04:00+0200"],
    ),
    (
        BERLIN,
        "2026-10-24T23:00",
        "2026-10-25T05:00",
        "0 */2 * * *",
        ["25T00:00+0200", "25T02:00+0200", "25T04:00+0100"],
    ),
    # With every hour in it, it is due each hour that passes.
    (BERLIN, "2026-03-29T00:30", "2026-03-29T04:30", "0 * * * *", ["29T01:00+0100", "29T03:00+0200", "29T04:00+0200"]),
    (
        *(BERLIN, "2026-10-25T01:30", "2026-10-25T03:30", "0 0-23 * * *"),
        ["25T02:00+0200", "25T02:00+0100", "25T03:00+0100"],
    ),
    (
        *(NEW_YORK, "2026-11-01T00:30", "2026-11-01T02:10", "*/30 * * * *"),
        ["01T01:00-0400", "01T01:30-0400", "01T01:00-0500", "01T01:30-0500", "01T02:00-0500"],
    ),
    # Where no clock changes, and at a time that no change touches.
    ("Asia/Kolkata", "2026-03-28T12:00", "2026-03-30T12:00", "30 2 * * *", ["29T02:30+0530", "30T02:30+0530"]),
    (BERLIN, "2026-10-24T13:00", "2026-10-26T13:00", "0 12 * * *", ["25T12:00+0100", "26T12:00+0100"]),
    # A whole day that a zone skipped.
    ("Pacific/Apia", "2011-12-29T13:00", "2011-12-31T13:00", "0 12 * * *", ["31T00:00+1400", "31T12:00+1400"]),
]


@pytest.mark.parametrize(("zone", "begin", "end", "expression", "expected"), CHANGES)
def test_nothing_is_due_twice_or_never_when_clocks_change(
    zone: str, begin: str, end: str, expression: str, expected: list[str]
) -> None:
    assert slots(expression, zone, begin, end) == expected


@pytest.mark.parametrize("zone", [BERLIN, NEW_YORK, "Asia/Kolkata", "Australia/Lord_Howe", "UTC"])
@pytest.mark.parametrize("hour", range(5))
def test_a_daily_time_is_due_once_on_each_day_of_a_year(zone: str, hour: int) -> None:
    cron, place = Cron(f"15 {hour} * * *", zone), ZoneInfo(zone)
    slot: datetime | None = datetime(2026, 1, 1, tzinfo=place)
    days: list[int] = []
    while (slot := cron.after(slot)) is not None and (local := slot.astimezone(place)).year == 2026:
        days.append(local.timetuple().tm_yday)

    assert days == list(range(1, 366))


def test_wherever_one_begins_within_a_change_the_slots_are_the_same() -> None:
    for day, expression in (("2026-10-25", "*/20 1-3 * * *"), ("2026-03-29", "10,50 1-4 * * *")):
        begin = datetime.fromisoformat(f"{day}T00:00").replace(tzinfo=ZoneInfo(BERLIN)).astimezone(UTC)
        cron = Cron(expression, BERLIN)
        all_slots = [slot for slot in take(cron, begin, 15) if slot < begin + timedelta(hours=6)]
        assert len(all_slots) > 5
        for minutes in range(0, 300, 7):
            instant = begin + minutes * MINUTE
            later = [slot for slot in all_slots if slot > instant]
            assert take(cron, instant, len(later)) == later


def take(trigger: Trigger, instant: datetime, count: int) -> list[datetime]:
    def slots_of() -> Iterator[datetime]:
        slot: datetime | None = instant
        for _ in range(count):
            assert slot is not None
            slot = trigger.after(slot)
            assert slot is not None
            yield slot

    return list(slots_of())


@pytest.mark.parametrize(
    ("expression", "begin", "expected"),
    [
        ("0 0 L * *", "2028-01-01", ["2028-01-31", "2028-02-29", "2028-03-31", "2028-04-30"]),
        ("0 0 31 * *", "2026-01-01", ["2026-01-31", "2026-03-31", "2026-05-31"]),
        ("0 0 29 2 *", "2026-01-01", ["2028-02-29", "2032-02-29"]),
        ("0 0 * * MON#1", "2026-11-30", ["2026-12-07", "2027-01-04"]),
        ("0 0 13 * FRI", "2026-11-09", ["2026-11-13", "2026-11-20"]),
    ],
)
def test_ends_of_months_and_leap_days(expression: str, begin: str, expected: list[str]) -> None:
    found = take(Cron(expression, "UTC"), datetime.fromisoformat(begin).replace(tzinfo=UTC), len(expected))

    assert [f"{slot:%Y-%m-%d}" for slot in found] == expected


@pytest.mark.parametrize(
    ("expression", "zone", "field", "what"),
    [
        ("61 * * * *", "UTC", "cron", "its field minute is wrong"),
        ("* * * * FUN", "UTC", "cron", "its field day-of-week is wrong"),
        ("* * * *", "UTC", "cron", "does not have the five fields"),
        ("0 * * * * *", "UTC", "cron", "does not have the five fields"),
        ("", "UTC", "cron", "does not have the five fields"),
        ("0 0 30 2 *", "UTC", "cron", "its field day-of-month is wrong"),
        ("*" * 300, "UTC", "cron", "200 characters at most"),
        ("0 9 * * *", "Mars/Olympus", "time_zone", "no time zone 'Mars/Olympus'"),
        ("0 9 * * *", "Europe", "time_zone", "no time zone 'Europe'"),
        ("0 9 * * *", "../../etc/passwd", "time_zone", "no time zone"),
        ("0 9 * * *", "", "time_zone", "no time zone ''"),
    ],
)
def test_what_is_wrong_is_refused_with_its_field(expression: str, zone: str, field: str, what: str) -> None:
    with pytest.raises(InvalidSchedule) as refused:
        Cron(expression, zone)
    assert refused.value.args[0] == field
    assert what in str(refused.value)


def test_an_interval_is_counted_from_where_it_began() -> None:
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    every = Every(timedelta(minutes=10), begin)

    assert every.after(begin) == begin + timedelta(minutes=10)
    assert every.after(begin + timedelta(minutes=25)) == begin + timedelta(minutes=30)
    assert every.after(begin + timedelta(minutes=30)) == begin + timedelta(minutes=40)
    assert every.after(begin - timedelta(days=1)) == begin + timedelta(minutes=10)


@pytest.mark.parametrize("expression", ["* * * * *", "0 9 * * *", "*/15 2 * * *", "0 0 29 2 *", "0 12 * * MON"])
def test_the_latest_slot_is_found_without_walking_through_all(expression: str) -> None:
    cron = Cron(expression, BERLIN)
    since = cron.after(datetime(2024, 1, 1, tzinfo=UTC))
    assert since is not None
    for until in (datetime(2026, 10, 25, 1, 10, tzinfo=UTC), datetime(2026, 3, 29, 2, tzinfo=UTC), since):
        found = latest(cron, until, since)
        assert found <= until
        following = cron.after(found)
        assert following is None or following > until
        assert cron.after(found - timedelta(microseconds=1)) == found


def test_the_shortest_time_between_two_slots() -> None:
    assert Cron("*/5 9 * * *", "UTC").shortest() == timedelta(minutes=5)
    assert Cron("0,1 9 * * *", "UTC").shortest() == MINUTE
    assert Cron("0 9 * * *", BERLIN).shortest() == timedelta(hours=23)
    assert At(datetime(2026, 1, 1, tzinfo=UTC)).shortest() == timedelta.max


def test_jitter_is_alike_for_everybody_and_within_its_bounds() -> None:
    slot, jitter = datetime(2026, 1, 1, tzinfo=UTC), timedelta(minutes=5)
    found = {due_at(KEY, slot + n * MINUTE, jitter) - (slot + n * MINUTE) for n in range(50)}

    assert len(found) > 40
    assert all(NO_TIME <= delay < jitter for delay in found)
    assert due_at(KEY, slot, jitter) == due_at(KEY, slot.astimezone(ZoneInfo(BERLIN)), jitter)


# What is done about a schedule whose time has come.

NINE = datetime(2026, 6, 1, 9, tzinfo=UTC)
HOURLY = Cron("0 * * * *", "UTC")


def judged(
    now: datetime,
    trigger: Trigger = HOURLY,
    *,
    catch_up: bool = False,
    expires_at: datetime | None = None,
    jitter: timedelta = NO_TIME,
) -> Due:
    return judge(trigger, KEY, NINE, now, jitter=jitter, grace=MINUTE, catch_up=catch_up, expires_at=expires_at)


def hours(number: float) -> datetime:
    return NINE + timedelta(hours=number)


def test_a_slot_in_time_fires() -> None:
    assert judged(NINE + timedelta(seconds=3)) == Due(NINE, None, hours(1))


def test_slots_that_passed_are_skipped_or_fire_once() -> None:
    assert judged(hours(3.5)) == Due(None, NINE, hours(4))
    assert judged(hours(3.5), catch_up=True) == Due(hours(3), NINE, hours(4))
    assert judged(hours(0.5), catch_up=True) == Due(NINE, None, hours(1))


def test_a_listener_back_just_in_time_fires_the_slot_that_is_due() -> None:
    assert judged(hours(3) + timedelta(seconds=5)) == Due(hours(3), NINE, hours(4))


def test_what_is_due_once_fires_however_late() -> None:
    assert judged(hours(100), At(NINE)) == Due(NINE, None, None)


def test_nothing_fires_after_it_has_expired() -> None:
    assert judged(NINE, expires_at=hours(0.5)) == Due(NINE, None, None)
    assert judged(NINE + timedelta(seconds=3), expires_at=NINE) == Due(NINE, None, None)
    assert judged(hours(3.5), catch_up=True, expires_at=hours(2.5)) == Due(None, NINE, None)
    assert judged(hours(3.5), At(NINE), expires_at=hours(2.5)) == Due(None, NINE, None)


def test_a_slot_whose_jitter_has_not_passed_is_not_due_yet() -> None:
    jitter = timedelta(hours=1)
    later = due_at(KEY, hours(1), jitter)
    due = judged(later - timedelta(seconds=1), jitter=jitter, catch_up=True)
    assert (due.fires, due.next) == (NINE, hours(1))
    assert judged(later, jitter=jitter).fires == hours(1)
