"""A run that failed or was cancelled, run anew: a new run on the same trigger, in its session's turn."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from decimal import Decimal
from functools import partial
from uuid import UUID

import pytest

from chaz import (
    AsyncChaz,
    Budget,
    Chaz,
    RunFailed,
    UnknownRun,
    cancelling,
    outbox,
    publishing,
    requeueing,
    sessionlog,
    steering,
)
from chaz.aside import Aside
from chaz.callbacks import Webhook
from chaz.cli import main
from chaz.errors import AlreadyRequeued, NotRequeueable
from chaz.listings import RunFilter
from chaz.runlistings import list_failed
from chaz.runs import Claim
from tests.fixtures.model import script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes
from tests.fixtures.stations import Stations, a_call

pytestmark = pytest.mark.anyio

NOBODYS = UUID("00000000-0000-4000-8000-000000000000")
LINEAGE = ("session_id", "agent", "trigger_position", "priority", "parent_run_id", "depth", "scope")


async def requeue(stations: Stations, run: UUID) -> UUID:
    return await stations.transact(partial(requeueing.requeue, run_id=run))


async def failed(stations: Stations, session: str = "s", content: str = "hello") -> UUID:
    claim = await stations.claimed(session, content)
    await stations.end(claim, "it went wrong", state="failed", reason="model")
    return claim.run_id


async def said(stations: Stations, sender: str) -> UUID:
    run = await stations.say("s", f"from {sender}", sender=sender, recipient="solo")
    await stations.place()
    return run


async def triggers(stations: Stations, claim: Claim) -> list[str]:
    """Texts of what the run answers."""
    _, own = await stations.transact(
        partial(sessionlog.context_entries, session_id=claim.session_id, run_id=claim.run_id, read_to=claim.read_to)
    )
    return [entry.content for entry in own]


async def active_run(stations: Stations) -> UUID | None:
    (head,) = await stations.fetch("select active_run from chaz.heads")
    return head["active_run"]


async def test_a_new_run_takes_the_trigger_and_the_lineage(stations: Stations) -> None:
    old = await failed(stations)
    await stations.register("solo", timeout=timedelta(hours=5))

    new = await requeue(stations, old)

    before, after = await stations.run(old), await stations.run(new)
    assert (after["cause"], after["retry_of"], after["state"], after["attempt"]) == ("requeue", old, "queued", 0)
    assert [after[name] for name in LINEAGE] == [before[name] for name in LINEAGE]
    assert (new > old, new.version) == (True, 7)
    assert timedelta(hours=4.9) < after["deadline"] - after["created_at"] <= timedelta(hours=5)
    assert (before["state"], before["result"]) == ("failed", "it went wrong")
    assert await active_run(stations) == new
    assert [p.delivery.run for p in await stations.transact(partial(publishing.publishable, first_wait=5.0))] == [new]


async def test_a_root_starts_a_tree_of_its_own(stations: Stations) -> None:
    budget = Budget(steps=3, tokens=50, cost=0.5)
    old = await stations.claimed("s", recipient="parent", budget=budget, timeout=timedelta(minutes=5))
    # Its agent's own limit is the agent's matter, and is taken anew with the first step.
    await stations.reserve(old, budget=Budget(steps=1))
    await stations.step(old, a_call("word_count"))
    await stations.end(old, "the budget is used up", state="failed", reason="budget")

    for _ in range(2):
        new = await requeue(stations, old.run_id)
        row = await stations.run(new)
        assert row["root_run_id"] == new
        assert timedelta(minutes=4.9) < row["deadline"] - row["created_at"] <= timedelta(minutes=5)
        (tree,) = await stations.fetch("select * from chaz.tree_budgets where root_run_id = %(id)s", id=new)
        assert (tree["max_steps"], tree["max_tokens"], tree["max_cost"]) == (3, 50, Decimal("0.5"))
        assert (tree["steps"], tree["tokens"], tree["cost"]) == (0, 0, 0)
        again = await stations.claim(new, "parent")
        assert again.limited
        assert await stations.reserve(again) == "free"
        # And so does what it spawns.
        await stations.step(again, a_call("spawn_agent"))
        child = await stations.spawn(again)
        await stations.place()
        assert (await stations.run(child))["root_run_id"] == new
        await stations.end(again, "no", state="failed", reason="model")
        old = again


async def test_a_root_without_a_budget_has_a_tree_too(stations: Stations) -> None:
    new = await requeue(stations, await failed(stations))
    claim = await stations.claim(new)
    assert not claim.limited
    await stations.step(claim, a_call("word_count"))
    (tree,) = await stations.fetch("select * from chaz.tree_budgets where root_run_id = %(id)s", id=new)
    assert (tree["steps"], tree["max_steps"]) == (1, None)


async def test_who_asked_to_be_told_is_told_of_the_new_run(stations: Stations, chaz: Chaz) -> None:
    target = "https://example.org/ends"
    old = chaz.session("s").direct("solo", "go", on_complete=target)
    await stations.place()
    await stations.end(await stations.claim(old.id), "no", state="failed", reason="model")
    (end,) = await outbox.take(stations.database)
    await outbox.told(stations.database, end.entry)

    new = await requeue(stations, old.id)

    assert await outbox.take(stations.database) == []
    await stations.end(await stations.claim(new), "at last")
    (end,) = await outbox.take(stations.database)
    assert (end.entry, end.run, end.state, end.result, end.target) == (
        new,
        new,
        "succeeded",
        "at last",
        Webhook(url=target),
    )


async def test_what_was_invalid_stays_so(stations: Stations, database: ScratchDatabase) -> None:
    database.query("""select chaz.send('s', 'directive', 'ada', 'hi', recipient => 'solo', budget => '{"steps": 0}')""")
    await stations.place()
    (run,) = await stations.fetch("select id from chaz.runs")
    with pytest.raises(NotRequeueable, match=r"its entry is invalid \(metadata.options.budget.steps: "):
        await requeue(stations, run["id"])


async def test_it_rings(stations: Stations, database: ScratchDatabase) -> None:
    old = await failed(stations)
    with database.connect(autocommit=True) as connection:
        connection.execute("listen chaz")
        await requeue(stations, old)
        heard = await asyncio.to_thread(lambda: list(connection.notifies(timeout=5, stop_after=1)))
    assert len(heard) == 1


async def test_what_others_said_to_it_is_owed_an_answer_when_it_is_cancelled(stations: Stations, chaz: Chaz) -> None:
    claim = await stations.claim(await said(stations, "ada"))
    await stations.end(claim, state="failed")
    chaz.session("s").configure(on_message="steer")
    new = await requeue(stations, claim.run_id)
    claim = await stations.claim(new)
    await stations.step(claim, a_call("word_count"))
    mine, theirs = await said(stations, "ada"), await said(stations, "bob")
    hear = partial(steering.hear, claim=claim, step=1, after=claim.read_to)
    assert len(await stations.transact(hear)) == 2

    # Who had asked for it takes it back with a message that it heard; somebody else only their own word.
    assert await stations.transact(partial(cancelling.request, run_id=mine))
    while (await cancelling.walk(stations.database, aside=Aside())).settled:
        pass
    assert [await stations.state(run) for run in (new, mine, theirs)] == ["cancelled", "superseded", "queued"]


async def test_it_waits_for_its_turn(stations: Stations) -> None:
    old = await failed(stations, content="one")
    busy = await stations.claimed("s", "two")
    later = await stations.send("s", "three")
    await stations.place()

    new = await requeue(stations, old)

    assert (await stations.state(new), await active_run(stations)) == ("pending", busy.run_id)
    await stations.end(busy)
    # By its trigger's place it comes before what was asked later.
    assert (await stations.state(new), await stations.state(later)) == ("queued", "pending")
    await stations.end(await stations.claim(new))
    assert await stations.state(later) == "queued"


async def test_it_answers_the_trigger_and_sees_what_came_since(stations: Stations) -> None:
    old = await failed(stations, content="the question")
    await stations.end(await stations.claimed("s", "meanwhile"), "an answer")
    second = await requeue(stations, old)
    claim = await stations.claim(second)
    assert await triggers(stations, claim) == ["the question"]
    assert claim.read_to == 6
    await stations.end(claim, "again", state="failed", reason="model")

    third = await requeue(stations, second)

    assert await triggers(stations, await stations.claim(third)) == ["the question"]
    assert (await stations.run(third))["retry_of"] == second


async def test_one_that_goes_on_elsewhere_is_not_run_twice(stations: Stations) -> None:
    old = await failed(stations)
    second = await requeue(stations, old)
    with pytest.raises(AlreadyRequeued, match=f"was requeued as {second}, which is queued"):
        await requeue(stations, old)
    await stations.end(await stations.claim(second), "no", state="failed", reason="model")

    third = await requeue(stations, old)

    await stations.end(await stations.claim(third))
    with pytest.raises(AlreadyRequeued, match="which is succeeded"):
        await requeue(stations, old)


async def test_it_answers_the_messages_that_the_old_one_took(stations: Stations) -> None:
    messages = [await stations.say("s", f"message {n}", recipient="solo") for n in range(3)]
    await stations.place()
    await stations.end(await stations.claim(messages[0]), "no", state="failed", reason="model")
    assert await stations.state(messages[1]) == "superseded"

    new = await requeue(stations, messages[0])
    late = await stations.say("s", "a later one", recipient="solo")
    await stations.place()

    assert await triggers(stations, await stations.claim(new)) == ["message 0", "message 1", "message 2"]
    assert await stations.state(late) == "pending"


async def test_a_child_is_run_anew_for_nobody(stations: Stations) -> None:
    parent, (child,) = await stations.spawning("s")
    await stations.park(parent)
    await stations.end(await stations.claim(child, "child"), "no", state="failed", reason="model")
    resumed = await stations.claim(parent.run_id, "parent")

    new = await requeue(stations, child)

    row = await stations.run(new)
    assert (row["parent_run_id"], row["root_run_id"], row["depth"]) == (parent.run_id, parent.run_id, 1)
    await stations.end(await stations.claim(new, "child"), "at last")
    (wait,) = await stations.fetch("select answer from chaz.waits")
    assert "failed (model)" in wait["answer"]["content"]
    assert (await stations.run(parent.run_id))["attempt"] == resumed.attempt


async def test_a_child_stays_within_its_tree(stations: Stations, database: ScratchDatabase) -> None:
    parent = await stations.claimed("s", recipient="parent", budget=Budget(steps=9))
    await stations.step(parent, a_call("spawn_agent"))
    child = await stations.spawn(parent, timeout=60)
    await stations.place()
    await stations.end(await stations.claim(child, "child"), "no", state="failed", reason="model")

    new = await requeue(stations, child)

    (session,) = await stations.fetch("select deadline from chaz.sessions where parent_run_id is not null")
    row = await stations.run(new)
    assert (row["deadline"], row["root_run_id"]) == (session["deadline"], parent.run_id)
    (tree,) = await stations.fetch("select root_run_id, steps from chaz.tree_budgets")
    assert tree == {"root_run_id": parent.run_id, "steps": 1}

    await stations.end(await stations.claim(new, "child"), "no", state="failed", reason="model")
    database.query("update chaz.sessions set deadline = now() where deadline is not null")
    with pytest.raises(NotRequeueable, match=r"the time of its session was over at .*; requeue its tree's root"):
        await requeue(stations, new)


async def test_only_what_failed_or_was_cancelled(stations: Stations) -> None:
    with pytest.raises(UnknownRun):
        await requeue(stations, NOBODYS)

    run = await stations.send("s")
    await stations.place()
    with pytest.raises(NotRequeueable, match="is queued; only"):
        await requeue(stations, run)
    claim = await stations.claim(run)
    with pytest.raises(NotRequeueable, match="is running; only"):
        await requeue(stations, run)
    await stations.end(claim)
    with pytest.raises(NotRequeueable, match="is succeeded; only"):
        await requeue(stations, run)
    assert len(await stations.fetch("select from chaz.runs")) == 1

    cancelled = await stations.claimed("s")
    await stations.end(cancelled, "by ada", state="cancelled", reason="cancelled")
    assert await stations.state(await requeue(stations, cancelled.run_id)) == "queued"


async def test_an_agent_that_nobody_served_is_attached_again(stations: Stations) -> None:
    run = await stations.send("s", recipient="newcomer")
    await stations.place()
    await stations.fetch("select chaz.detach('s', 'newcomer')")
    await stations.close(run, "queued")

    await stations.register("newcomer")
    new = await requeue(stations, run)

    assert await stations.fetch("select agent, lead from chaz.attachments") == [{"agent": "newcomer", "lead": True}]
    await stations.claim(new, "newcomer")


async def test_of_two_at_once_one_is_active(stations: Stations) -> None:
    runs_failed = [await failed(stations), await failed(stations)]
    new = await asyncio.gather(*(requeue(stations, run) for run in runs_failed))
    assert sorted([await stations.state(run) for run in new]) == ["pending", "queued"]


async def test_what_failed_for_good_is_listed_with_why(stations: Stations) -> None:
    first, second = await failed(stations, "s"), await failed(stations, "t")
    await stations.end(await stations.claimed("u"))

    rows = await list_failed(stations.database, RunFilter())
    assert [(row["id"], row["session"]) for row in rows] == [(second, "t"), (first, "s")]
    assert (rows[0]["reason"], rows[0]["result"], rows[0]["attempt"], rows[0]["crashes"]) == (
        *("model", "it went wrong"),
        *(1, 0),
    )

    new = await requeue(stations, first)
    assert [row["id"] for row in await list_failed(stations.database, RunFilter())] == [second]
    await stations.end(await stations.claim(new), "again", state="failed", reason="model")
    assert [row["id"] for row in await list_failed(stations.database, RunFilter())] == [new, second]
    assert [row["id"] for row in await list_failed(stations.database, RunFilter(limit=1))] == [new]


async def test_the_producers_give_a_handle(stations: Stations, chaz: Chaz, database: ScratchDatabase) -> None:
    old = await failed(stations)
    handle = await asyncio.to_thread(chaz.requeue, str(old))
    assert await asyncio.to_thread(lambda: handle.state) == "queued"
    await stations.end(await stations.claim(handle.id), "at last")
    assert await asyncio.to_thread(handle.get, 10) == "at last"

    async with AsyncChaz(database.url) as producer:
        again = await producer.requeue(await failed(stations))
        assert await again.state() == "queued"
        with pytest.raises(UnknownRun):
            await producer.requeue("not an id")


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a command in this process: its exit code, and what it said."""
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    said = capsys.readouterr()
    assert isinstance(exit.value.code, int)
    return exit.value.code, said.out, said.err


