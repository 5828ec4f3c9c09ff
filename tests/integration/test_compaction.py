"""Compaction: a summary takes the place of what was said, whatever comes meanwhile and whoever is lost."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from chaz import (
    Budget,
    Chaz,
    RunCancelled,
    RunFailed,
    cancelling,
    children,
    cli,
    compactions,
    interrupts,
    journal,
    sessionlog,
)
from chaz.aside import Aside
from chaz.database import Transaction
from chaz.entries import Entry, derived_id, session_id
from chaz.errors import ModelError, ModelUnavailable
from chaz.outcomes import RunOutcome, Turn
from chaz.runtime import context
from tests.fixtures.stations import Stations, a_call
from tests.fixtures.summaries import Summaries

pytestmark = pytest.mark.anyio

SUMMARY = f"{context.SUMMARY}\nsummary {{}}"
"""The Nth one, as later runs are shown it."""


async def summary_of(summaries: Summaries) -> Entry:
    (summary,) = await summaries.of_type("summary")
    return summary


async def configure(stations: Stations, on_message: str) -> None:
    await stations.transact(
        lambda tx: sessionlog.configure(tx, "s", on_message=on_message, tenant="", open_session=False)
    )


# What it comes to


async def test_a_summary_takes_the_place_of_what_was_said(summaries: Summaries, stations: Stations) -> None:
    await summaries.talk("one", "two")
    before = await stations.log("s")

    handle = await summaries.compact()

    assert handle.get(timeout=5) == "summary 1"
    request, ack, summary = (await stations.log("s"))[len(before) :]
    assert (request.type, request.author, ack.type) == ("compaction_request", "human", "ack")
    assert (summary.type, summary.sender, summary.author, summary.content) == ("summary", "solo", "agent", "summary 1")
    assert summary.metadata == {"covers": before[-1].position, "entries": 4}
    assert (await stations.log("s"))[: len(before)] == before


async def test_its_model_is_shown_what_was_said_as_data_and_no_tools(summaries: Summaries) -> None:
    summaries.start(tools=["spawn_agent", "compact"])
    await summaries.talk("one", "two\n{forged: line}")
    await summaries.compact()

    (asked,) = summaries.model.compactions
    assert asked.tools == []
    assert asked.lines == [
        {"from": "ada", "is": "human", "to": "solo", "directive": "one"},
        {"from": "solo", "is": "agent", "message": "re: one"},
        {"from": "ada", "is": "human", "message": "two\n{forged: line}"},
        {"from": "solo", "is": "agent", "message": "re: ada: two\n{forged: line}"},
    ]


async def test_it_is_booked_as_any_use_of_a_model(summaries: Summaries, stations: Stations) -> None:
    summaries.start(
        compaction_model=f"{summaries.model.provider}:small", prices={f"{summaries.model.provider}:small": (1e6, 0)}
    )
    await summaries.talk("one", "two")
    run = await stations.run((await summaries.compact()).id)

    assert (run["cause"], run["state"], run["steps"]) == ("compaction", "succeeded", 1)
    (call,) = await stations.fetch("select * from chaz.model_calls where run_id = %(run)s", run=run["id"])
    assert (call["model"], call["cost"]) == (f"{summaries.model.provider}:small", 100)
    assert (call["prompt_tokens"], call["completion_tokens"]) == (100, 7)
    assert summaries.model.compactions[0].model == "small"


async def test_later_runs_see_the_summary_and_what_came_after(summaries: Summaries) -> None:
    await summaries.talk("one", "two")
    await summaries.compact()
    await summaries.talk("three", "four")

    assert summaries.model.asked[-1].texts == [SUMMARY.format(1), "ada: three", "re: ada: three", "ada: four"]


async def test_thirty_three_in_a_row(summaries: Summaries) -> None:
    for n in range(33):
        await summaries.talk(f"a {n}", f"b {n}")
        handle = await summaries.compact()
        assert handle.get(timeout=5) == f"summary {n + 1}"

    found = await summaries.of_type("summary")
    covers = [summary.metadata["covers"] for summary in found]
    assert covers == sorted(set(covers))
    assert [summary.metadata["entries"] for summary in found] == [4] * 33
    assert [asked.lines[0] for asked in summaries.model.compactions[1:]] == [
        {"summary_so_far": f"summary {n}"} for n in range(1, 33)
    ]
    await summaries.talk("and now?")
    assert summaries.model.asked[-1].texts == [SUMMARY.format(33), "ada: and now?"]


async def test_too_few_entries_ask_no_model(summaries: Summaries) -> None:
    await summaries.talk("one")
    handle = await summaries.compact()

    assert "nothing to summarise: 2 messages" in (handle.get(timeout=5) or "")
    assert handle.state == "succeeded"
    assert not summaries.model.compactions
    assert not await summaries.of_type("summary")
    (note,) = await summaries.of_type("note")
    assert note.content == handle.get()


async def test_what_an_earlier_summary_covers_is_not_counted_again(summaries: Summaries) -> None:
    await summaries.talk("one", "two")
    first, second = await summaries.ask_to_compact(), await summaries.ask_to_compact()
    await summaries.work()

    assert first.get(timeout=5) == "summary 1"
    assert "nothing to summarise: 0 messages" in (second.get(timeout=5) or "")
    assert len(summaries.model.compactions) == 1


async def test_nobody_to_summarise_is_noted(summaries: Summaries) -> None:
    handle = await summaries.compact()
    assert (handle.get(timeout=5), handle.state) == (None, "nobody")
    (note,) = await summaries.of_type("note")
    assert "nobody to summarise" in note.content


# Failing


@pytest.mark.parametrize(
    ("says", "why"),
    [(" \n", "empty summary"), (ModelError("x", "no"), "no"), (ModelUnavailable("x", "away", 0.0), "away")],
)
async def test_a_failure_leaves_the_log_as_it_was(summaries: Summaries, says: str | Exception, why: str) -> None:
    await summaries.talk("one", "two")
    summaries.model.says = [says] * 5
    handle = await summaries.compact()

    with pytest.raises(RunFailed, match=why):
        handle.get(timeout=5)
    assert not await summaries.of_type("summary")
    (error,) = await summaries.of_type("error")
    assert error.run_id == handle.id


async def test_a_failed_one_is_requeued_and_works(summaries: Summaries, chaz: Chaz, stations: Stations) -> None:
    await summaries.talk("one", "two")
    summaries.model.says = [""]
    failed = await summaries.compact()
    again = await asyncio.to_thread(chaz.requeue, failed.id)
    await summaries.work()

    assert again.get(timeout=5) == "summary 2"
    assert (await stations.run(again.id))["cause"] == "compaction"
    assert (await summary_of(summaries)).metadata["entries"] == 4


async def test_its_budget_holds(summaries: Summaries) -> None:
    await summaries.talk("one", "two")
    summaries.start(budget=Budget(steps=1))
    # Its only step is its last one, and its model is asked for a summary all the same.
    assert (await summaries.compact()).get(timeout=5) == "summary 1"


# What comes meanwhile


async def compacting(summaries: Summaries, on_message: str = "coalesce") -> tuple[Any, asyncio.Task[Any]]:
    """A session in which a summary of four entries is being written; its handle, and the worker's task."""
    await configure(summaries.stations, on_message)
    await summaries.talk("one", "two")
    summaries.model.held = True
    handle = await summaries.ask_to_compact()
    await summaries.stations.place()
    task = asyncio.create_task(summaries.execute(handle.id))
    await summaries.until_asked()
    return handle, task


