"""Firing: each slot once, what is in its way is said, and a run like any other comes of it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from chaz import completion, entries, firing, requeueing, schedules, sessionlog, steering, sweeps
from chaz.aside import Aside
from chaz.listings import RunFilter
from chaz.outcomes import RunOutcome
from chaz.runlistings import list_failed, list_runs
from chaz.runtime.context import conversation_of
from chaz.runtime.models import UserMessage
from chaz.testing import eventually_async
from tests.fixtures.listeners import Listeners
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.schedules import SOLO, Calendar
from tests.fixtures.stations import Stations

pytestmark = pytest.mark.anyio


async def test_a_slot_gives_a_run_in_a_session_of_its_own(calendar: Calendar, stations: Stations) -> None:
    await calendar.add(prompt="Report the secret plans.")
    slot = calendar.come_due()
    assert (await sweeps.due(stations.database)).schedules

    (fired,) = await calendar.fire()

    row = await calendar.row()
    assert fired.run_id == firing.run_id_of(row["key"], slot)
    assert fired.run_id is not None
    run = await stations.run(fired.run_id)
    assert (run["state"], run["cause"], run["agent"], run["trigger_position"]) == ("queued", "schedule", SOLO, None)
    assert run["prompt"] == "Report the secret plans."
    (session,) = await stations.fetch("select * from chaz.sessions")
    assert session["name"] == firing.session_name(SOLO, "daily", slot)
    assert session["id"] == entries.session_id(session["name"])
    assert session["schedule"] == row["key"]
    assert await stations.fetch("select agent, lead from chaz.attachments") == [{"agent": SOLO, "lead": True}]
    assert row["next_slot"] > slot + timedelta(minutes=59)
    assert (row["fire_count"], row["next_at"]) == (1, row["next_slot"])
    assert await calendar.fire() == []


async def test_the_run_is_told_its_prompt_last_and_nobody_else_is(calendar: Calendar, stations: Stations) -> None:
    first = await stations.claimed("s", "What is new?")
    await stations.end(first, "Nothing.")
    await calendar.add(prompt="Look again.", session="s")
    run = await calendar.fires()

    claim = await stations.claim(run)

    assert (claim.prompt, claim.cause) == ("Look again.", "schedule")
    conversation, triggers = await stations.transact(
        lambda tx: sessionlog.context_entries(
            tx, session_id=claim.session_id, run_id=claim.run_id, read_to=claim.read_to
        )
    )
    assert [entry.content for entry in conversation] == ["What is new?", "Nothing."]
    assert triggers == []
    told = sessionlog.private_entry(claim.session_id, claim.agent, "Look again.")
    assert conversation_of(SOLO, conversation, [told]).asked == (UserMessage(text="Look again."),)
    await stations.end(claim, "It has not changed.")
    assert [(type, text) for _, type, text in await stations.lines("s")][-2:] == [
        ("ack", ""),
        ("message", "It has not changed."),
    ]
    assert not [entry for entry in await stations.log("s") if "Look again." in entry.content]
    for listed in (list_runs, list_failed):
        assert all("prompt" not in row for row in await listed(stations.database, RunFilter()))


async def test_a_blank_answer_says_nothing(calendar: Calendar, stations: Stations) -> None:
    first = await stations.claimed("s")
    await stations.end(first)
    await calendar.add(session="s")
    claim = await stations.claim(await calendar.fires())
    await stations.end(claim, " \n")
    assert [type for _, type, _ in await stations.lines("s")][-1] == "ack"
    assert await stations.state(claim.run_id) == "succeeded"


# What is in its way


async def pinned(calendar: Calendar, stations: Stations) -> None:
    """A schedule pinned to the session ``s``, in which nobody is at work."""
    await stations.end(await stations.claimed("s"))
    await calendar.add(session="s")
    calendar.come_due()


async def skips(calendar: Calendar, word: str) -> None:
    (fired,) = await calendar.fire()
    assert (fired.run_id, fired.skipped) == (None, word)
    (told, *_) = await calendar.history()
    assert (told["skipped"], told["run_id"]) == (word, None)
    row = await calendar.row()
    assert (row["fire_count"], row["reason"], row["next_at"] is not None) == (0, None, True)


async def test_a_session_at_work_is_not_interrupted(calendar: Calendar, stations: Stations) -> None:
    await pinned(calendar, stations)
    claim = await stations.claimed("s")
    await skips(calendar, "busy")
    await stations.end(claim)
    assert await calendar.fires()


async def test_a_session_that_has_been_spoken_to_is_not_interrupted(calendar: Calendar, stations: Stations) -> None:
    await pinned(calendar, stations)
    await stations.say("s", "not placed yet")
    await skips(calendar, "busy")


async def test_what_is_to_come_much_later_is_no_conversation(calendar: Calendar, stations: Stations) -> None:
    await pinned(calendar, stations)
    await stations.say("s", "tomorrow", countdown=timedelta(days=1))
    await stations.place()
    (fired,) = await calendar.fire()
    assert fired.run_id is not None


async def test_a_head_that_somebody_holds_for_a_moment_is_waited_for(calendar: Calendar, stations: Stations) -> None:
    await pinned(calendar, stations)
    with stations.scratch.connect(autocommit=False) as other:
        other.execute("select from chaz.heads for update")
        assert await firing.fire_due(stations.database, grace=60, aside=Aside()) == ([], True)
        assert await calendar.history() == []
        other.rollback()
    (fired,) = await calendar.fire()
    assert fired.run_id is not None


async def test_an_agent_that_left_the_session_is_not_attached_again(calendar: Calendar, stations: Stations) -> None:
    await pinned(calendar, stations)
    stations.scratch.query("select chaz.detach('s', 'solo')")
    await skips(calendar, "detached")
    assert await stations.fetch("select from chaz.attachments") == []


async def test_a_session_that_is_gone(calendar: Calendar, stations: Stations) -> None:
    await pinned(calendar, stations)
    stations.scratch.query("delete from chaz.heads; delete from chaz.sessions")
    await skips(calendar, "no-session")
    assert await stations.fetch("select from chaz.sessions") == []


async def test_nothing_starts_of_what_is_paused(calendar: Calendar, stations: Stations) -> None:
    await calendar.add()
    calendar.come_due()
    stations.scratch.query("insert into chaz.pauses (kind, name, paused_by) values ('agent', 'solo', 'ada')")
    await skips(calendar, "paused")


async def test_missed_slots_are_skipped_or_stood_for_by_one(calendar: Calendar) -> None:
    await calendar.add("skips")
    await calendar.add("catches", catch_up="once")
    await calendar.add("once", at=datetime.now(UTC) + timedelta(days=1))
    for id in ("skips", "catches", "once"):
        calendar.come_due(id, ago=3 * 3600 + 1800)

    fired = await calendar.fire()

    assert sorted((one.id, one.skipped) for one in fired if one.skipped) == [("catches", "missed"), ("skips", "missed")]
    assert sorted(one.id for one in fired if one.run_id) == ["catches", "once"]
    assert (await calendar.row("skips"))["fire_count"] == 0
    assert (await calendar.row("once"))["reason"] == "over: no slot is left"
    assert await calendar.fire() == []


# Once


async def test_a_slot_that_has_fired_never_fires_again(calendar: Calendar, stations: Stations) -> None:
    await calendar.add()
    slot = calendar.come_due()
    assert len(await calendar.fire()) == 1
    stations.scratch.query("update chaz.schedules set next_slot = %(slot)s, next_at = %(slot)s", slot=slot)
    assert await calendar.fire() == []
    assert (await calendar.row())["fire_count"] == 1
    assert len(await stations.fetch("select from chaz.runs")) == 1


async def test_rounds_at_once_make_one_run_each(calendar: Calendar, stations: Stations) -> None:
    await stations.end(await stations.claimed("s"))
    for number in range(30):
        await calendar.add(f"n{number}", session="s" if number < 5 else None)
        calendar.come_due(f"n{number}")
    fired = [one for round in await asyncio.gather(*(calendar.fire() for _ in range(3))) for one in round]
    while True:
        more = await calendar.fire()
        if not more and not (await sweeps.due(stations.database)).schedules:
            break
        fired += more
    assert sorted(one.id for one in fired) == sorted(f"n{number}" for number in range(30))
    # Of those pinned to one session, the first to come has it.
    assert len([one for one in fired if one.run_id]) == 26
    assert [one.skipped for one in fired if one.skipped] == ["busy"] * 4


async def test_a_round_that_fails_half_way_leaves_nothing(
    calendar: Calendar, stations: Stations, monkeypatch: pytest.MonkeyPatch
) -> None:
    await calendar.add()
    slot = calendar.come_due()

    def broken(*_: object) -> None:
        raise RuntimeError("in the middle")

    with monkeypatch.context() as patched:
        patched.setattr(firing.schedules, "why_over", broken)
        assert await calendar.fire() == []
    for table in ("runs", "firings", "sessions"):
        assert stations.scratch.value(f"select count(*) from chaz.{table}") == 0  # pyright: ignore[reportArgumentType]
    (fired,) = await calendar.fire()
    assert (fired.slot, fired.run_id is not None) == (slot, True)


async def test_removed_and_added_again_at_once_in_every_listener(
    calendar: Calendar, stations: Stations, listeners: Listeners
) -> None:
    await calendar.add()
    started = [await listeners.start(long_poll=0.05) for _ in range(3)]
    await calendar.remove()
    for listener in started:
        await listener.until_naps(2)
    assert await stations.fetch("select from chaz.firings") == []
    await calendar.add()
    calendar.come_due()
    for listener in started:
        await listener.until_naps(3)
    published = [run for listener in started for run in listener.published]
    assert published == [one["run_id"] for one in await calendar.history()]
    assert len(published) == 1


# Limits


async def test_it_fires_so_often_and_until_it_expires(calendar: Calendar) -> None:
    await calendar.add(max_fires=2)
    await calendar.fires()
    await calendar.fires()
    assert (await calendar.row())["reason"] == "over: it has fired 2 times"
    await calendar.modify(max_fires=3)
    assert (await calendar.row())["next_at"] is not None

    await calendar.add("short", expires_at=datetime.now(UTC) + timedelta(minutes=90), every=3600)
    calendar.come_due("short")
    (fired,) = await calendar.fire()
    assert fired.run_id is not None
    assert (await calendar.row("short"))["next_at"] is not None
    await calendar.modify("short", expires_at=datetime.now(UTC) + timedelta(minutes=10))
    assert "over: it expires at" in (await calendar.row("short"))["reason"]
    soon = datetime.now(UTC) + timedelta(seconds=10)
    for id in ("a", "b", "c"):
        await calendar.add(id, at=soon, jitter=86_400, expires_at=soon + timedelta(seconds=1))
        row = await calendar.row(id)
        assert soon <= row["next_at"] <= row["expires_at"]


async def fails(calendar: Calendar, reason: str = "model") -> None:
    run = await calendar.fires()
    claim = await calendar.stations.claim(run)
    await calendar.stations.end(claim, "no answer", state="failed", reason=reason)


async def test_failures_in_a_row_disable_it_and_say_why(calendar: Calendar) -> None:
    await calendar.add(max_failures=2)
    await fails(calendar)
    claim = await calendar.stations.claim(await calendar.fires())
    await calendar.stations.end(claim)
    assert (await calendar.row())["failures"] == 0
    await fails(calendar)
    cancelled = await calendar.stations.claim(await calendar.fires())
    await calendar.stations.end(cancelled, state="cancelled", reason="requested")
    assert (await calendar.row())["enabled"]
    await fails(calendar)

    row = await calendar.row()

    assert (row["enabled"], row["next_at"], row["failures"]) == (False, None, 2)
    assert row["reason"] == "disabled: 2 failed in a row; the last: model: no answer"
    enabled = await calendar.modify(enabled=True)
    assert (enabled["failures"], enabled["reason"]) == (0, None)


async def test_the_history_says_what_came_of_each_slot(calendar: Calendar, stations: Stations) -> None:
    await calendar.add()
    claim = await stations.claim(await calendar.fires())
    await stations.step(claim)
    await stations.end(claim)
    await fails(calendar)
    calendar.come_due(ago=1000)
    await calendar.fire()
    by_hand = await calendar.fire_now()

    told = await calendar.history()

    assert [one["slot"] for one in told] == sorted((one["slot"] for one in told), reverse=True)
    states = {one["run_id"]: (one["state"], one["reason"]) for one in told if one["run_id"]}
    assert states[claim.run_id] == ("succeeded", None)
    assert states[by_hand.run_id] == ("queued", None)
    assert sorted(state for state, _ in states.values()) == ["failed", "queued", "succeeded"]
    assert [one["usage"]["prompt"] for one in told if one["run_id"] == claim.run_id] == [1]
    assert [one["fired_by"] for one in told if one["run_id"] == by_hand.run_id] == ["ada"]
    assert await calendar.skipped() == ["missed"]


async def test_by_hand_it_fires_whatever_its_trigger_says(calendar: Calendar) -> None:
    await calendar.add(session=None, max_fires=1)
    await calendar.modify(enabled=False)
    before = await calendar.row()
    assert (await calendar.fire_now()).run_id != (await calendar.fire_now()).run_id
    assert await calendar.row() == before


async def test_by_hand_while_somebody_pins_it_elsewhere(calendar: Calendar, stations: Stations) -> None:
    await calendar.add()
    await stations.end(await stations.claimed("s"))
    blocked = "select from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    with stations.scratch.connect(autocommit=False) as other:
        other.execute("update chaz.schedules set session_id = (select id from chaz.sessions)")
        firing = asyncio.create_task(calendar.fire_now())
        await eventually_async(lambda: stations.fetch(blocked))
        other.commit()
    fired = await firing
    assert fired.run_id is not None
    assert (await calendar.history())[0]["session"] == "s"


async def test_by_hand_its_failures_do_not_count(calendar: Calendar, stations: Stations) -> None:
    await calendar.add(max_failures=1)
    before = await calendar.row()
    run = (await calendar.fire_now()).run_id
    assert run is not None
    await stations.end(await stations.claim(run), "no answer", state="failed", reason="model")
    assert await calendar.row() == before


async def test_a_round_that_has_gone_on_for_long_leaves_the_rest_to_the_next(
    calendar: Calendar, stations: Stations
) -> None:
    for id in ("a", "b"):
        await calendar.add(id)
        calendar.come_due(id)
    fire = partial(firing.fire_due, stations.database, grace=60, aside=Aside(), within=-1)
    for _ in range(2):
        fired, left = await fire()
        assert (len(fired), left) == (1, True)
    assert await fire() == ([], False)


# A run like any other


async def test_a_message_waits_for_it_and_is_answered_by_its_own_run(calendar: Calendar, stations: Stations) -> None:
    stations.scratch.query("select chaz.configure_session('s', 'steer')")
    stations.scratch.query("select chaz.attach('s', 'solo')")
    await calendar.add(session="s")
    claim = await stations.claim(await calendar.fires())
    said = await stations.say("s", "and what about me?")
    await stations.place()

    assert not await stations.transact(lambda tx: steering.is_spoken_to(tx, claim, after=claim.read_to))
    await stations.end(claim, "")

    assert await stations.state(said) == "queued"
    answer = await stations.claim(said)
    assert answer.prompt is None


async def test_what_it_says_is_not_counted_and_wakes_nobody_beyond_the_burst(
    calendar: Calendar, stations: Stations
) -> None:
    def said() -> int:
        return stations.scratch.value("select agents_said from chaz.heads")

    stations.scratch.query("select chaz.configure_session('s', burst => 1)")
    for agent in ("solo", "parent"):
        stations.scratch.query("select chaz.attach('s', %(agent)s)", agent=agent)
    await calendar.add(session="s")
    claim = await stations.claim(await calendar.fires())
    await stations.end(claim, "@parent, look at this.")
    assert said() == 0
    (woken,) = await stations.fetch("select id from chaz.runs where agent = 'parent' and state = 'queued'")

    await stations.end(await stations.claim(woken["id"], "parent"), "I did.")
    assert said() == 1
    claim = await stations.claim(await calendar.fires())
    await stations.end(claim, "@parent, look again.")

    assert said() == 1
    assert await stations.fetch("select from chaz.runs where state in ('queued', 'pending')") == []
    (note,) = [entry for entry in await stations.log("s") if entry.type == "note"]
    assert note.metadata["reason"] == "burst"


async def test_it_is_requeued_with_its_prompt(calendar: Calendar, stations: Stations) -> None:
    await calendar.add(prompt="Look again.")
    claim = await stations.claim(await calendar.fires())
    await stations.end(claim, state="failed", reason="model")
    again = await stations.transact(lambda tx: requeueing.requeue(tx, claim.run_id))
    assert (await stations.claim(again)).prompt == "Look again."


async def test_its_children_and_its_tree_are_as_of_any(calendar: Calendar, stations: Stations) -> None:
    await calendar.add()
    claim = await stations.claim(await calendar.fires())
    await stations.step(claim)
    child = await stations.spawn(claim)
    await stations.place()
    row = await stations.run(child)
    assert (row["root_run_id"], row["depth"]) == (claim.run_id, 1)
    assert await stations.fetch("select root_run_id from chaz.tree_budgets") == [{"root_run_id": claim.run_id}]


async def test_a_listener_fires_and_publishes(
    calendar: Calendar, stations: Stations, listeners: Listeners, database: ScratchDatabase
) -> None:
    await calendar.add()
    calendar.come_due()
    listener = await listeners.start(ready=False)

    async def has_fired() -> bool:
        return bool(await calendar.history())

    await eventually_async(has_fired)
    (told,) = await calendar.history()
    await listener.until_published(told["run_id"])


async def test_a_slot_that_had_to_wait_was_not_missed(
    calendar: Calendar, stations: Stations, listeners: Listeners
) -> None:
    await stations.end(await stations.claimed("s"))
    await calendar.add(session="s")
    listener = await listeners.start(schedule_grace=2.0)
    passed = "select where clock_timestamp() > %(slot)s + interval '2.5 seconds'"
    with stations.scratch.connect(autocommit=False) as other:
        other.execute("select from chaz.heads for update")
        slot = calendar.come_due(ago=0)
        await eventually_async(lambda: stations.fetch(passed, slot=slot))
        other.rollback()

    async def has_fired() -> bool:
        return bool(await calendar.history())

    await eventually_async(has_fired)
    (told,) = await calendar.history()
    assert told["skipped"] is None
    await listener.until_published(told["run_id"])


async def test_a_listener_asleep_wakes_when_one_is_due_that_was_added_meanwhile(
    calendar: Calendar, listeners: Listeners
) -> None:
    # Its long poll is a minute.
    listener = await listeners.start()
    await calendar.add(every=1, max_fires=1)

    async def has_fired() -> bool:
        return bool(await calendar.history())

    await eventually_async(has_fired, within=20)
    (told,) = await calendar.history()
    await listener.until_published(told["run_id"])
    assert (await calendar.row())["reason"] == "over: it has fired once"


async def test_what_has_no_schedule_counts_for_none(stations: Stations) -> None:
    claim = await stations.claimed("s")
    run = await stations.run(claim.run_id)
    await stations.transact(lambda tx: schedules.settle(tx, run, RunOutcome(state="failed")))
    await stations.transact(lambda tx: completion.end_run(tx, claim, RunOutcome(state="failed", reason="model")))