@pytest.mark.parametrize("wrong", [("requeue",), ("failed", "x"), ("failed", "--state", "failed"), ("repeat",)])
def test_a_wrong_command_line_is_refused(capsys: pytest.CaptureFixture[str], wrong: tuple[str, ...]) -> None:
    code, out, said = command(capsys, "runs", *wrong)
    assert (code, out) == (2, "")
    assert "chaz runs: error: " in said


def test_a_run_that_goes_on_is_refused(
    capsys: pytest.CaptureFixture[str], chaz: Chaz, database: ScratchDatabase
) -> None:
    run = chaz.session("talk").direct("solo", "Hello").id
    assert command(capsys, "runs", "requeue", str(run), "--database", database.url) == (
        66,
        "",
        f"chaz: {UnknownRun(run)}\n",
    )
    database.query(
        """
        insert into chaz.runs (id, session_id, agent, state, cause, root_run_id, deadline)
        values (%(run)s, gen_random_uuid(), 'solo', 'queued', 'directive', %(run)s, now())
        """,
        run=run,
    )
    assert command(capsys, "runs", "requeue", str(run), "--database", database.url) == (
        65,
        "",
        f"chaz: run {run} is queued; only a run that failed or was cancelled can be requeued\n",
    )


def test_real_processes_run_it_anew(
    capsys: pytest.CaptureFixture[str], processes: Processes, database: ScratchDatabase
) -> None:
    here = ("--database", database.url)
    processes.stack()
    with Chaz(database.url) as chaz:
        old = chaz.session("talk").direct("solo", script({"error": "refused"}))
        with pytest.raises(RunFailed):
            old.get(30)

        code, listed, _ = command(capsys, "runs", "failed", *here)
        assert (code, listed.count("\n")) == (0, 2)
        assert f"{old.id}  solo" in listed
        assert "[talk] model: " in listed
        (row,) = map(json.loads, command(capsys, "runs", "failed", "--json", *here)[1].splitlines())
        assert (row["id"], row["agent"], row["session"], row["reason"]) == (str(old.id), "solo", "talk", "model")

        code, printed, _ = command(capsys, "runs", "requeue", str(old.id), *here)
        assert code == 0
        new = chaz.result(printed.strip())
        assert new.id != old.id
        # The same script, so the same end: it was on the same trigger.
        with pytest.raises(RunFailed, match="refused"):
            new.get(30)
        (row,) = map(json.loads, command(capsys, "runs", "failed", "--json", *here)[1].splitlines())
        assert (row["id"], row["retry_of"]) == (str(new.id), str(old.id))