async def let_go(summaries: Summaries, task: asyncio.Task[Any]) -> None:
    summaries.model.held = False
    summaries.model.go.set()
    await task
    await summaries.work()


@pytest.mark.parametrize("on_message", ["coalesce", "each", "steer"])
async def test_a_message_meanwhile_is_answered_next_and_stays_in_view(
    summaries: Summaries, stations: Stations, on_message: str
) -> None:
    handle, task = await compacting(summaries, on_message)
    message = await stations.say("s", "three")
    await stations.place()
    assert await stations.state(message) == "pending"

    await let_go(summaries, task)

    assert handle.get(timeout=5) == "summary 1"
    assert (await stations.run(message))["state"] == "succeeded"
    assert summaries.model.asked[-1].texts == [SUMMARY.format(1), "ada: three"]
    assert "three" not in summaries.model.compactions[0].texts[0]
    # It stands before the summary, and is not covered by it.
    summary = await summary_of(summaries)
    (trigger,) = [entry for entry in await stations.log("s") if entry.id == message]
    assert summary.metadata["covers"] < (trigger.position or 0) < (summary.position or 0)
    await summaries.talk("four")
    assert summaries.model.asked[-1].texts == [SUMMARY.format(1), "ada: three", "re: ada: three", "ada: four"]


