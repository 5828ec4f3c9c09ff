"""The end of a run: one transaction, with no moment at which a part of it is true."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from uuid import uuid4

import pytest
from psycopg import sql

from chaz.channels import DONE
from chaz.completion import end_run
from chaz.database import Transaction
from chaz.errors import StaleAttempt
from chaz.outcomes import RunOutcome
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations, a_call

pytestmark = pytest.mark.anyio


async def answers(stations: Stations) -> list[dict[str, str]]:
    return [row["answer"] for row in await stations.fetch("select answer from chaz.waits where answer is not null")]


async def test_all_of_the_end_is_true_at_once(stations: Stations, database: ScratchDatabase) -> None:
    parent, (child,) = await stations.spawning("s")
    await stations.park(parent)
    claim = await stations.claim(child, "child")
    database.query(
        """
        insert into chaz.entries (session_id, type, sender, recipient, content)
        values (%(s)s, 'directive', 'ada', 'child', 'next')
        """,
        s=claim.session_id,
    )
    await stations.place()

    async def end_watched(tx: Transaction) -> None:
        await end_run(tx, claim, RunOutcome(state="succeeded", text="42"))
        # Before the commit nobody sees any of it.
        assert database.value("select state from chaz.runs where id = %(id)s", id=child) == "running"
        assert database.value("select count(*) from chaz.entries where content = '42'") == 0

    await stations.transact(end_watched)

    row = await stations.run(child)
    assert (row["state"], row["result"], row["reason"], row["worker_id"]) == ("succeeded", "42", None, None)
    assert row["ended_at"] is not None
    (closing,) = await stations.fetch("select * from chaz.entries where content = '42'")
    assert (closing["type"], closing["sender"], closing["author"], closing["run_id"]) == (
        "message",
        "child",
        "agent",
        child,
    )
    (following,) = await stations.fetch(
        "select state, id from chaz.runs where session_id = %(s)s and id <> %(c)s", s=claim.session_id, c=child
    )
    assert following["state"] == "queued"
    (head,) = await stations.fetch("select active_run from chaz.heads where session_id = %(s)s", s=claim.session_id)
    assert head["active_run"] == following["id"]
    assert await stations.state(parent.run_id) == "queued"
    assert await answers(stations) == [{"kind": "ok", "content": "42", "error": ""}]


async def test_an_answer_that_fails_halfway_leaves_nothing(stations: Stations) -> None:
    claim = await stations.claimed("s")

    async def end_and_break(tx: Transaction) -> None:
        await end_run(tx, claim, RunOutcome(state="succeeded", text="42"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await stations.transact(end_and_break)
    assert await stations.state(claim.run_id) == "running"
    assert [entry.type for entry in await stations.log("s")] == ["directive", "ack"]


@pytest.mark.parametrize("blank", ["", " \n\t"])
async def test_a_blank_answer_writes_no_message(stations: Stations, blank: str) -> None:
    claim = await stations.claimed("s")
    await stations.end(claim, blank)
    run = await stations.run(claim.run_id)
    assert (run["state"], run["result"]) == ("succeeded", "")
    assert [entry.type for entry in await stations.log("s")] == ["directive", "ack"]


async def test_a_failure_writes_an_error_and_frees_the_session(stations: Stations) -> None:
    claim = await stations.claimed("s")
    following = await stations.send("s")
    await stations.place()
    await stations.end(claim, "no luck", state="failed", reason="model")
    error = (await stations.log("s"))[-1]
    assert (error.type, error.content, error.sender, error.author) == ("error", "no luck", "chaz", "system")
    assert error.metadata == {"state": "failed", "reason": "model", "agent": "solo"}
    assert await stations.state(following) == "queued"


async def test_an_answer_that_postgresql_cannot_hold_is_made_safe(stations: Stations) -> None:
    claim = await stations.claimed("s")
    await stations.end(claim, "a\0b" + "x" * 2_000_000)
    (_, _, closing) = await stations.log("s")
    assert closing.content.startswith("a\ufffdbxxx")
    assert closing.content.endswith("2000003 characters, 1048576 kept]")
    assert len(closing.content) == 1_048_576


async def test_open_calls_are_closed_with_a_result_each(stations: Stations) -> None:
    claim = await stations.claimed("s", recipient="parent")
    await stations.step(claim, *[a_call("word_count")] * 3)
    await stations.start_call(claim, ordinal=0)
    await stations.finish_call(claim, ordinal=0)
    await stations.start_call(claim, ordinal=1)
    await stations.spawn(claim, ordinal=2)

    events = await stations.end(claim, "no time", state="failed", reason="deadline")

    assert [(event.ordinal, event.kind, event.outcome, event.seq) for event in events] == [
        (1, "tool_result", "unknown", 5),
        (2, "tool_result", "cancelled", 6),
    ]
    rows = await stations.fetch("select state, outcome, result_seq from chaz.calls order by ordinal")
    assert [(row["state"], row["outcome"], row["result_seq"]) for row in rows] == [
        ("done", "ok", 2),
        ("done", "unknown", 5),
        ("done", "cancelled", 6),
    ]
    assert (await stations.run(claim.run_id))["event_seq"] == 6


async def test_the_digest_is_that_of_the_events(stations: Stations) -> None:
    claim = await stations.claimed("s")
    await stations.step(claim, *[a_call("word_count")] * 2)
    events = [await stations.start_call(claim), await stations.finish_call(claim)]
    events += [await stations.start_call(claim, ordinal=1)]
    events += await stations.end(claim)
    digest = b""
    for event in events:
        digest = sha256(digest + event.body.encode()).digest()
    assert [event.seq for event in events] == [1, 2, 3, 4]
    assert (await stations.run(claim.run_id))["digest"] == digest


@pytest.mark.parametrize(
    ("state", "kind", "told"),
    [
        ("failed", "error", "failed: agent child failed (model): too bad"),
        ("cancelled", "cancelled", "cancelled: agent child was cancelled (model): too bad"),
    ],
)
async def test_the_parent_is_told_how_its_child_ended(stations: Stations, state: str, kind: str, told: str) -> None:
    parent, (child,) = await stations.spawning("s")
    await stations.park(parent)
    await stations.end(await stations.claim(child, "child"), "too bad", state=state, reason="model")
    assert await answers(stations) == [{"kind": kind, "content": told, "error": state}]


async def test_the_parent_is_answered_exactly_once(stations: Stations) -> None:
    parent, (child,) = await stations.spawning("s")
    await stations.park(parent)
    claim = await stations.claim(child, "child")
    # The worker's end and the sweep's at the same time, again and again.
    ends = await asyncio.gather(
        *(stations.end(claim, "mine") for _ in range(3)),
        *(stations.close(child, "running") for _ in range(3)),
        return_exceptions=True,
    )
    assert sum(isinstance(end, StaleAttempt) for end in ends) >= 2
    assert not [end for end in ends if isinstance(end, Exception) and not isinstance(end, StaleAttempt)]
    assert len(await answers(stations)) == 1
    (row,) = await stations.fetch(
        "select count(*) from chaz.entries where run_id = %(c)s and type in ('message', 'error')", c=child
    )
    assert row["count"] == 1


async def test_a_parent_that_has_ended_is_left_alone(stations: Stations) -> None:
    parent, (child,) = await stations.spawning("s")
    await stations.end(parent, "without it")
    await stations.end(await stations.claim(child, "child"), "too late")
    row = await stations.run(parent.run_id)
    assert (row["state"], row["result"]) == ("succeeded", "without it")


async def test_from_outside_a_run_is_ended_in_the_states_named_only(stations: Stations) -> None:
    claim = await stations.claimed("s")
    assert await stations.close(claim.run_id, "pending", "queued", "parked") is None
    assert await stations.state(claim.run_id) == "running"
    assert await stations.close(claim.run_id, "running") == []
    assert await stations.state(claim.run_id) == "failed"
    assert await stations.close(uuid4(), "running") is None


async def test_the_end_of_a_waiting_run_leaves_the_active_one(stations: Stations) -> None:
    active, waiting, third = [await stations.send("s") for _ in range(3)]
    await stations.place()
    await stations.close(waiting, "pending")
    assert [await stations.state(run) for run in (active, waiting, third)] == ["queued", "failed", "pending"]
    await stations.end(await stations.claim(active))
    assert await stations.state(third) == "queued"


async def test_the_more_urgent_goes_next(stations: Stations) -> None:
    claim = await stations.claimed("s")
    runs = [await stations.send("s", priority=priority) for priority in (0, 3, 3, 1)]
    await stations.place()
    order = [claim.run_id]
    await stations.end(claim)
    while queued := await stations.fetch("select id from chaz.runs where state = 'queued'"):
        order.append(queued[0]["id"])
        await stations.end(await stations.claim(queued[0]["id"]))
    assert order[1:] == [runs[1], runs[2], runs[3], runs[0]]


@pytest.mark.parametrize("somebody", [True, False])
async def test_an_end_is_notified_if_somebody_waits(
    stations: Stations, database: ScratchDatabase, somebody: bool
) -> None:
    claim = await stations.claimed("s")
    expires = "1 minute" if somebody else "-1 second"
    database.query(
        "insert into chaz.waiters (id, expires_at) values (gen_random_uuid(), now() + %(e)s::interval)", e=expires
    )
    with database.connect(autocommit=True) as ear:
        ear.execute(sql.SQL("listen {}").format(sql.Identifier(DONE)))
        await stations.end(claim)
        ear.execute("select 1")
        heard = [notify.payload for notify in ear.notifies(timeout=0)]
    assert heard == [str(claim.run_id)] * somebody
