"""The store of schedules: what is added, changed, retired, and declared by agents' definitions."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from chaz import AsyncChaz, Chaz, Schedule
from chaz.database import Transaction
from chaz.errors import InvalidSchedule, UnknownAgent, UnknownSchedule, UnknownSession
from chaz.planning import Ceilings
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.schedules import SOLO, Calendar
from tests.fixtures.stations import Stations

pytestmark = pytest.mark.anyio

HOURLY = Schedule("daily", "Report.", every=3600)
PAST = datetime(2020, 1, 1, tzinfo=UTC)


async def test_one_that_is_added_has_its_next_time(calendar: Calendar) -> None:
    every = await calendar.add(every=3600)
    cron = await calendar.add("cron", cron="0 9 * * *", time_zone="Europe/Berlin")
    jittered = await calendar.add("jittered", every=3600, jitter=600)

    assert every["next_at"] == every["next_slot"] == every["anchor"] + timedelta(hours=1)
    assert cron["next_at"].minute == 0
    assert cron["next_at"] > cron["created_at"]
    assert jittered["next_slot"] < jittered["next_at"] < jittered["next_slot"] + timedelta(minutes=10)


async def test_what_cannot_be_added(calendar: Calendar, stations: Stations) -> None:
    await calendar.add()
    with pytest.raises(InvalidSchedule, match="id: agent 'solo' has a schedule 'daily' already"):
        await calendar.add()
    with pytest.raises(InvalidSchedule, match="at: 2020-01-01T00:00:00"):
        await calendar.add("past", at=PAST)
    with pytest.raises(UnknownSession):
        await calendar.add("pinned", session="nowhere")
    await stations.send("theirs", recipient="parent")
    await stations.place()
    with pytest.raises(InvalidSchedule, match="session: agent 'solo' is not attached to 'theirs'"):
        await calendar.add("pinned", session="theirs")


async def test_ceilings_and_unknown_agents_from_python(database: ScratchDatabase, stations: Stations) -> None:
    with Chaz(database.url) as chaz:
        with pytest.raises(InvalidSchedule, match="CHAZ_SHORTEST_SCHEDULE"):
            chaz.agent(SOLO).schedules.add(Schedule("a", "x", every=10))
        with pytest.raises(UnknownAgent):
            chaz.agent("nobody").schedules.add(HOURLY)
    few = chaz.settings.model_copy(update={"max_schedules": 2})
    with Chaz(settings=few) as chaz:
        for id in "ab":
            chaz.agent(SOLO).schedules.add(Schedule(id, "x", every=60))
        with pytest.raises(InvalidSchedule, match=r"may have 2 \(CHAZ_MAX_SCHEDULES\)"):
            chaz.agent(SOLO).schedules.add(Schedule("c", "x", every=60))
        chaz.agent(SOLO).schedules.remove("a")
        chaz.agent(SOLO).schedules.add(Schedule("c", "x", every=60))


async def test_from_async_python(database: ScratchDatabase, stations: Stations) -> None:
    async with AsyncChaz(database.url) as chaz:
        mine = chaz.agent(SOLO).schedules
        added = await mine.add(Schedule("daily", "Report.", cron="0 9 * * *", jitter=60), by="ada")
        assert (added["cron"], added["jitter"], added["created_by"], added["declared"]) == (
            "0 9 * * *",
            60,
            "ada",
            False,
        )
        changed = await mine.modify("daily", every=3600, cron=None)
        assert (changed["cron"], changed["every"]) == (None, 3600)
        fired = await mine.fire("daily", by="ada")
        assert fired.run_id is not None
        assert [one["run_id"] for one in await mine.history("daily")] == [fired.run_id]
        assert [one["id"] for one in await mine.list()] == [one["id"] for one in await chaz.schedules()] == ["daily"]
        await mine.remove("daily")
        assert await mine.list() == []
        assert [one["retired_by"] is not None for one in await mine.list(retired=True)] == [True]
        for unknown in (
            mine.modify("daily", enabled=True),
            mine.remove("daily"),
            mine.fire("daily"),
            mine.history("x"),
        ):
            with pytest.raises(UnknownSchedule):
                await unknown


async def test_a_change_holds_from_now_on(calendar: Calendar) -> None:
    before = await calendar.add(every=3600)
    assert (await calendar.modify(prompt="Other."))["next_slot"] == before["next_slot"]
    slower = await calendar.modify(every=7200)
    assert slower["next_slot"] == slower["anchor"] + timedelta(hours=2)
    assert slower["anchor"] > before["anchor"]
    with pytest.raises(InvalidSchedule, match="max_fires"):
        await calendar.modify(max_fires=0)
    with pytest.raises(InvalidSchedule, match="at: 2020"):
        await calendar.modify(at=PAST)


async def test_what_is_due_at_the_moment_of_a_change_still_fires(calendar: Calendar) -> None:
    await calendar.add()
    slot = calendar.come_due()
    assert (await calendar.modify(prompt="Other."))["next_slot"] == slot
    (fired,) = await calendar.fire()
    assert (fired.slot, fired.run_id is not None) == (slot, True)


async def test_what_is_disabled_has_a_reason_instead_of_a_time(calendar: Calendar) -> None:
    await calendar.add()
    calendar.come_due()
    disabled = await calendar.modify(enabled=False)
    assert (disabled["next_at"], disabled["reason"]) == (None, "disabled by ada")
    assert await calendar.fire() == []
    enabled = await calendar.modify(enabled=True)
    assert (enabled["reason"], enabled["next_at"] > enabled["changed_at"]) == (None, True)


async def test_an_agent_brings_back_nothing_that_people_took_away(calendar: Calendar) -> None:
    await calendar.add()
    await calendar.modify(enabled=False)
    with pytest.raises(InvalidSchedule, match="enabled: it was disabled by ada"):
        await calendar.modify(enabled=True, own=True, by="agent solo")
    await calendar.modify(prompt="Other.", own=True, by="agent solo")
    assert (await calendar.row())["reason"] == "disabled by ada"
    await calendar.remove()
    with pytest.raises(InvalidSchedule, match="id: 'daily' was removed by ada"):
        await calendar.add(own=True, by="agent solo")
    # People may. What they disable after the agent is no longer its own to enable.
    await calendar.add()
    await calendar.modify(enabled=False, own=True, by="agent solo")
    await calendar.modify(enabled=True, own=True, by="agent solo")
    await calendar.modify(enabled=False, own=True, by="agent solo")
    await calendar.modify(enabled=False)
    await calendar.modify(enabled=False, own=True, by="agent solo")
    assert (await calendar.row())["reason"] == "disabled by ada"


# Declared by an agent's definition


async def test_a_restart_changes_nothing(calendar: Calendar) -> None:
    once = Schedule("once", "Now.", at=datetime.now(UTC) + timedelta(hours=1))
    await calendar.declare(HOURLY, once)
    calendar.come_due("once")
    assert len(await calendar.fire()) == 1
    before = [await calendar.row(), await calendar.row("once")]

    await calendar.declare(HOURLY, once)

    assert [await calendar.row(), await calendar.row("once")] == before
    assert before[1]["reason"] == "over: no slot is left"
    assert await calendar.fire() == []


async def test_a_changed_definition_holds_and_one_that_is_gone_is_retired(calendar: Calendar) -> None:
    await calendar.add("theirs")
    await calendar.declare(HOURLY)
    await calendar.declare(Schedule("daily", "Report more.", every=7200))
    row = await calendar.row()
    assert (row["prompt"], row["every"]) == ("Report more.", timedelta(hours=2))
    calendar.come_due()

    await calendar.declare()

    row = await calendar.row()
    assert (row["retired_by"], row["next_at"], row["reason"]) == ("its definition", None, "removed by its definition")
    assert await calendar.fire() == []
    assert (await calendar.row("theirs"))["retired_at"] is None
    await calendar.declare(HOURLY)
    row = await calendar.row()
    assert (row["retired_at"], row["reason"], row["next_at"] > row["changed_at"]) == (None, None, True)


async def test_what_people_disabled_retired_or_changed_stays_so(calendar: Calendar) -> None:
    other = Schedule("other", "Other.", every=3600)
    third = Schedule("third", "Third.", every=3600)
    await calendar.declare(HOURLY, other, third)
    await calendar.modify(enabled=False)
    await calendar.remove("other")
    await calendar.modify("third", prompt="As ada says.")

    await calendar.declare(HOURLY, other, third)
    assert (await calendar.row("third"))["prompt"] == "As ada says."
    await calendar.declare(*(Schedule(id, "Changed.", every=60) for id in ("daily", "other")))
    await calendar.declare(HOURLY, other, third)

    assert (await calendar.row())["reason"] == "disabled by ada"
    assert (await calendar.row("other"))["retired_by"] == "ada"
    assert (await calendar.row("third"))["enabled"]


async def test_a_definition_disables_and_enables_its_own(calendar: Calendar) -> None:
    off = Schedule("daily", "Report.", every=3600, enabled=False)
    await calendar.declare(off)
    assert (await calendar.row())["reason"] == "disabled by its definition"
    await calendar.declare(HOURLY)
    assert (await calendar.row())["reason"] is None
    await calendar.declare(off)
    await calendar.modify(enabled=True)
    await calendar.declare(off)
    assert (await calendar.row())["enabled"]


async def test_what_was_added_anew_by_people_is_not_the_definitions(calendar: Calendar) -> None:
    await calendar.declare(HOURLY)
    await calendar.remove()
    await calendar.add()
    await calendar.declare()
    assert (await calendar.row())["retired_at"] is None


async def test_a_definition_beyond_the_ceilings_is_refused(calendar: Calendar) -> None:
    with pytest.raises(InvalidSchedule, match="schedule 'daily' of agent 'solo': every: it is due every 3600 s"):
        await calendar.declare(HOURLY, ceilings=Ceilings(shortest=timedelta(days=1)))
    with pytest.raises(InvalidSchedule, match="agent 'solo' would have 1 schedules, and may have 0"):
        await calendar.declare(HOURLY, ceilings=Ceilings(most=0))


async def test_a_worker_starts_whatever_others_have_added(calendar: Calendar) -> None:
    for id in ("a", "b", "c"):
        await calendar.add(id)
    await calendar.declare(ceilings=Ceilings(most=1))
    await calendar.declare(HOURLY, ceilings=Ceilings(most=1))
    assert (await calendar.row())["reason"] is None


async def test_one_declared_for_a_time_that_has_passed_never_fires(calendar: Calendar) -> None:
    await calendar.declare(Schedule("past", "Late.", at=PAST))
    assert (await calendar.row("past"))["reason"] == "over: no slot is left"
    assert await calendar.fire() == []


async def test_several_workers_that_start_at_once_declare_it_once(calendar: Calendar, stations: Stations) -> None:
    await asyncio.gather(*(calendar.declare(HOURLY) for _ in range(5)))
    assert len(await stations.fetch("select from chaz.schedules")) == 1


async def test_a_schedule_that_nobody_can_read_the_zone_of_is_set_aside(calendar: Calendar, stations: Stations) -> None:
    async def spoil(tx: Transaction) -> None:
        await tx.execute("update chaz.schedules set cron = '0 9 * * *', every = null, time_zone = 'Mars/Olympus'")

    await calendar.add("bad")
    await stations.transact(spoil)
    await calendar.add()
    calendar.come_due("bad")
    assert await calendar.fires()
    with pytest.raises(InvalidSchedule, match="time_zone: there is no time zone 'Mars/Olympus'"):
        await calendar.modify("bad", prompt="Report now.")
    assert (await calendar.modify("bad", time_zone="UTC"))["time_zone"] == "UTC"