async def test_an_interrupting_message_cancels_it_and_loses_nothing(summaries: Summaries, stations: Stations) -> None:
    handle, task = await compacting(summaries, "interrupt")
    before = [entry for entry in await stations.log("s") if entry.type in {"message", "directive"}]
    message = await stations.say("s", "three")
    await stations.place()
    assert [run for run, _, _ in await interrupts.interrupt(stations.database, aside=Aside())] == [handle.id]

    await let_go(summaries, task)

    with pytest.raises(RunCancelled, match="interrupted"):
        handle.get(timeout=5)
    assert not await summaries.of_type("summary")
    # It says nothing in its agent's name, what it was about to say included.
    said = [entry.content for entry in await summaries.of_type("message", "directive")]
    assert said == [entry.content for entry in before] + ["three", "re: ada: three"]
    assert (await stations.run(message))["state"] == "succeeded"
    assert summaries.model.asked[-1].texts[0] == "one"


async def test_a_message_meanwhile_is_refused_where_the_session_says_so(summaries: Summaries) -> None:
    handle, task = await compacting(summaries, "reject")
    refused = await asyncio.to_thread(lambda: summaries.chaz.session("s").say("three"))
    await summaries.stations.place()
    with pytest.raises(RunFailed, match="busy"):
        await asyncio.to_thread(refused.get, 5)
    await let_go(summaries, task)
    assert handle.get(timeout=5) == "summary 1"


async def test_neither_a_compaction_nor_a_message_takes_the_other_along(
    summaries: Summaries, stations: Stations
) -> None:
    await summaries.talk("one", "two")
    active = await stations.say("s", "three")
    await stations.place()
    handle = await summaries.ask_to_compact()
    later = await stations.say("s", "four")
    await stations.place()
    claim = await stations.claim(active)
    assert claim.read_to >= ((await stations.run(later))["trigger_position"])

    assert [await stations.state(run) for run in (handle.id, later)] == ["pending", "superseded"]
    await stations.end(claim)
    last = await stations.say("s", "five")
    await summaries.work()
    assert (await stations.state(last), handle.get(timeout=5)) == ("succeeded", "summary 1")


async def test_what_is_unanswered_is_not_covered_nor_what_comes_after_it(
    summaries: Summaries, stations: Stations
) -> None:
    await summaries.talk("one", "two")
    before = (await stations.log("s"))[-1].position
    later = await stations.say("s", "tomorrow", countdown=timedelta(days=1))
    await summaries.talk("three")
    await summaries.compact()

    assert (await summary_of(summaries)).metadata == {"covers": before, "entries": 4}
    assert "tomorrow" not in summaries.model.compactions[0].texts[0]
    assert await stations.state(later) == "pending"
    # So a worker that is lost now leaves to the next what the stored turn had seen.
    (step,) = await stations.fetch(
        "select s.read_to from chaz.steps s join chaz.runs r on r.id = s.run_id where r.cause = 'compaction'"
    )
    assert step["read_to"] == before
    await summaries.talk("four")
    assert summaries.model.asked[-1].texts == [SUMMARY.format(1), "ada: three", "re: ada: three", "ada: four"]


async def test_what_a_run_to_be_tried_again_took_along_is_not_covered(
    summaries: Summaries, stations: Stations, chaz: Chaz
) -> None:
    await summaries.talk("one", "two")
    first = await stations.claimed("s", "three")
    # The later one goes first, takes the other along, and fails.
    earlier, later = await stations.say("s", "four"), await stations.say("s", "five", priority=1)
    await stations.place()
    await stations.end(first)
    failed = await stations.claim(later)
    assert await stations.state(earlier) == "superseded"
    await stations.end(failed, state="failed", reason="model")
    busy = await stations.claimed("s", "six")
    await asyncio.to_thread(chaz.requeue, later)
    handle = await summaries.ask_to_compact(priority=2)
    await stations.place()
    await stations.end(busy)

    claim = await stations.claim(handle.id)
    uncovered = await stations.transact(lambda tx: compactions.uncovered(tx, claim))
    assert [entry.content for entry in uncovered.entries][4:] == ["three"]


