"""When a schedule is due: what it is given, the next slot after an instant, and the last one before. Pure.

A slot is the instant that a trigger names; what fires, fires once for it. All instants are aware, and slots are in UTC.

How a cron expression meets a clock that changes: with every hour in it (``*``), it follows time as it passes, so that
a repeated hour has its slots as any other. With hours of its own it follows the clock on the wall: a time that is
skipped is due when the clock has jumped (several of them together once), and one that comes twice is due the first
time only. So nothing is left out, and nothing is done twice.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from uuid import UUID
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from chaz.errors import InvalidSchedule

MAX_EXPRESSION = 200
LOOKED_AT = 100
"""Slots of a cron expression that are looked at for the shortest time between two."""

_FIELDS = "minute hour day-of-month month day-of-week"
_OF_THE_MACHINE = {"localtime", "posixrules"}
"""Files beside the zones, which say something else on each machine."""
_SOME_DAY = datetime(2024, 1, 1, tzinfo=UTC)


def zone_of(name: str) -> ZoneInfo:
    """The time zone of this name of the IANA database. Raises InvalidSchedule."""
    try:
        if name in _OF_THE_MACHINE:
            raise KeyError(name)
        return ZoneInfo(name)
    # What is no key at all (KeyError), what leaves the folder (ValueError), and what is a folder (OSError).
    except (KeyError, ValueError, OSError, TypeError):
        raise InvalidSchedule(
            "time_zone", f"there is no time zone {name!r:.100}; write it like Europe/Berlin"
        ) from None


def instant_of(wall: datetime, zone: ZoneInfo) -> datetime:
    """When the clock on the wall of this zone shows ``wall``, or has jumped over it; the first time, if it does twice.

    A skipped time is the instant of the jump.
    """
    minute = timedelta(minutes=1)
    while (found := wall.replace(tzinfo=zone).astimezone(UTC)).astimezone(zone).replace(tzinfo=None) != wall:
        wall = wall.replace(second=0, microsecond=0) + minute
    return found


@dataclass(frozen=True)
class Cron:
    """The slots of a cron expression in a time zone. Raises InvalidSchedule, naming the field."""

    expression: str
    zone: str

    def __post_init__(self) -> None:
        shown = f"{self.expression[:MAX_EXPRESSION]!r}"
        if len(self.expression) > MAX_EXPRESSION:
            raise InvalidSchedule("cron", f"an expression has {MAX_EXPRESSION} characters at most: {shown}…")
        if len(self.expression.split()) != 5:
            raise InvalidSchedule(
                "cron", f"{shown} does not have the five fields {_FIELDS}, such as '30 9 * * MON-FRI'"
            )
        zone_of(self.zone)
        try:
            never = self.after(_SOME_DAY) is None
        except CronSimError as error:
            what = str(error).replace("Bad ", "its field ", 1)
            raise InvalidSchedule("cron", f"{shown} is no cron expression: {what} is wrong") from None
        if never:
            raise InvalidSchedule("cron", f"{shown} is never due: no such day comes")

    def after(self, instant: datetime) -> datetime | None:
        """The first slot after this instant; None: there is none within fifty years."""
        zone = zone_of(self.zone)
        local = instant.astimezone(zone)
        wall = CronSim(self.expression, local.replace(tzinfo=None))
        if len(wall.hours) == 24:
            minute, _, *rest = self.expression.split()
            found = next(CronSim(" ".join((minute, "*", *rest)), local), None)
            return None if found is None else found.astimezone(UTC)
        for time in wall:
            # In an hour that comes for the second time, those of the first are over.
            if (found := instant_of(time, zone)) > instant:
                return found
        return None

    def shortest(self) -> timedelta:
        """The shortest time between two slots, of those that are looked at."""
        slots: list[datetime] = []
        slot = self.after(_SOME_DAY)
        while slot is not None and len(slots) < LOOKED_AT:
            slots.append(slot)
            slot = self.after(slot)
        return min((later - earlier for earlier, later in pairwise(slots)), default=timedelta.max)


@dataclass(frozen=True)
class Every:
    """A slot each ``interval``, counted from ``anchor``; that itself is none. No clock's change has a part in it."""

    interval: timedelta
    anchor: datetime

    def after(self, instant: datetime) -> datetime:
        """The first slot after this instant."""
        passed = max(0, (instant - self.anchor) // self.interval)
        return (self.anchor + (passed + 1) * self.interval).astimezone(UTC)

    def shortest(self) -> timedelta:
        """The time between two slots."""
        return self.interval


@dataclass(frozen=True)
class At:
    """One slot."""

    instant: datetime

    def after(self, instant: datetime) -> datetime | None:
        """The slot, while it is to come."""
        return self.instant.astimezone(UTC) if self.instant > instant else None

    def shortest(self) -> timedelta:
        """There is no other."""
        return timedelta.max


Trigger = Cron | Every | At


def latest(trigger: Trigger, until: datetime, since: datetime) -> datetime:
    """The last slot that is not after ``until``; ``since`` is one, and not after it."""
    window = timedelta(minutes=1)
    found = since
    # Back in leaps that double, so that a week of missed minutes is not walked through.
    while until - window > since:
        begin = trigger.after(until - window)
        if begin is not None and begin <= until:
            found = begin
            break
        window *= 2
    while (later := trigger.after(found)) is not None and later <= until:
        found = later
    return found


def due_at(schedule: UUID, slot: datetime, jitter: timedelta, expires_at: datetime | None = None) -> datetime:
    """When a slot is due: up to ``jitter`` after it, not after it has expired, alike for whoever computes it."""
    if not jitter:
        return slot
    digest = hashlib.sha256(f"{schedule}\0{slot.timestamp()}".encode()).digest()
    late = slot + jitter * (int.from_bytes(digest[:4], "big") / 2**32)
    return late if expires_at is None else min(late, expires_at)


@dataclass(frozen=True)
class Due:
    """What is to be done about a schedule whose time has come."""

    fires: datetime | None
    """The slot that fires now; None: it was missed, as those before it."""
    missed: datetime | None
    """The first slot that nobody fired in time; None: none was missed."""
    next: datetime | None
    """The slot after all these; None: there is none."""


def judge(
    trigger: Trigger,
    schedule: UUID,
    slot: datetime,
    now: datetime,
    *,
    jitter: timedelta,
    grace: timedelta,
    catch_up: bool,
    expires_at: datetime | None,
) -> Due:
    """What is due at ``now`` of a schedule whose next slot was ``slot``, its jitter included.

    A slot is missed if a later one is due too, or if ``grace`` has passed; with ``catch_up`` the last one fires all the
    same, as a trigger's only one does: unless the schedule has expired meanwhile.
    """
    until = now if expires_at is None else min(now, expires_at)
    last = latest(trigger, max(until, slot), slot)
    while last > slot and due_at(schedule, last, jitter, expires_at) > now:
        last = latest(trigger, last - timedelta(microseconds=1), slot)
    following = trigger.after(last)
    if expires_at is not None and following is not None and following > expires_at:
        following = None
    in_time = now - due_at(schedule, last, jitter, expires_at) <= grace
    over = expires_at is not None and now > expires_at
    if in_time or ((catch_up or isinstance(trigger, At)) and not over):
        return Due(last, slot if last > slot else None, following)
    return Due(None, slot, following)
