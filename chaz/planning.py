"""A schedule as it is asked for: by an agent's definition, by people and programs, by an agent itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import NoneType
from typing import Any, Literal, TypedDict, cast
from uuid import UUID

from chaz.entries import MAX_TIMEOUT, safe_text
from chaz.errors import InvalidSchedule
from chaz.triggers import At, Cron, Every, Trigger, instant_of, zone_of

CatchUp = Literal["skip", "once"]

MAX_PROMPT = 100_000
MAX_COUNT = 2**31
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,49}")
_LONGEST = timedelta(seconds=MAX_TIMEOUT)
_TRIGGERS = ("cron", "every", "at")
_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("id", "prompt", "time_zone", "catch_up"), (str,)),
    "cron": (str, NoneType),
    "every": (int, float, timedelta, NoneType),
    "at": (datetime, NoneType),
    "session": (str, UUID, NoneType),
    "enabled": (bool,),
    "expires_at": (datetime, NoneType),
    "max_fires": (int, NoneType),
    "max_failures": (int, NoneType),
    "jitter": (int, float, timedelta),
}


class ScheduleChanges(TypedDict, total=False):
    """What may be said of a schedule besides its id. Times without a zone are in ``time_zone``."""

    prompt: str
    cron: str | None
    time_zone: str
    every: float | timedelta | None
    at: datetime | None
    session: str | UUID | None
    enabled: bool
    expires_at: datetime | None
    max_fires: int | None
    max_failures: int | None
    jitter: float | timedelta
    catch_up: CatchUp


@dataclass(frozen=True)
class Schedule:
    """When an agent wakes by itself, and what it is told then: ``Schedule("daily", "…", cron="0 9 * * *")``.

    Exactly one of ``cron``, ``every`` and ``at`` says when. Raises InvalidSchedule, naming the field.
    """

    id: str
    """What it is called, of its agent's."""
    prompt: str
    """The run's input, and no entry of any session."""
    cron: str | None = None
    """Minute, hour, day of month, month, day of week."""
    time_zone: str = "UTC"
    """Of ``cron``, and of times that have none."""
    every: float | timedelta | None = None
    """Seconds between two firings."""
    at: datetime | None = None
    """Once."""
    session: str | UUID | None = None
    """The name or id of the session that it is pinned to; None: each firing opens a session of its own."""
    enabled: bool = True
    expires_at: datetime | None = None
    """Nothing fires after it."""
    max_fires: int | None = None
    max_failures: int | None = None
    """So many failed runs in a row disable it."""
    jitter: float | timedelta = 0.0
    """Seconds by which a firing may be late, so that not all come at once."""
    catch_up: CatchUp = "skip"
    """What is done about slots that passed while no listener ran: nothing, or one firing for all of them."""
    trigger: Trigger = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            self._is_one_of(name, kinds)
        self._require("id", _ID.fullmatch(self.id), "has 1 to 50 letters, digits, '_', '.' or '-', the first no sign")
        self._require("prompt", self.prompt.strip(), "must not be empty", "")
        self._require("prompt", len(self.prompt) <= MAX_PROMPT, f"has {MAX_PROMPT} characters at most", "")
        object.__setattr__(self, "prompt", safe_text(self.prompt))
        if isinstance(self.session, str):
            self._require("session", safe_text(self.session) == self.session, "is a name or an id of a session")
        given = [name for name in _TRIGGERS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise InvalidSchedule(given[-1] if given else "cron", f"give one of cron, every and at, not {found}")
        for name in ("max_fires", "max_failures"):
            value = getattr(self, name)
            self._require(name, value is None or 0 < value < MAX_COUNT, "is a whole number from 1 on, or nothing")
        self._require("catch_up", self.catch_up in ("skip", "once"), "is skip or once")
        zone = zone_of(self.time_zone)
        for name in ("at", "expires_at"):
            if (value := getattr(self, name)) is not None:
                # First as it is written: of the first and last years, no other zone has all times.
                self._require(name, 1900 <= value.year <= 9900, "lies between the years 1900 and 9900")
                aware = instant_of(value, zone) if value.tzinfo is None else value.astimezone(UTC)
                object.__setattr__(self, name, aware)
        for name in ("every", "jitter"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, self._length(name, value))
        if self.every is not None:
            self._require("every", self.interval, "is more than no time")
            self._require("jitter", self.spread < self.interval, "is less than every")
        object.__setattr__(self, "trigger", self.trigger_from(datetime.now(UTC)))

    def _is_one_of(self, name: str, kinds: tuple[type, ...]) -> None:
        value = cast("object", getattr(self, name))
        # A bool is an int to Python, and no count or time to anybody.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            words = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
            raise InvalidSchedule(name, f"it is a {words}; it is {value!r:.100}")

    def _require(self, name: str, fulfilled: object, rule: str, shown: str = "it is {value!r:.100}") -> None:
        if not fulfilled:
            value = shown.format(value=getattr(self, name))
            raise InvalidSchedule(name, f"it {rule}; {value}" if value else f"it {rule}")

    def _length(self, name: str, value: float | timedelta) -> timedelta:
        try:
            length = value if isinstance(value, timedelta) else timedelta(seconds=value)
        except (OverflowError, ValueError):
            length = timedelta(-1)
        self._require(name, timedelta(0) <= length <= _LONGEST, "is a time in seconds, of ten years at most")
        return length

    @property
    def interval(self) -> timedelta:
        """``every``, as it was checked."""
        assert isinstance(self.every, timedelta)
        return self.every

    @property
    def spread(self) -> timedelta:
        """``jitter``, as it was checked."""
        assert isinstance(self.jitter, timedelta)
        return self.jitter

    def trigger_from(self, anchor: datetime) -> Trigger:
        """Its trigger; an interval is counted from ``anchor``."""
        if self.cron is not None:
            return Cron(self.cron, self.time_zone)
        return At(self.at) if self.at is not None else Every(self.interval, anchor)

    def changed(self, changes: Mapping[str, Any]) -> Schedule:
        """The same with these changes; a trigger takes the place of the other. Raises InvalidSchedule."""
        return changed(self.fields(), changes)

    def fields(self) -> dict[str, Any]:
        """All that it says, by name."""
        return {name: value for name, value in self.__dict__.items() if name != "trigger"}

    def plain(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return {
            name: value.total_seconds()
            if isinstance(value, timedelta)
            else value.isoformat()
            if isinstance(value, datetime)
            else str(value)
            if isinstance(value, UUID)
            else value
            for name, value in self.fields().items()
        }


def changed(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> Schedule:
    """The schedule of these fields with these changes; a trigger takes the place of the other. Raises InvalidSchedule.

    The fields need be no schedule by themselves: what is wrong with them may be what is changed.
    """
    known = ScheduleChanges.__annotations__
    for name in changes:
        if name not in known:
            raise InvalidSchedule(name, f"a schedule has no such field; it has {', '.join(known)}")
    others: dict[str, Any] = {}
    if any(changes.get(name) is not None for name in _TRIGGERS):
        others = dict.fromkeys(_TRIGGERS)
    return Schedule(**{**fields, **others, **changes})


@dataclass(frozen=True)
class Ceilings:
    """What a deployment allows of schedules."""

    most: int = 100
    """Of one agent."""
    shortest: timedelta = timedelta(minutes=1)
    """Between two firings of one."""
    of_others: bool = False
    """Whether agents' tools may touch the schedules of other agents."""

    def check_count(self, agent: str, count: int) -> None:
        """Raises InvalidSchedule for more of one agent than it may have."""
        if count > self.most:
            raise InvalidSchedule(
                "id",
                f"agent {agent!r} would have {count} schedules, and may have {self.most} (CHAZ_MAX_SCHEDULES)",
            )

    def check(self, schedule: Schedule) -> None:
        """Raises InvalidSchedule, naming the field, for one that is due too often, or later than the next one."""
        found = schedule.trigger.shortest()
        if schedule.spread >= found:
            raise InvalidSchedule(
                "jitter", f"it is less than the {found.total_seconds():g} s between two slots; it is {schedule.jitter}"
            )
        if found < self.shortest:
            name = "cron" if schedule.cron is not None else "every"
            raise InvalidSchedule(
                name,
                f"it is due every {found.total_seconds():g} s; here the shortest is "
                f"{self.shortest.total_seconds():g} s (CHAZ_SHORTEST_SCHEDULE)",
            )


@dataclass(frozen=True)
class ScheduleCall:
    """What an agent's call asks for about schedules."""

    verb: Literal["add", "modify", "remove", "list"]
    agent: str
    """Whose."""
    schedule: Schedule | None = None
    """To be added."""
    id: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