async def test_of_two_at_once_one_wins(summaries: Summaries, stations: Stations) -> None:
    handle, task = await compacting(summaries)

    async def another(tx: Transaction) -> None:
        id = session_id("s")
        await sessionlog.lock_head(tx, id)
        await sessionlog.append(
            tx,
            session_id=id,
            tenant="",
            type="summary",
            sender="solo",
            author="agent",
            content="the other's",
            metadata={"covers": 4, "entries": 2},
        )

    await stations.transact(another)
    await let_go(summaries, task)

    assert "superseded by a newer summary" in (handle.get(timeout=5) or "")
    assert handle.state == "succeeded"
    assert (await summary_of(summaries)).content == "the other's"
    assert [entry.content for entry in await summaries.of_type("note")] == [handle.get()]


async def test_a_cancelled_one_leaves_the_old_view(summaries: Summaries, stations: Stations) -> None:
    handle, task = await compacting(summaries)
    await asyncio.to_thread(handle.revoke)
    await cancelling.walk(stations.database, aside=Aside())

    await let_go(summaries, task)

    with pytest.raises(RunCancelled):
        handle.get(timeout=5)
    assert not await summaries.of_type("summary")
    await summaries.talk("three")
    assert summaries.model.asked[-1].texts == ["one", "re: one", "ada: two", "re: ada: two", "ada: three"]


# A lost worker


async def test_a_stored_turn_is_not_asked_for_again_and_covers_what_its_model_had_seen(
    summaries: Summaries, stations: Stations
) -> None:
    await summaries.talk("one", "two")
    waits = await stations.say("s", "tomorrow", countdown=timedelta(days=1))
    await summaries.talk("three")
    handle = await summaries.ask_to_compact()
    await stations.place()
    claim = await stations.claim(handle.id)
    uncovered = await stations.transact(lambda tx: compactions.uncovered(tx, claim))
    seen = uncovered.entries[-1].position
    turn, booked = Turn(text="the stored one"), {"model": "scripted", "cost": None}
    store = partial(journal.store_step, claim=claim, step=0, turn=turn, version="v1", seen=seen, **booked)
    await stations.transact(store)
    await stations.give_back(claim)
    # Nothing is unanswered any more: read anew, more would be covered.
    assert await stations.close(waits, "pending") is not None

    await summaries.work()

    assert handle.get(timeout=5) == "the stored one"
    assert not summaries.model.compactions
    assert (await summary_of(summaries)).metadata == {"covers": seen, "entries": 4}
    assert (await stations.run(handle.id))["attempt"] == 2


async def test_one_that_was_lost_before_its_turn_was_stored_begins_anew(
    summaries: Summaries, stations: Stations
) -> None:
    await summaries.talk("one", "two")
    handle = await summaries.ask_to_compact()
    await stations.place()
    await stations.give_back(await stations.claim(handle.id))
    await summaries.work()
    assert handle.get(timeout=5) == "summary 1"
    assert len(await summaries.of_type("summary")) == 1


async def test_a_stale_attempt_writes_no_summary(summaries: Summaries, stations: Stations) -> None:
    handle, task = await compacting(summaries)
    # Somebody else has it: as a listener does when its lease has run out.
    await stations.fetch(
        """
        update chaz.runs set state = 'queued', worker_id = null, claim = null where id = %(id)s returning id
        """,
        id=handle.id,
    )
    claim = await stations.claim(handle.id)
    summaries.model.held = False
    summaries.model.go.set()
    await task
    assert not await summaries.of_type("summary")
    await stations.give_back(claim)
    await summaries.work()
    assert len(await summaries.of_type("summary")) == 1


# Who asks


async def test_the_tool_asks_once_and_it_is_done_after_the_run(summaries: Summaries, stations: Stations) -> None:
    summaries.start(tools=["compact"])
    await summaries.talk("one")
    summaries.model.calls = [(a_call("compact", "{}"), a_call("compact", "{}"))]
    await summaries.talk("two")

    (request,) = await summaries.of_type("compaction_request")
    assert (request.author, request.sender, request.recipient) == ("agent", "solo", "solo")
    (run,) = await stations.fetch("select * from chaz.runs where cause = 'compaction'")
    assert (run["state"], run["parent_run_id"], run["root_run_id"]) == ("succeeded", None, run["id"])
    assert (await summary_of(summaries)).metadata["entries"] == 4
    calls = await stations.fetch("select outcome, result from chaz.calls order by ordinal")
    assert [call["outcome"] for call in calls] == ["ok", "ok"]
    assert ["already" in call["result"] for call in calls].count(True) == 1


