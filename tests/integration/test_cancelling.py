"""Cancelling: the request, and the listener's walk down the tree, one run per transaction."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from chaz import AsyncAgentResult, AsyncChaz, Chaz, cancelling, completion, sweeps
from chaz.aborting import AbortEar
from chaz.aside import Aside
from chaz.channels import ABORT
from chaz.database import Database, Transaction
from chaz.errors import DatabaseUnavailable, InvalidEntry, RunCancelled, StaleAttempt, UnknownRun
from chaz.outcomes import RunOutcome
from chaz.runs import Unclaimed
from chaz.testing import eventually_async
from tests.fixtures.broker import Broker
from tests.fixtures.listeners import Listeners
from tests.fixtures.postgres import ScratchDatabase, both_servers
from tests.fixtures.stations import Stations, a_call

pytestmark = pytest.mark.anyio


async def cancel(stations: Stations, run: UUID, by: str = "ada", reason: str = "") -> bool:
    return await stations.transact(lambda tx: cancelling.request(tx, run, by=by, reason=reason))


async def walk(stations: Stations) -> list[UUID]:
    """What a listener does, round by round, while there is something to be done; the runs it ended, in order."""
    aside, ended = Aside(), list[UUID]()
    while (await sweeps.due(stations.database)).cancel:
        walked = await cancelling.walk(stations.database, aside=aside)
        ended += [run.run_id for run in walked.ended]
        if not walked.settled:
            break
    return ended


def aside_for_long(run: UUID) -> Aside:
    """One in which the run stays for longer than a test takes."""
    aside = Aside()
    while aside.put(run) < 60:
        pass
    return aside


async def in_state(stations: Stations, state: str) -> UUID:
    """A run in the state, in the session ``s``."""
    match state:
        case "pending":
            await stations.claimed("s")
            run = await stations.send("s")
            await stations.place()
        case "queued":
            run = await stations.send("s")
            await stations.place()
        case "running":
            run = (await stations.claimed("s")).run_id
        case _:
            claim, _ = await stations.spawning("s")
            await stations.park(claim)
            run = claim.run_id
    assert await stations.state(run) == state
    return run


@both_servers
@pytest.mark.parametrize("state", ["pending", "queued", "running", "parked"])
async def test_a_run_is_cancelled_wherever_it_is(stations: Stations, state: str) -> None:
    run = await in_state(stations, state)
    assert await cancel(stations, run, reason="enough")

    assert (await walk(stations))[0] == run

    row = await stations.run(run)
    assert (row["state"], row["reason"], row["result"]) == ("cancelled", "requested", "cancelled by ada: enough")
    (error,) = [entry for entry in await stations.log("s") if entry.type == "error"]
    assert (error.content, error.run_id) == ("cancelled by ada: enough", run)
    who = {"cancelled_by": "ada", "cancel_reason": "enough"}
    assert error.metadata == {"state": "cancelled", "reason": "requested", "agent": row["agent"], **who}
    assert await stations.try_to_claim(run, row["agent"]) == Unclaimed("cancelled")
    assert not (await sweeps.due(stations.database)).cancel


async def test_the_session_is_usable_at_once(stations: Stations) -> None:
    claim = await stations.claimed("s")
    following = await stations.send("s")
    await stations.place()
    await cancel(stations, claim.run_id)
    await walk(stations)
    assert await stations.state(following) == "queued"
    assert (await stations.claim(following)).attempt == 1


async def test_its_worker_can_write_nothing_any_more(stations: Stations) -> None:
    claim = await stations.claimed("s")
    await stations.step(claim, a_call("word_count"))
    await stations.start_call(claim)
    await cancel(stations, claim.run_id)
    await walk(stations)
    with pytest.raises(StaleAttempt):
        await stations.finish_call(claim)
    with pytest.raises(StaleAttempt):
        await stations.end(claim)
    # The call is closed all the same, so that the log stays whole.
    (call,) = await stations.fetch("select state, outcome from chaz.calls")
    assert (call["state"], call["outcome"]) == ("done", "unknown")


async def test_what_is_to_be_cancelled_is_not_claimed(stations: Stations) -> None:
    run = await in_state(stations, "queued")
    await cancel(stations, run)
    assert await stations.try_to_claim(run) == Unclaimed("cancelled")


async def test_an_entry_that_is_not_placed_is_cancelled_when_it_is(stations: Stations) -> None:
    run = await stations.send("s")
    assert await cancel(stations, run)
    assert await walk(stations) == []
    assert (await sweeps.due(stations.database)).cancel

    await stations.place()
    assert await stations.try_to_claim(run) == Unclaimed("cancelled")
    assert await walk(stations) == [run]
    assert await stations.state(run) == "cancelled"


async def test_an_entry_that_wakes_nobody_has_nothing_to_cancel(stations: Stations) -> None:
    entry = await stations.say("s")
    assert await cancel(stations, entry)
    await stations.place()
    assert await walk(stations) == []
    assert not (await sweeps.due(stations.database)).cancel
    assert not await cancel(stations, entry)


@pytest.mark.parametrize("state", ["succeeded", "failed"])
async def test_a_run_that_is_over_stays_as_it_ended(stations: Stations, state: str) -> None:
    claim = await stations.claimed("s")
    before = await cancel(stations, claim.run_id)
    await stations.end(claim, state=state)
    assert before
    assert not await cancel(stations, claim.run_id)
    assert await walk(stations) == []
    assert await stations.state(claim.run_id) == state


async def test_the_first_word_counts(stations: Stations) -> None:
    run = await in_state(stations, "queued")
    assert await cancel(stations, run, by="ada")
    assert await cancel(stations, run, by="bob")
    await walk(stations)
    assert (await stations.run(run))["result"] == "cancelled by ada"
    assert not await cancel(stations, run, by="bob")


async def test_who_asks_for_what_there_is_not_is_told(stations: Stations) -> None:
    unknown = uuid4()
    with pytest.raises(UnknownRun, match=str(unknown)):
        await cancel(stations, unknown)
    run = await in_state(stations, "queued")
    for who, why in (("", "x"), ("x" * 201, "x"), ("x", "x" * 10_001)):
        with pytest.raises(InvalidEntry, match="characters"):
            await stations.fetch("select chaz.cancel(%(run)s, %(who)s, %(why)s)", run=run, who=who, why=why)
    assert await cancel(stations, run, by="a\0b" * 100, reason="\ud800" * 20_000)


# The tree


async def tree(stations: Stations) -> tuple[UUID, UUID, UUID]:
    """A parked run, its parked child and its running grandchild."""
    root, (child,) = await stations.spawning("s")
    await stations.park(root)
    claim = await stations.claim(child, "child")
    await stations.step(claim, a_call("spawn_agent"))
    grandchild = await stations.spawn(claim)
    await stations.place()
    await stations.park(claim)
    await stations.claim(grandchild, "child")
    return root.run_id, child, grandchild


async def test_a_tree_is_cancelled_from_the_top_down(stations: Stations) -> None:
    root, child, grandchild = await tree(stations)
    await cancel(stations, root, reason="enough")
    assert await walk(stations) == [root, child, grandchild]
    results = [(await stations.run(run))["result"] for run in (root, child, grandchild)]
    assert results == [
        "cancelled by ada: enough",
        f"cancelled by ada, with run {root} that had spawned it: enough",
        f"cancelled by ada, with run {child} that had spawned it: enough",
    ]
    assert [(await stations.run(run))["reason"] for run in (root, child)] == ["requested", "parent"]


async def test_the_walk_goes_on_from_the_rows_wherever_it_was_cut_off(
    stations: Stations, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, child, grandchild = await tree(stations)
    await cancel(stations, root)

    class Dead(BaseException):
        pass

    async def die(tx: Transaction, cancellation: object) -> None:
        raise Dead

    ended = list[str]()
    for _ in range(3):
        # Between the end of a run and the listing of its children.
        with monkeypatch.context() as patched:
            patched.setattr(cancelling, "_pass_on", die)
            with pytest.raises(Dead):
                await cancelling.walk(stations.database, aside=Aside())
        ended.append(" ".join([await stations.state(run) for run in (root, child, grandchild)]))
        await cancelling.walk(stations.database, aside=Aside())
    assert ended == [
        "cancelled parked running",
        "cancelled cancelled running",
        "cancelled cancelled cancelled",
    ]
    assert await walk(stations) == []
    assert not await stations.fetch("select from chaz.cancellations where done_at is null")


async def test_a_late_spawn_is_refused(stations: Stations) -> None:
    claim, _ = await stations.spawning("s")
    await cancel(stations, claim.run_id)
    await walk(stations)
    with pytest.raises(StaleAttempt):
        await stations.spawn(claim, ordinal=1)


async def test_a_spawn_that_is_being_committed_is_seen(stations: Stations, database: ScratchDatabase) -> None:
    claim = await stations.claimed("s", recipient="parent")
    await stations.step(claim, a_call("spawn_agent"))
    child = await stations.spawn(claim)
    await cancel(stations, claim.run_id)
    # Not placed: it is known by its directive alone.
    await walk(stations)
    await stations.place()
    assert await walk(stations) == [child]
    assert await stations.state(child) == "cancelled"


async def test_detached_children_survive_with_theirs(stations: Stations) -> None:
    root, (attached,) = await stations.spawning("s")
    placed = await stations.spawn(root, ordinal=1, detached=True)
    await stations.place()
    unplaced = await stations.spawn(root, ordinal=2, detached=True)
    claim = await stations.claim(placed, "child")
    await stations.step(claim, a_call("spawn_agent"))
    below = await stations.spawn(claim)
    await cancel(stations, root.run_id)
    await walk(stations)
    await stations.place()
    assert await walk(stations) == []
    states = [await stations.state(run) for run in (root.run_id, attached, placed, unplaced, below)]
    assert states == ["cancelled", "cancelled", "running", "queued", "queued"]


async def test_what_a_child_that_has_ended_left_behind_is_cancelled_too(stations: Stations) -> None:
    root, (child, idle) = await stations.spawning("s", children=2)
    await stations.end(await stations.claim(idle, "child"))
    claim = await stations.claim(child, "child")
    await stations.step(claim, a_call("spawn_agent"))
    grandchild = await stations.spawn(claim)
    await stations.place()
    await stations.end(claim)
    await cancel(stations, root.run_id)
    assert await walk(stations) == [root.run_id, grandchild]
    assert await stations.state(child) == "succeeded"
    # A child that is over and left nothing is not even looked at.
    assert not await stations.fetch("select from chaz.cancellations where run_id = %(run)s", run=idle)


async def test_what_others_ask_a_childs_session_is_not_of_the_tree(stations: Stations) -> None:
    root, (child,) = await stations.spawning("s")
    (row,) = await stations.fetch("select session_id from chaz.runs where id = %(run)s", run=child)
    asked = await stations.send(str(row["session_id"]), recipient="child")
    await stations.place()
    unplaced = await stations.send(str(row["session_id"]), recipient="child")
    await cancel(stations, root.run_id)
    assert await walk(stations) == [root.run_id, child]
    await stations.place()
    assert await walk(stations) == []
    assert await states(stations, [asked, unplaced]) == ["queued", "pending"]


async def open_runs(stations: Stations, session: UUID) -> list[tuple[UUID, str]]:
    """The runs of a session that are not over, with their agents."""
    rows = await stations.fetch(
        """
        select id, agent from chaz.runs where session_id = %(session)s and ended_at is null and superseded_by is null
        order by trigger_position
        """,
        session=session,
    )
    return [(row["id"], row["agent"]) for row in rows]


async def test_what_a_childs_answer_woke_is_of_the_tree(stations: Stations, chaz: Chaz) -> None:
    root, (child,) = await stations.spawning("s")
    claim = await stations.claim(child, "child")
    for agent in ("solo", "parent"):
        chaz.session(id=claim.session_id).attach(agent)
    await stations.end(claim, "@solo, and you?")
    ((woken, _),) = await open_runs(stations, claim.session_id)
    asked = await stations.send(str(claim.session_id), recipient="child")
    await stations.place()
    await stations.end(await stations.claim(woken), "@parent, it is yours")
    # What others had asked meanwhile is theirs, and so is what that wakes.
    await stations.end(await stations.claim(asked, "child"), "@solo, once more")
    ((of_the_tree, _), (of_others, _)) = await open_runs(stations, claim.session_id)
    await cancel(stations, root.run_id)
    assert await walk(stations) == [root.run_id, of_the_tree]
    assert await states(stations, [of_the_tree, of_others]) == ["cancelled", "queued"]


async def test_what_a_child_wakes_after_it_was_asked_to_end_is_cancelled_too(stations: Stations, chaz: Chaz) -> None:
    root, (child,) = await stations.spawning("s")
    claim = await stations.claim(child, "child")
    for agent in ("solo", "parent"):
        chaz.session(id=claim.session_id).attach(agent)
    await cancel(stations, root.run_id)
    # The root is over, and its child is asked for.
    await cancelling.walk(stations.database, aside=Aside(), limit=1)
    await stations.end(claim, "@solo, and you?")
    ((woken, agent),) = await open_runs(stations, claim.session_id)
    await stations.end(await stations.claim(woken, agent), "@parent, then")
    ((woken, _),) = await open_runs(stations, claim.session_id)
    assert await walk(stations) == [woken]
    assert await states(stations, [root.run_id, child, woken]) == ["cancelled", "succeeded", "cancelled"]


async def test_a_cancelled_child_answers_its_parent(stations: Stations) -> None:
    root, (child,) = await stations.spawning("s")
    await stations.park(root)
    await cancel(stations, child, reason="too slow")
    assert await walk(stations) == [child]
    (wait,) = await stations.fetch("select answer from chaz.waits")
    told = "cancelled: agent child was cancelled (requested): cancelled by ada: too slow"
    assert wait["answer"] == {"kind": "cancelled", "content": told, "error": "cancelled"}
    assert await stations.state(root.run_id) == "queued"


async def test_a_session_that_is_at_work_is_cancelled_later(stations: Stations, database: ScratchDatabase) -> None:
    first = await stations.claimed("s")
    other = await stations.claimed("t")
    await cancel(stations, first.run_id)
    await cancel(stations, other.run_id)
    with database.connect() as held:
        held.execute("select from chaz.heads where session_id = %s for update", (first.session_id,))
        assert await walk(stations) == [other.run_id]
    assert await walk(stations) == [first.run_id]


async def test_more_children_than_are_asked_for_at_once(stations: Stations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancelling, "PASSED_ON_AT_ONCE", 2)
    root, children = await stations.spawning("s", children=5)
    await cancel(stations, root.run_id)
    ended = list[UUID]()
    while more := await walk(stations):
        ended += more
    assert sorted(ended) == sorted([root.run_id, *children])
    assert not (await sweeps.due(stations.database)).cancel


@pytest.mark.parametrize("commits", [True, False])
async def test_a_cancel_that_is_not_committed_holds_up_no_walk(
    stations: Stations, database: ScratchDatabase, commits: bool
) -> None:
    root, children = await stations.spawning("s", children=2)
    other = await stations.claimed("t")
    with database.connect() as mine:
        mine.execute("select chaz.cancel(%s, 'bob')", (children[0],))
        await cancel(stations, root.run_id)
        await cancel(stations, other.run_id)
        assert await asyncio.wait_for(walk(stations), 8) == [root.run_id, other.run_id, children[1]]
        mine.commit() if commits else mine.rollback()
    assert await walk(stations) == [children[0]]
    who = "bob" if commits else f"ada, with run {root.run_id} that had spawned it"
    assert (await stations.run(children[0]))["result"] == f"cancelled by {who}"
    assert not (await sweeps.due(stations.database)).cancel


async def test_two_cancels_that_are_not_committed_wait_for_each_other_in_nobody_s_way(
    stations: Stations, database: ScratchDatabase
) -> None:
    one, two = [await stations.say("s", text, recipient="solo") for text in ("one", "two")]
    await stations.place()
    await stations.claim(one)
    with database.connect() as mine:
        mine.execute("select chaz.cancel(%s, 'bob')", (one,))
        # It takes back the run that took it, too.
        await cancel(stations, two)
        assert await asyncio.wait_for(walk(stations), 4) == []
        mine.commit()
    assert await walk(stations) == [one]
    assert (await stations.run(one))["result"] == "cancelled by bob"


async def test_one_that_cannot_be_cancelled_holds_up_no_other(stations: Stations, database: ScratchDatabase) -> None:
    bad, good = await stations.claimed("s"), await stations.claimed("t")
    database.query("alter table chaz.runs add constraint odd check (not (session_id = chaz.session_id('s') "
                   "and state = 'cancelled'))")  # fmt: skip
    await cancel(stations, bad.run_id)
    await cancel(stations, good.run_id)
    aside = Aside()
    walked = await cancelling.walk(stations.database, aside=aside)
    assert [run.run_id for run in walked.ended] == [good.run_id]
    assert bad.run_id in aside
    assert (await cancelling.walk(stations.database, aside=aside)).settled == 0


async def test_what_is_set_aside_is_left_for_a_while(stations: Stations) -> None:
    bad, good = await stations.claimed("s"), await stations.claimed("t")
    await cancel(stations, bad.run_id)
    await cancel(stations, good.run_id)
    aside = aside_for_long(bad.run_id)
    walked = await cancelling.walk(stations.database, aside=aside)
    assert [run.run_id for run in walked.ended] == [good.run_id]
    aside.forget(bad.run_id)
    walked = await cancelling.walk(stations.database, aside=aside)
    assert [run.run_id for run in walked.ended] == [bad.run_id]


async def test_one_whose_transaction_fails_by_chance_is_not_set_aside(
    stations: Stations, database: ScratchDatabase
) -> None:
    busy, good = await stations.claimed("s"), await stations.claimed("t")
    database.query(
        """
        create function public.by_chance() returns trigger language plpgsql
            as $$ begin raise exception using errcode = 'serialization_failure'; end $$;
        create trigger by_chance before update on chaz.runs for each row
            when (new.session_id = chaz.session_id('s') and new.state = 'cancelled')
            execute function public.by_chance();
        """
    )
    await cancel(stations, busy.run_id)
    await cancel(stations, good.run_id)
    aside = Aside()
    walked = await cancelling.walk(stations.database, aside=aside)
    assert [run.run_id for run in walked.ended] == [good.run_id]
    database.query("drop trigger by_chance on chaz.runs")
    walked = await cancelling.walk(stations.database, aside=aside)
    assert [run.run_id for run in walked.ended] == [busy.run_id]


async def test_who_asked_first_is_served_first(stations: Stations) -> None:
    runs = [(await stations.claimed(session)).run_id for session in "abc"]
    for run in reversed(runs):
        await cancel(stations, run)
    ended = list[UUID]()
    for _ in runs:
        walked = await cancelling.walk(stations.database, aside=Aside(), limit=1)
        ended += [run.run_id for run in walked.ended]
    assert ended == runs[::-1]


# Coalescing


async def coalesced(stations: Stations, *senders: str) -> list[UUID]:
    """A running run of the first sender's message, that took the others'."""
    runs = [await stations.say("s", f"from {sender}", sender=sender, recipient="solo") for sender in senders]
    await stations.place()
    await stations.claim(runs[0])
    return runs


async def states(stations: Stations, runs: list[UUID]) -> list[str]:
    return [await stations.state(run) for run in runs]


async def test_what_others_said_is_owed_an_answer_still(stations: Stations) -> None:
    runs = await coalesced(stations, "ada", "bob", "ada", "cy")
    assert await states(stations, runs) == ["running", "superseded", "superseded", "superseded"]
    await cancel(stations, runs[0])
    await walk(stations)
    assert await states(stations, runs) == ["cancelled", "queued", "superseded", "pending"]
    # And the next run coalesces as any first one does.
    await stations.claim(runs[1])
    assert await states(stations, runs) == ["cancelled", "running", "superseded", "superseded"]


async def test_a_failed_run_keeps_what_it_took(stations: Stations) -> None:
    runs = await coalesced(stations, "ada", "bob")
    await stations.close(runs[0], "running")
    assert await states(stations, runs) == ["failed", "superseded"]


async def test_who_asked_twice_takes_both_back(stations: Stations) -> None:
    runs = await coalesced(stations, "ada", "bob", "ada")
    assert await cancel(stations, runs[2], reason="enough")
    assert await walk(stations) == [runs[0]]
    assert await states(stations, runs) == ["cancelled", "queued", "superseded"]
    assert (await stations.run(runs[0]))["result"] == "cancelled by ada: enough"
    assert not await cancel(stations, runs[2])


async def test_who_joined_another_takes_only_the_own_word_back(stations: Stations) -> None:
    runs = await coalesced(stations, "ada", "bob")
    assert await cancel(stations, runs[1], by="bob")
    assert await walk(stations) == [runs[1]]
    assert await states(stations, runs) == ["running", "cancelled"]
    assert (await stations.run(runs[1]))["superseded_by"] is None
    # Even when the run that had taken it is cancelled later.
    await cancel(stations, runs[0])
    await walk(stations)
    assert await states(stations, runs) == ["cancelled", "cancelled"]


async def test_a_program_of_a_persons_name_is_somebody_else(stations: Stations) -> None:
    authors = ("human", "program")
    runs = [await stations.say("s", author, sender="ada", author=author, recipient="solo") for author in authors]
    await stations.place()
    await stations.claim(runs[0])
    assert await cancel(stations, runs[1])
    assert await walk(stations) == [runs[1]]
    assert await states(stations, runs) == ["running", "cancelled"]


async def test_a_superseded_run_is_over_with_the_one_that_took_it(stations: Stations) -> None:
    runs = await coalesced(stations, "ada", "bob")
    (row,) = await stations.fetch("select * from chaz.runs where id = %(run)s", run=runs[0])
    await stations.close(row["id"], "running")
    assert not await cancel(stations, runs[1])


async def test_a_message_that_is_to_be_taken_back_is_taken_along_by_no_run(stations: Stations) -> None:
    one, two = [await stations.say("s", text, recipient="solo") for text in ("one", "two")]
    await stations.place()
    await cancel(stations, two)
    await stations.claim(one)
    assert await walk(stations) == [two]
    assert await states(stations, [one, two]) == ["running", "cancelled"]


async def test_a_message_that_was_answered_before_the_listener_came_stays_answered(
    stations: Stations, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = [await stations.say("s", f"from {sender}", sender=sender, recipient="solo") for sender in ("ada", "bob")]
    await stations.place()
    claim = await stations.claim(one)
    assert await cancel(stations, two)
    close = cancelling.close_run

    async def end_first(*of: Any, **fields: Any) -> Any:
        # Between the look at the run and the lock of its session.
        await stations.end(claim)
        return await close(*of, **fields)

    with monkeypatch.context() as patched:
        patched.setattr(cancelling, "close_run", end_first)
        assert (await cancelling.walk(stations.database, aside=Aside())).settled == 0
    assert await walk(stations) == []
    assert not (await sweeps.due(stations.database)).cancel
    assert await states(stations, [one, two]) == ["succeeded", "superseded"]


# The producer's side


async def test_a_handle_revokes(stations: Stations, database: ScratchDatabase) -> None:
    async with AsyncChaz(database.url) as chaz:
        handle = await chaz.session("s").direct("solo", "hello")
        assert isinstance(handle, AsyncAgentResult)
        assert await handle.revoke(terminate=True, by="ada", reason="enough")
        await stations.place()
        await walk(stations)
        assert await handle.state() == "cancelled"
        with pytest.raises(RunCancelled, match="cancelled by ada: enough"):
            await handle.get(5)
        assert not await handle.revoke()
        with pytest.raises(UnknownRun):
            await chaz.cancel("no id")


def test_so_does_one_that_is_not_async(chaz: Chaz, monkeypatch: pytest.MonkeyPatch, database: ScratchDatabase) -> None:
    monkeypatch.setenv("USER", "grace")
    handle = chaz.session("s").direct("solo", "hello")
    assert handle.revoke()
    assert chaz.cancel(handle.id)
    (row,) = database.query("select * from chaz.cancellations")
    assert (row["run_id"], row["cancelled_by"], row["reason"]) == (handle.id, "grace", "")


def test_a_cancel_is_part_of_the_callers_transaction(chaz: Chaz, database: ScratchDatabase) -> None:
    with database.connect() as mine:
        handle = chaz.session("s").direct("solo", "hello", connection=mine)
        assert mine.execute("select chaz.cancel(%s, 'ada')", (handle.id,)).fetchone() == {"cancel": True}
        mine.rollback()
    assert database.value("select count(*) from chaz.cancellations") == 0


async def test_a_cancel_rings_and_a_sleeping_listener_ends_the_run(
    stations: Stations, listeners: Listeners, database: ScratchDatabase
) -> None:
    listener = await listeners.start()
    run = await stations.send("s")
    await listener.until_published(run)
    await listener.until_asleep()
    async with AsyncChaz(database.url) as chaz:
        handle = await chaz.result(run)
        assert await handle.revoke()
        with pytest.raises(RunCancelled):
            await handle.get(10)
    await listener.until_asleep()
    assert listener.published == [run]


async def test_the_worker_of_a_running_run_is_told(stations: Stations, database: ScratchDatabase) -> None:
    running, queued = await stations.claimed("s"), await in_state_of(stations, "t")
    with psycopg.connect(database.url, autocommit=True) as ear:
        ear.execute(f"listen {ABORT}")
        for run in (queued, running.run_id):
            await cancel(stations, run)
        await walk(stations)
        ear.execute("select 1")
        assert [notify.payload for notify in ear.notifies(timeout=0)] == [str(running.run_id)]


async def in_state_of(stations: Stations, session: str) -> UUID:
    run = await stations.send(session)
    await stations.place()
    return run


async def test_a_run_that_ends_by_itself_tells_no_worker(stations: Stations, database: ScratchDatabase) -> None:
    claim = await stations.claimed("s")
    with psycopg.connect(database.url, autocommit=True) as ear:
        ear.execute(f"listen {ABORT}")
        outcome = RunOutcome(state="succeeded", text="done")
        await stations.transact(lambda tx: completion.end_run(tx, claim, outcome))
        ear.execute("select 1")
        assert not list(ear.notifies(timeout=0))


async def test_a_workers_ear_hears_again_after_its_connection_was_lost(
    database: ScratchDatabase, broker: Broker
) -> None:
    heard = list[UUID]()
    ear = AbortEar(broker.settings(database_url=database.url, beat=0.1), heard.append)
    ear.open()
    for run in (uuid4(), uuid4()):

        async def tells(run: UUID = run) -> bool:
            database.query("select pg_notify('chaz_abort', %(run)s), pg_notify('chaz_abort', 'no id')", run=str(run))
            return run in heard

        await eventually_async(tells)
        database.query(
            "select pg_terminate_backend(pid) from unnest(%(p)s::int[]) pid", p=database.backends("chaz-abort")
        )
    await ear.close()
    assert database.backends("chaz-abort") == []


async def test_who_stops_in_the_middle_of_a_transaction_does_not_keep_its_rows(database: ScratchDatabase) -> None:
    stopped = await Database(database.url, silence=1).open()
    released = asyncio.Event()

    async def hold(tx: Transaction) -> None:
        await tx.execute("select from chaz.doorbell for update")
        await released.wait()
        await tx.execute("select 1")

    holding = asyncio.create_task(stopped.transact(hold))
    await eventually_async(lambda: _is_held(database))

    async def is_free() -> bool:
        return not await _is_held(database)

    await eventually_async(is_free)
    released.set()
    with pytest.raises(DatabaseUnavailable, match="idle-in-transaction"):
        await holding
    await stopped.close()


async def _is_held(database: ScratchDatabase) -> bool:
    return not database.query("select single from chaz.doorbell for update skip locked")
