"""What belongs to an agent, for programs: its schedules.

:class:`AsyncSchedules` is the source; :class:`Schedules` is the same for code that is not async.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

from chaz import firing, schedules
from chaz.database import Database, Transaction
from chaz.firing import Fired
from chaz.loops import loop_thread
from chaz.planning import Schedule, ScheduleChanges
from chaz.settings import Settings


class AsyncSchedules:
    """The schedules of an agent.

    A schedule is shown as a dictionary: the fields of :class:`chaz.Schedule` (``every`` and ``jitter`` in seconds,
    ``session`` by name with its ``session_id``), ``agent``, ``next_at`` or the ``reason`` why it is due no more,
    ``fire_count``, ``failures`` (in a row), ``declared``, and who made, changed or retired it, and when. ``by`` says
    who does something, by default the program's user.
    """

    def __init__(self, database: Database, settings: Settings, agent: str) -> None:
        self._database = database
        self._settings = settings
        self._agent = agent

    async def list(self, *, retired: bool = False) -> list[dict[str, Any]]:
        """All of them by id, the ``retired`` ones too if so asked."""
        tenant = self._settings.tenant
        return await schedules.listed(self._database, tenant=tenant, agent=self._agent, retired=retired)

    async def add(self, schedule: Schedule, *, by: str | None = None) -> dict[str, Any]:
        """Add one, and show it. Raises InvalidSchedule (the field named), UnknownAgent, UnknownSession."""
        add = partial(
            schedules.add,
            agent=self._agent,
            schedule=schedule,
            tenant=self._settings.tenant,
            by=_who(by),
            ceilings=self._settings.ceilings,
        )

        async def work(tx: Transaction) -> dict[str, Any]:
            await add(tx)
            return await schedules.shown(tx, self._settings.tenant, self._agent, schedule.id)

        return await self._database.transact(work)

    async def modify(self, id: str, *, by: str | None = None, **changes: Unpack[ScheduleChanges]) -> dict[str, Any]:
        """Change what is named, from now on, and show it. Enabled, it forgets its failures.

        Raises UnknownSchedule, InvalidSchedule, UnknownSession.
        """
        modify = partial(
            schedules.modify,
            agent=self._agent,
            id=id,
            changes=changes,
            tenant=self._settings.tenant,
            by=_who(by),
            ceilings=self._settings.ceilings,
        )

        async def work(tx: Transaction) -> dict[str, Any]:
            await modify(tx)
            return await schedules.shown(tx, self._settings.tenant, self._agent, id)

        return await self._database.transact(work)

    async def remove(self, id: str, *, by: str | None = None) -> None:
        """Retire one: it fires no more, and its history stays. Raises UnknownSchedule."""
        remove = partial(schedules.remove, agent=self._agent, id=id, tenant=self._settings.tenant, by=_who(by))
        await self._database.transact(remove)

    async def fire(self, id: str, *, by: str | None = None) -> Fired:
        """Fire one now, whatever its trigger says, and also if it is disabled; a session that is busy skips it.

        It counts for none of its limits. Raises UnknownSchedule.
        """
        fire = partial(firing.fire_now, agent=self._agent, id=id, tenant=self._settings.tenant, by=_who(by))
        while (fired := await self._database.transact(fire)) is None:
            pass
        return fired

    async def history(self, id: str, *, limit: int = 50) -> list[dict[str, Any]]:
        """What came of its slots, the latest first: see :func:`chaz.schedules.history`. Raises UnknownSchedule."""
        return await schedules.history(self._database, self._agent, id, tenant=self._settings.tenant, limit=limit)


class AsyncOwner:
    """An agent, as the owner of what belongs to it."""

    def __init__(self, database: Database, settings: Settings, name: str) -> None:
        self.name = name
        self.schedules = AsyncSchedules(database, settings, name)


class Schedules:
    """The schedules of an agent: see :class:`AsyncSchedules`, whose methods are the same."""

    def __init__(self, source: Callable[[], AsyncSchedules]) -> None:
        self._source = source

    def list(self, *, retired: bool = False) -> list[dict[str, Any]]:
        """All of them by id, the ``retired`` ones too if so asked."""
        return loop_thread().run(self._source().list(retired=retired))

    def add(self, schedule: Schedule, *, by: str | None = None) -> dict[str, Any]:
        """Add one, and show it. Raises as :meth:`AsyncSchedules.add`."""
        return loop_thread().run(self._source().add(schedule, by=by))

    def modify(self, id: str, *, by: str | None = None, **changes: Unpack[ScheduleChanges]) -> dict[str, Any]:
        """Change what is named, and show it. Raises as :meth:`AsyncSchedules.modify`."""
        return loop_thread().run(self._source().modify(id, by=by, **changes))

    def remove(self, id: str, *, by: str | None = None) -> None:
        """Retire one. Raises UnknownSchedule."""
        loop_thread().run(self._source().remove(id, by=by))

    def fire(self, id: str, *, by: str | None = None) -> Fired:
        """Fire one now. As :meth:`AsyncSchedules.fire`."""
        return loop_thread().run(self._source().fire(id, by=by))

    def history(self, id: str, *, limit: int = 50) -> list[dict[str, Any]]:
        """What came of its slots, the latest first. Raises UnknownSchedule."""
        return loop_thread().run(self._source().history(id, limit=limit))


class Owner:
    """An agent, as the owner of what belongs to it."""

    def __init__(self, source: Callable[[], AsyncOwner]) -> None:
        self._source = source

    @property
    def name(self) -> str:
        """The agent's name."""
        return self._source().name

    @property
    def schedules(self) -> Schedules:
        """Its schedules."""
        return Schedules(lambda: self._source().schedules)


def _who(by: str | None) -> str:
    return by or os.environ.get("USER") or "program"