async def test_a_call_of_the_tool_is_not_made_again_by_another_attempt(
    summaries: Summaries, stations: Stations
) -> None:
    claim = await stations.claimed("s")
    call = a_call("compact", "{}")
    await stations.step(claim, call)
    place: dict[str, Any] = {"claim": claim, "step": 0, "ordinal": 0}
    asked = await stations.transact(partial(compactions.request, call=call, **place))
    # What a worker looks up that does not know whether it was committed.
    assert await stations.transact(partial(children.told, **place)) == asked
    await stations.give_back(claim)

    summaries.start(tools=["compact"])
    await summaries.work()

    assert (await stations.run(claim.run_id))["state"] == "succeeded"
    (request,) = await summaries.of_type("compaction_request")
    assert request.id == derived_id("compaction", str(claim.run_id), "0.0")


async def test_the_tool_takes_no_arguments(summaries: Summaries, stations: Stations) -> None:
    summaries.start(tools=["compact"])
    summaries.model.calls = [(a_call("compact", '{"now": true}'),)]
    await summaries.talk("one")
    (call,) = await stations.fetch("select outcome, error from chaz.calls")
    assert (call["outcome"], call["error"]) == ("error", "bad_arguments")
    assert not await summaries.of_type("compaction_request")


@pytest.mark.parametrize(("prompt", "asked"), [(6_299, False), (6_300, True)])
async def test_a_share_of_the_window_asks(summaries: Summaries, prompt: int, asked: bool) -> None:
    summaries.start(context_window=10_000, reserved_output=1_000, compact_at=0.7)
    await summaries.talk("one", "two")
    summaries.model.prompt = prompt
    await summaries.talk("three")

    requests = await summaries.of_type("compaction_request")
    assert [(entry.author, entry.recipient) for entry in requests] == [("system", "solo")] * asked
    assert len(await summaries.of_type("summary")) == asked
    # The summary's own prompt is as long, and asks for no other.
    await summaries.work()
    assert len(await summaries.of_type("compaction_request")) == asked


async def test_what_no_longer_fits_asks_too(summaries: Summaries) -> None:
    summaries.start(context_window=1_000, reserved_output=100, compact_at=0.7)
    await summaries.talk("x" * 2_000, "y" * 2_000)
    (summary,) = await summaries.of_type("summary")
    assert summary.metadata["covers"] > 0


async def test_a_full_window_does_not_ask_twice_nor_for_nothing(summaries: Summaries, stations: Stations) -> None:
    summaries.start(context_window=10_000, reserved_output=1_000, compact_at=0.7)
    summaries.model.prompt = 9_000
    # With two entries there is nothing to summarise.
    await summaries.talk("one")
    assert not await summaries.of_type("compaction_request")
    # One is open when the run ends.
    run = await stations.say("s", "two")
    await stations.place()
    await summaries.ask_to_compact()
    await summaries.execute(run)
    await summaries.work()
    assert len(await summaries.of_type("compaction_request")) == 1


@pytest.mark.parametrize("summary", ["summary", "", ModelError("x", "no")])
async def test_what_shortens_nothing_is_not_asked_for_again_and_again(
    summaries: Summaries, summary: str | Exception
) -> None:
    # The prompts are long, but not for what was said: a tool gave much, say.
    summaries.start(context_window=10_000, reserved_output=1_000, compact_at=0.7)
    summaries.model.prompt = 9_000
    summaries.model.says = [summary]
    await summaries.talk(*"abcdefgh")
    assert len(summaries.model.compactions) == 1

    # As soon as an eighth of a full window was said, it is worth another.
    await summaries.talk("x" * 1_600, "y")
    assert len(summaries.model.compactions) == 2


async def test_what_waits_for_an_answer_is_not_asked_to_be_summarised(summaries: Summaries) -> None:
    await summaries.talk("one", "two")
    await summaries.stations.say("s", "tomorrow", countdown=timedelta(days=1))
    summaries.start(context_window=1_000, reserved_output=100, compact_at=0.7)
    summaries.model.prompt = 900
    await summaries.talk("x" * 4_000, "y" * 4_000, "z" * 4_000)

    assert len(await summaries.of_type("compaction_request")) == len(await summaries.of_type("summary")) == 1
    assert not await summaries.of_type("note")


