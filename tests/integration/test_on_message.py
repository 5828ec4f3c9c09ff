"""What a message does that comes while its session is busy: the policies, station by station."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from chaz import (
    Chaz,
    InvalidEntry,
    RunCancelled,
    RunFailed,
    UnknownSession,
    cancelling,
    interrupts,
    journal,
    sessionlog,
    steering,
    sweeps,
)
from chaz.aside import Aside
from chaz.entries import session_id
from chaz.errors import StaleAttempt
from chaz.runs import Claim
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations, a_call

pytestmark = pytest.mark.anyio


async def configure(stations: Stations, session: str, on_message: str) -> None:
    await stations.transact(
        lambda tx: sessionlog.configure(tx, session, on_message=on_message, tenant="", open_session=False)
    )


async def busy(stations: Stations, on_message: str, **fields: Any) -> Claim:
    """A session ``s`` of that policy, in which ``solo`` works on a directive."""
    await configure(stations, "s", on_message)
    return await stations.claimed("s", "work", **fields)


async def said(stations: Stations, text: str, **fields: Any) -> UUID:
    """A message that is sent and placed."""
    run = await stations.say("s", text, **fields)
    await stations.place()
    return run


async def interrupt(stations: Stations) -> list[UUID]:
    """What a listener does next; the runs that it interrupted."""
    return [run for run, _, _ in await interrupts.interrupt(stations.database, aside=Aside())]


async def hear(stations: Stations, claim: Claim, step: int, after: int | None = None) -> list[str]:
    """What a worker does between two steps; the texts that are new."""
    if not await stations.transact(partial(steering.is_spoken_to, claim=claim, after=claim.read_to)):
        return []
    heard = partial(steering.hear, claim=claim, step=step, after=claim.read_to if after is None else after)
    return [entry.content for entry in await stations.transact(heard)]


async def notes(stations: Stations) -> list[str]:
    return [entry.content for entry in await stations.log("s") if entry.type == "note"]


# Saying so


def test_a_session_is_made_with_its_policy(chaz: Chaz, database: ScratchDatabase) -> None:
    chaz.session("s").configure(on_message="steer")
    fresh = chaz.session()
    fresh.configure(on_message="each")
    assert {(row["id"], row["name"], row["on_message"]) for row in database.query("select * from chaz.sessions")} == {
        (session_id("s"), "s", "steer"),
        (fresh.id, None, "each"),
    }
    chaz.session(id=fresh.id).configure(on_message="reject")
    chaz.session("s").configure(on_message="coalesce")
    assert {row["on_message"] for row in database.query("select * from chaz.sessions")} == {"coalesce", "reject"}


def test_a_wrong_policy_and_an_unknown_session_are_refused(chaz: Chaz) -> None:
    with pytest.raises(InvalidEntry, match="on_message is coalesce, each, reject, interrupt or steer, not 'later'"):
        chaz.session("s").configure(on_message="later")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnknownSession):
        chaz.session(id=UUID(int=7)).configure(on_message="each")


async def test_a_transaction_that_makes_the_session_and_stays_open_holds_up_no_placing(
    stations: Stations, database: ScratchDatabase
) -> None:
    mine, other = await stations.say("s", recipient="solo"), await stations.say("t", recipient="solo")
    with database.connect() as producer:
        producer.execute("select chaz.configure_session('s', 'each')")
        assert (await stations.place()).entries == 1
        assert await stations.state(other) == "queued"
        producer.commit()
    assert (await stations.place()).entries == 1
    assert await stations.state(mine) == "queued"
    assert database.value("select on_message from chaz.sessions where name = 's'") == "each"


# each


async def test_each_message_has_a_run_of_its_own(stations: Stations) -> None:
    claim = await busy(stations, "each")
    asked: list[list[str]] = []
    for run in [await said(stations, text) for text in ("one", "two", "three")]:
        await stations.end(claim)
        claim = await stations.claim(run)
        context = partial(
            sessionlog.context_entries, session_id=claim.session_id, run_id=claim.run_id, read_to=claim.read_to
        )
        _, triggers = await stations.transact(context)
        asked.append([entry.content for entry in triggers])
    assert asked == [["one"], ["two"], ["three"]]


# reject


async def test_a_message_to_a_busy_session_is_refused(stations: Stations, chaz: Chaz) -> None:
    claim = await busy(stations, "reject")
    refused = await said(stations, "and?")
    row = await stations.run(refused)
    assert (row["state"], row["reason"]) == ("failed", "busy")
    with pytest.raises(RunFailed, match=f"the session is busy with run {claim.run_id} and refuses messages"):
        chaz.result(refused).get(timeout=5)
    last = (await stations.log("s"))[-1]
    assert (last.type, last.metadata["reason"], last.run_id) == ("error", "busy", refused)

    await stations.end(claim)
    accepted = await said(stations, "now?")
    assert await stations.state(accepted) == "queued"


async def test_of_messages_placed_together_the_first_is_taken(stations: Stations) -> None:
    await configure(stations, "s", "reject")
    first, second = [await stations.say("s", text, recipient="solo") for text in ("one", "two")]
    await stations.place()
    assert [await stations.state(run) for run in (first, second)] == ["queued", "failed"]


async def test_directives_and_what_is_to_come_later_wait_for_their_turn(stations: Stations) -> None:
    await busy(stations, "reject")
    directive = await stations.send("s", "more work")
    later = await stations.say("s", "later", countdown=timedelta(hours=1))
    await stations.place()
    assert [await stations.state(run) for run in (directive, later)] == ["pending", "pending"]


# interrupt


async def test_a_message_takes_the_place_of_the_run_at_work(stations: Stations, chaz: Chaz) -> None:
    claim = await busy(stations, "interrupt")
    await stations.step(claim, a_call("word_count"), a_call("word_count"), text="Let me count.")
    await stations.start_call(claim)
    await stations.finish_call(claim)
    await stations.start_call(claim, ordinal=1)
    waiting = await stations.send("s", "more work")
    message = await said(stations, "stop, count something else")
    assert await interrupt(stations) == [claim.run_id]
    assert await interrupt(stations) == []

    text = "Let me count.\n\n[interrupted by a newer message; calls made: 2 x word_count]"
    with pytest.raises(RunCancelled) as cancelled:
        chaz.result(claim.run_id).get(timeout=5)
    assert cancelled.value.args == (claim.run_id, "interrupted", text)
    *_, closing, note = await stations.log("s")
    assert (closing.type, closing.sender, closing.author, closing.content) == ("message", "solo", "agent", text)
    assert closing.metadata == {"interrupted": True, "by": str(message), "calls": ["word_count", "word_count"]}
    assert (note.type, note.metadata["entry"], note.metadata["reason"]) == ("note", str(message), "interrupted")
    # It goes before what waited already, and no call is left open.
    assert [await stations.state(run) for run in (message, waiting)] == ["queued", "pending"]
    assert {row["outcome"] for row in await stations.fetch("select outcome from chaz.calls")} == {"ok", "unknown"}
    with pytest.raises(StaleAttempt):
        await stations.step(claim, step=1)
    await stations.end(await stations.claim(message))
    assert await stations.state(waiting) == "queued"


@pytest.mark.parametrize("state", ["queued", "parked"])
async def test_what_holds_no_worker_is_interrupted_too(stations: Stations, state: str) -> None:
    await configure(stations, "s", "interrupt")
    if state == "parked":
        claim, _ = await stations.spawning("s")
        assert await stations.park(claim)
        run = claim.run_id
    else:
        run = await stations.send("s", "work")
        await stations.place()
    assert await stations.state(run) == state
    message = await said(stations, "stop", recipient="solo")
    assert await interrupt(stations) == [run]
    assert [await stations.state(one) for one in (run, message)] == ["cancelled", "queued"]


async def test_messages_that_come_before_the_run_has_begun_are_read_together(stations: Stations) -> None:
    await configure(stations, "s", "interrupt")
    first, second = [await stations.say("s", text, recipient="solo") for text in ("one", "no, two")]
    await stations.place()
    third = await said(stations, "three")
    assert await interrupt(stations) == []
    await stations.claim(first)
    assert [await stations.state(run) for run in (second, third)] == ["superseded", "superseded"]
    fourth = await said(stations, "four")
    assert await interrupt(stations) == [first]
    assert await stations.state(fourth) == "queued"


async def test_the_messages_of_others_wait_again(stations: Stations) -> None:
    await configure(stations, "s", "interrupt")
    mine, mine_too = [await stations.say("s", text, recipient="solo") for text in ("one", "two")]
    theirs = await stations.say("s", "three", recipient="solo", sender="bob")
    await stations.place()
    await stations.claim(mine)
    message = await said(stations, "stop")
    assert await interrupt(stations) == [mine]
    assert [await stations.state(run) for run in (mine, mine_too, theirs)] == ["cancelled", "superseded", "pending"]
    await stations.claim(message)
    assert (await stations.run(theirs))["superseded_by"] == message


async def test_a_run_that_ends_by_itself_is_not_interrupted(stations: Stations) -> None:
    claim = await busy(stations, "interrupt")
    earlier = await stations.send("s", "more work")
    message = await said(stations, "stop")
    await stations.end(claim, "done anyway")
    assert await interrupt(stations) == []
    assert [await stations.state(run) for run in (claim.run_id, message, earlier)] == ["succeeded", "queued", "pending"]


async def test_what_an_interrupted_run_had_spawned_is_cancelled(stations: Stations) -> None:
    await configure(stations, "s", "interrupt")
    claim, (child, finished) = await stations.spawning("s", children=2)
    below = await stations.claim(child, "child")
    await stations.step(below)
    grandchild = await stations.spawn(below)
    await stations.end(await stations.claim(finished, "child"))
    assert await stations.park(claim)
    message = await stations.say("s", "never mind")
    await stations.place()
    assert await interrupt(stations) == [claim.run_id]
    assert await stations.state(message) == "queued"

    while (await cancelling.walk(stations.database, aside=Aside())).settled:
        await stations.place()
    assert await stations.state(claim.run_id) == "cancelled"
    assert (await stations.run(claim.run_id))["reason"] == "interrupted"
    assert await stations.state(finished) == "succeeded"
    assert await stations.state(message) == "queued"
    for run, parent in ((child, claim.run_id), (grandchild, child)):
        ended = await stations.run(run)
        assert (ended["state"], ended["reason"]) == ("cancelled", "parent")
        text = f"with run {parent} that had spawned it: it was interrupted by a newer message"
        assert ended["result"] == f"cancelled by chaz, {text}"


async def test_a_parent_is_told_that_its_child_was_interrupted(stations: Stations, database: ScratchDatabase) -> None:
    parent, (child,) = await stations.spawning("p")
    await stations.claim(child, "child")
    (row,) = await stations.fetch("select session_id from chaz.runs where id = %(id)s", id=child)
    database.query("update chaz.sessions set on_message = 'interrupt' where id = %(id)s", id=row["session_id"])
    assert await stations.park(parent)
    await stations.say(str(row["session_id"]), "something else")
    await stations.place()
    assert await interrupt(stations) == [child]
    (wait,) = await stations.fetch("select answer from chaz.waits")
    assert wait["answer"]["kind"] == "cancelled"
    assert "agent child was cancelled (interrupted)" in wait["answer"]["content"]
    assert await stations.state(parent.run_id) == "queued"


async def interrupting(stations: Stations) -> bool:
    return (await sweeps.due(stations.database)).interrupting


async def test_a_message_that_is_to_be_taken_back_interrupts_nobody(stations: Stations, chaz: Chaz) -> None:
    claim = await busy(stations, "interrupt")
    message = await stations.say("s", "stop")
    chaz.cancel(message)
    await stations.place()
    assert not await interrupting(stations)
    assert await interrupt(stations) == []
    assert await stations.state(claim.run_id) == "running"
    # Nor does it stand in the way of the next.
    second = await said(stations, "stop, please")
    assert await interrupting(stations)
    assert await interrupt(stations) == [claim.run_id]
    assert (await stations.log("s"))[-1].metadata["entry"] == str(second)


@pytest.mark.parametrize("what", ["agent:solo", "session:s", "all"])
async def test_what_is_paused_interrupts_nobody_before_it_is_resumed(stations: Stations, chaz: Chaz, what: str) -> None:
    claim = await busy(stations, "interrupt")
    chaz.pause(what)
    message = await said(stations, "stop")
    assert not await interrupting(stations)
    assert await interrupt(stations) == []
    assert [await stations.state(run) for run in (claim.run_id, message)] == ["running", "pending"]
    chaz.resume(what)
    assert await interrupting(stations)
    assert await interrupt(stations) == [claim.run_id]
    assert [await stations.state(run) for run in (claim.run_id, message)] == ["cancelled", "queued"]


async def test_a_cancel_that_is_not_committed_holds_up_no_listener(
    stations: Stations, database: ScratchDatabase
) -> None:
    claim = await busy(stations, "interrupt")
    await said(stations, "stop")
    with database.connect() as mine:
        mine.execute("select chaz.cancel(%s, 'ada')", (claim.run_id,))
        assert await asyncio.wait_for(interrupt(stations), 4) == []
        assert await stations.state(claim.run_id) == "running"
        mine.rollback()
    assert await interrupt(stations) == [claim.run_id]


async def test_a_run_whose_message_is_taken_back_goes_on(stations: Stations) -> None:
    claim = await busy(stations, "interrupt")
    message = await said(stations, "stop")
    # A listener has just seen that the run is to be interrupted.
    assert await stations.close(message, "pending") is not None
    assert await stations.transact(partial(interrupts.interrupt_run, run_id=claim.run_id, by=message)) is None
    assert await interrupt(stations) == []
    assert await stations.state(claim.run_id) == "running"


async def test_the_first_message_is_the_one_that_interrupts(stations: Stations) -> None:
    claim = await busy(stations, "interrupt")
    first, second = await said(stations, "stop"), await said(stations, "at once")
    ((_, by, _),) = await interrupts.interrupt(stations.database, aside=Aside())
    assert by == first
    *_, closing, note = await stations.log("s")
    assert (closing.metadata["by"], note.metadata["entry"]) == (str(first), str(first))
    assert [await stations.state(run) for run in (claim.run_id, first, second)] == ["cancelled", "queued", "pending"]


async def test_a_session_that_is_at_work_is_interrupted_later(stations: Stations, database: ScratchDatabase) -> None:
    claim = await busy(stations, "interrupt")
    message = await said(stations, "stop")
    with database.connect() as held:
        held.execute("select from chaz.heads where session_id = %s for update", (claim.session_id,))
        # It does not wait for the lock: others' sessions are to be seen to.
        assert await stations.transact(partial(interrupts.interrupt_run, run_id=claim.run_id, by=message)) is None
    assert await interrupt(stations) == [claim.run_id]


async def test_one_that_cannot_be_interrupted_holds_up_no_other(stations: Stations, database: ScratchDatabase) -> None:
    claims = list[Claim]()
    for session in ("s", "t"):
        await configure(stations, session, "interrupt")
        claims.append(await stations.claimed(session, "work"))
        await stations.say(session, "stop")
    await stations.place()
    bad, good = claims
    database.query("alter table chaz.runs add constraint odd check (not (session_id = chaz.session_id('s') "
                   "and state = 'cancelled'))")  # fmt: skip
    aside = Aside()
    assert [run for run, _, _ in await interrupts.interrupt(stations.database, aside=aside)] == [good.run_id]
    # It is left for a while, and then tried again.
    while aside.put(bad.run_id) < 60:
        pass
    database.query("alter table chaz.runs drop constraint odd")
    assert await interrupts.interrupt(stations.database, aside=aside) == []
    assert await interrupt(stations) == [bad.run_id]


# steer


async def test_the_agent_at_work_hears_a_message_between_two_steps(stations: Stations) -> None:
    claim = await busy(stations, "steer")
    await stations.step(claim, a_call("word_count"))
    first, second = await said(stations, "one"), await said(stations, "two", sender="bob")
    directive = await stations.send("s", "more")
    await stations.place()
    assert await hear(stations, claim, 1) == ["one", "two"]
    assert await hear(stations, claim, 2) == []
    for run in (first, second):
        row = await stations.run(run)
        assert (row["state"], row["superseded_by"]) == ("superseded", claim.run_id)
    assert await stations.state(directive) == "pending"
    assert (await stations.run(claim.run_id))["read_to"] == 4
    assert await notes(stations) == ["'solo' hears 2 messages before its step 1"]


async def test_a_replay_hears_each_message_at_its_step(stations: Stations) -> None:
    claim = await busy(stations, "steer")
    await stations.step(claim, a_call("word_count"))
    await said(stations, "before one")
    assert await hear(stations, claim, 1) == ["before one"]
    await stations.step(claim, a_call("word_count"), step=1)
    await stations.step(claim, a_call("word_count"), step=2)
    await said(stations, "before three")
    read_to = (await stations.run(claim.run_id))["read_to"]
    assert await hear(stations, claim, 3, after=read_to) == ["before three"]
    # Its commit was in doubt: done again, it gives the same.
    again = partial(steering.hear, claim=claim, step=3, after=read_to)
    assert [entry.content for entry in await stations.transact(again)] == ["before three"]
    # And then its worker is lost, before the turn of step 3 is stored.
    steps, _ = await stations.transact(partial(journal.load, run_id=claim.run_id))
    seen = [stored.read_to for stored in steps]
    heard = await stations.transact(
        partial(steering.heard, run_id=claim.run_id, session_id=claim.session_id, after=seen[0])
    )
    by_step = steering.by_step(heard, seen)
    assert {step: [entry.content for entry in entries] for step, entries in by_step.items()} == {
        1: ["before one"],
        3: ["before three"],
    }


async def test_what_comes_after_the_last_boundary_is_the_next_run(stations: Stations) -> None:
    claim = await busy(stations, "steer")
    await stations.step(claim, text="done")
    message = await said(stations, "wait")
    await stations.end(claim)
    assert await stations.state(message) == "queued"


async def test_a_stale_worker_hears_nothing(stations: Stations) -> None:
    claim = await busy(stations, "steer")
    message = await said(stations, "one")
    await stations.give_back(claim)
    await stations.claim(claim.run_id)
    with pytest.raises(StaleAttempt):
        await hear(stations, claim, 1)
    assert await stations.state(message) == "pending"


async def test_a_message_that_is_to_be_taken_back_is_not_heard(stations: Stations, chaz: Chaz) -> None:
    await configure(stations, "s", "steer")
    claim = await stations.claim(await said(stations, "one", recipient="solo"))
    await stations.step(claim, a_call("word_count"))
    message = await said(stations, "two")
    chaz.cancel(message)
    assert await hear(stations, claim, 1) == []
    await said(stations, "three")
    assert await hear(stations, claim, 1) == ["three"]
    assert (await cancelling.walk(stations.database, aside=Aside())).settled == 1
    assert [await stations.state(run) for run in (claim.run_id, message)] == ["running", "cancelled"]


async def test_other_policies_steer_nobody(stations: Stations) -> None:
    claim = await busy(stations, "coalesce")
    message = await said(stations, "one")
    assert await hear(stations, claim, 1) == []
    assert await stations.state(message) == "pending"
    # Nor where the policy was another one a moment ago.
    heard = await stations.transact(partial(steering.hear, claim=claim, step=1, after=claim.read_to))
    assert heard == []
    assert await stations.state(message) == "pending"


async def test_what_is_for_another_agent_or_a_later_time_steers_nobody(stations: Stations) -> None:
    await stations.end(await stations.claimed("s", recipient="child"))
    claim = await busy(stations, "steer")
    others = await said(stations, "for child", recipient="child")
    later = await said(stations, "later", recipient="solo", countdown=timedelta(hours=1))
    assert not await stations.transact(partial(steering.is_spoken_to, claim=claim, after=claim.read_to))
    await said(stations, "now", recipient="solo")
    assert await hear(stations, claim, 1) == ["now"]
    assert [await stations.state(run) for run in (others, later)] == ["pending", "pending"]


async def test_what_was_sent_for_later_is_not_heard_by_who_has_read_past_it(stations: Stations) -> None:
    claim = await busy(stations, "steer")
    later = await said(stations, "later", recipient="solo", countdown=timedelta(hours=1))
    await said(stations, "now", recipient="solo")
    assert await hear(stations, claim, 1) == ["now"]
    read_to = (await stations.run(claim.run_id))["read_to"]
    stations.scratch.query("update chaz.runs set not_before = now() where id = %(id)s", id=later)

    assert not await stations.transact(partial(steering.is_spoken_to, claim=claim, after=read_to))
    assert await hear(stations, claim, 2, after=read_to) == []
    await stations.end(claim)
    assert await stations.state(later) == "queued"


async def test_what_is_taken_back_after_it_was_heard_is_heard_in_a_replay(stations: Stations, chaz: Chaz) -> None:
    claim = await busy(stations, "steer")
    await said(stations, "one", recipient="solo")
    message = await said(stations, "two", sender="bob", recipient="solo")
    assert await hear(stations, claim, 1) == ["one", "two"]
    chaz.cancel(message)
    await cancelling.walk(stations.database, aside=Aside())
    assert await stations.state(message) == "cancelled"

    heard = partial(steering.heard, run_id=claim.run_id, session_id=claim.session_id, after=claim.read_to)
    assert [entry.content for entry in await stations.transact(heard)] == ["one", "two"]