async def test_one_that_is_asked_for_later_is_not_in_the_way(summaries: Summaries, stations: Stations) -> None:
    summaries.start(tools=["compact"], context_window=10_000, reserved_output=1_000, compact_at=0.7)
    await summaries.talk("one", "two")
    later = await summaries.ask_to_compact(countdown=timedelta(days=1))
    summaries.model.prompt = 9_000
    await summaries.talk("three")
    assert len(await summaries.of_type("summary")) == 1

    summaries.model.prompt = 100
    await summaries.talk("four")
    summaries.model.calls = [(a_call("compact", "{}"),)]
    await summaries.talk("five")
    assert len(await summaries.of_type("summary")) == 2
    assert await stations.state(later.id) == "pending"


async def test_to_ask_reads_no_more_than_fills_a_window(summaries: Summaries, stations: Stations) -> None:
    await summaries.talk("one")
    await stations.fetch(
        """
        with moved as (
            update chaz.heads set next_position = next_position + 5000 where session_id = %(session)s
            returning next_position - 5001 as last)
        insert into chaz.entries (session_id, position, type, sender, author, content)
        select %(session)s, last + n, 'message', 'ada', 'human', 'x' from moved, generate_series(1, 5000) n
        returning id
        """,
        session=session_id("s"),
    )
    run = await stations.say("s", "two")
    await stations.place()
    claim = await stations.claim(run)

    async def end(tx: Transaction) -> int:
        await compactions.end_run(tx, claim, RunOutcome(state="succeeded", text="done"), full_from=800)
        counted = await tx.execute(
            """
            select idx_tup_fetch + seq_tup_read as read from pg_stat_xact_user_tables
            where schemaname = 'chaz' and relname = 'entries'
            """
        )
        row = await counted.fetchone()
        assert row is not None
        return row["read"]

    # 800 tokens are 3200 bytes: 100 entries fill them.
    assert await stations.transact(end) < 500
    await summaries.work()
    assert len(await summaries.of_type("summary")) == 1


async def test_a_window_too_small_for_any_of_it_fails_and_covers_nothing(summaries: Summaries) -> None:
    await summaries.talk("one " + "x" * 3_000, "two")
    summaries.start(context_window=500)
    handle = await summaries.compact()
    with pytest.raises(RunFailed, match="context_window"):
        handle.get(timeout=5)
    assert not summaries.model.compactions
    assert not await summaries.of_type("summary")


async def test_a_session_larger_than_the_window_is_summarised_from_its_oldest_part(summaries: Summaries) -> None:
    for n in range(4):
        await summaries.talk(f"{n} " + "x" * 4_000)
    summaries.start(context_window=4_000, reserved_output=500)
    for n in range(1, 5):
        assert (await summaries.compact()).get(timeout=5) is not None
        if len(await summaries.of_type("summary")) < n:
            break
    found = await summaries.of_type("summary")
    covers = [summary.metadata["covers"] for summary in found]
    assert len(covers) > 1
    assert covers == sorted(set(covers))
    assert sum(summary.metadata["entries"] for summary in found) == len(
        [entry for entry in await summaries.of_type("message", "directive") if entry.position <= covers[-1]]
    )


async def test_no_more_is_read_than_there_is_room_for(stations: Stations, summaries: Summaries) -> None:
    await summaries.talk("one " + "x" * 100, "two", "three")
    handle = await summaries.ask_to_compact()
    await stations.place()
    claim = await stations.claim(handle.id)

    async def read(room: int) -> list[str]:
        found = await stations.transact(lambda tx: compactions.uncovered(tx, claim, room=room))
        return [entry.content[:7] for entry in found.entries]

    # One and its answer are 212 bytes.
    said = ["one xxx", "re: one", "two", "re: ada", "three", "re: ada"]
    assert [await read(room) for room in (0, 212 + 3 + 12, 10**6)] == [said[:3], said[:4], said]


async def test_the_command_line(summaries: Summaries, capsys: pytest.CaptureFixture[str]) -> None:
    await summaries.talk("one", "two")
    database = ["--database", summaries.stations.scratch.url]

    async def command(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(cli.main, [*arguments, *database])
        assert ended.value.code == 0
        return capsys.readouterr().out.strip()

    run = await command("compact", "s")
    await summaries.work()
    assert await command("wait", run) == "summary 1"
    waiting = asyncio.create_task(command("compact", "s", "--wait"))
    while not waiting.done():
        await summaries.work()
        await asyncio.sleep(0)
    assert "nothing to summarise" in await waiting
