"""Children: what they inherit stands on their rows, what they may not have is refused, who may ask for their answer."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg.types.json import Jsonb

from chaz import children, completion, requeueing, runs
from chaz.database import Transaction
from chaz.errors import StaleAttempt
from chaz.outcomes import CallOutcome, RunOutcome
from chaz.runs import Claim
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations, a_call

pytestmark = pytest.mark.anyio

READER = runs.Served(
    "reader", "reader", "v1", 5, timedelta(minutes=1), ["read", "web.search", "web.fetch"], ["scripted", "openai:*"]
)


@pytest.fixture
async def parent(stations: Stations) -> Claim:
    """A claimed run of ``parent`` that may start six calls; ``reader`` is registered with all of its limits."""
    await stations.transact(lambda tx: runs.register_agents(tx, [READER]))
    claim = await stations.claimed("s", recipient="parent")
    await stations.step(claim, *[a_call("spawn_agent")] * 6)
    return claim


# What a child inherits

LIMITS = ("depth", "depth_left", "scope", "model", "max_steps", "root_run_id")


async def test_what_a_child_inherits_stands_on_its_row(stations: Stations, parent: Claim) -> None:
    wanted: dict[str, Any] = {
        "model": "openai:small",
        "max_steps": 3,
        "timeout": 30,
        "tools": ["web.*"],
        "scope": (["*"], ["web.*"]),
        "depth_left": 2,
    }
    child = await stations.spawn(parent, agent="reader", **wanted)
    await stations.place()
    run = await stations.run(child)
    assert {name: run[name] for name in LIMITS} == {
        "depth": 1,
        "depth_left": 2,
        "scope": [["*"], ["web.*"]],
        "model": "openai:small",
        "max_steps": 3,
        "root_run_id": parent.run_id,
    }
    assert timedelta(seconds=20) < run["deadline"] - run["created_at"] <= timedelta(seconds=30)
    claim = await stations.claim(child, "reader")
    assert (claim.depth_left, claim.scope, claim.model, claim.max_steps) == (2, [["*"], ["web.*"]], "openai:small", 3)


async def test_a_child_is_its_parent_s_tenant_s(stations: Stations) -> None:
    claim = await stations.claimed("s", recipient="parent", tenant="acme")
    await stations.step(claim, a_call("spawn_agent"))
    child = await stations.spawn(claim)
    await stations.place()
    tenants = "select r.tenant, s.tenant as of_session, e.tenant as of_entry from chaz.runs r "
    (row,) = await stations.fetch(
        tenants + "join chaz.sessions s on s.id = r.session_id join chaz.entries e on e.id = r.id where r.id = %(id)s",
        id=child,
    )
    assert row == {"tenant": "acme", "of_session": "acme", "of_entry": "acme"}


async def test_another_run_in_the_child_s_session_has_the_same_limits(stations: Stations, parent: Claim) -> None:
    child = await stations.spawn(parent, agent="reader", max_steps=3, timeout=30, scope=([],), depth_left=0)
    await stations.place()
    first = await stations.run(child)
    later = await stations.send(str(first["session_id"]), recipient="solo")
    await stations.place()
    second = await stations.run(later)
    assert {name: second[name] for name in LIMITS} == {name: first[name] for name in LIMITS}
    assert (second["max_steps"], second["scope"], second["depth_left"]) == (3, [[]], 0)
    assert second["deadline"] == first["deadline"]
    assert second["parent_run_id"] is None


async def test_a_requeued_child_has_the_same_limits(stations: Stations, parent: Claim) -> None:
    child = await stations.spawn(parent, agent="reader", model="scripted", max_steps=3, scope=([],), depth_left=1)
    await stations.place()
    await stations.end(await stations.claim(child, "reader"), state="failed", reason="model")
    again = await stations.run(await stations.transact(lambda tx: requeueing.requeue(tx, child)))
    first = await stations.run(child)
    assert {name: again[name] for name in LIMITS} == {name: first[name] for name in LIMITS}


async def test_a_child_has_no_more_time_than_its_parent(stations: Stations) -> None:
    claim = await stations.claimed("s", recipient="parent", timeout=timedelta(seconds=20))
    await stations.step(claim, a_call("spawn_agent"))
    child = await stations.spawn(claim)
    await stations.place()
    assert (await stations.run(child))["deadline"] == (await stations.run(claim.run_id))["deadline"]


async def test_what_a_model_wrote_is_stored_whatever_it_holds(stations: Stations, parent: Claim) -> None:
    child = await stations.spawn(parent, agent="a\0b", model="m\0\ud800", scope=(["a\0\ud800"],), tools=["a\0\ud800"])
    await stations.place()
    assert (await stations.run(child))["agent"] == "a\ufffdb"


# What is refused

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"max_steps": 6}, "not_allowed", "'reader' takes 5 steps at most"),
    ({"timeout": 61}, "not_allowed", "'reader' takes 60 s at most"),
    ({"timeout": 4000}, "past_deadline", "s left yourself"),
    ({"model": "scripted:dear"}, "not_allowed", "it may be: scripted, openai:*"),
    ({"tools": ["db.*"], "scope": (["db.*"],)}, "not_allowed", "it may have: read, web.search, web.fetch"),
    ({"tools": ["read"], "scope": (["web.*"], ["read"])}, "not_allowed", "it may have: web.search, web.fetch"),
    ({"tools": ["web.*", "writ"], "scope": (["web.*", "writ"],)}, "not_allowed", "no tool 'writ' here"),
    ({"tools": ["read"], "scope": ([], ["read"])}, "not_allowed", "it may have: none"),
]


@pytest.mark.parametrize(("wanted", "word", "told"), REFUSED)
async def test_what_the_other_agent_may_not_have_is_refused(
    stations: Stations, parent: Claim, wanted: dict[str, Any], word: str, told: str
) -> None:
    outcome = await stations.try_to_spawn(parent, agent="reader", **wanted)
    assert outcome is not None
    assert (outcome.kind, outcome.error) == ("error", word)
    assert outcome.content.startswith(f"{word}: ")
    assert told in outcome.content
    # Refused in the transaction of the call: there is nothing to wait for, and nobody to answer.
    assert await stations.fetch("select state, outcome, error from chaz.calls") == [
        {"state": "done", "outcome": "error", "error": word}
    ]
    assert await stations.fetch("select from chaz.waits") == []
    assert await stations.fetch("select from chaz.sessions where parent_run_id is not null") == []


GRANTED: list[dict[str, Any]] = [
    {"max_steps": 5},
    {"timeout": 60},
    {"model": "openai:any"},
    {"tools": [], "scope": ([],)},
    {"tools": ["web.*"], "scope": (["web.*"], ["web.*"])},
    {"tools": ["read"], "scope": (["*"], ["read"])},
]


@pytest.mark.parametrize("wanted", GRANTED)
async def test_what_it_may_have_is_granted(stations: Stations, parent: Claim, wanted: dict[str, Any]) -> None:
    assert await stations.try_to_spawn(parent, agent="reader", **wanted) is None


async def test_an_agent_that_may_be_starting_is_waited_for(stations: Stations, parent: Claim) -> None:
    assert await stations.try_to_spawn(parent, agent="newcomer", max_steps=999, tools=["x"], scope=(["x"],)) is None


async def test_past_its_deadline_nobody_spawns(stations: Stations, parent: Claim, database: ScratchDatabase) -> None:
    database.query("update chaz.runs set deadline = now() - interval '1 s'")
    outcome = await stations.try_to_spawn(parent)
    assert outcome is not None
    assert outcome.error == "past_deadline"


async def test_a_used_up_budget_refuses_a_spawn(stations: Stations, parent: Claim, database: ScratchDatabase) -> None:
    database.query("update chaz.tree_budgets set max_tokens = 1, tokens = 1")
    outcome = await stations.try_to_spawn(parent)
    assert outcome is not None
    assert (outcome.error, outcome.content) == (
        "over_budget",
        "over_budget: the budget of this tree of runs is used up",
    )


async def test_the_last_step_of_a_budget_is_not_spent_on_a_child(
    stations: Stations, parent: Claim, database: ScratchDatabase
) -> None:
    # One is stored; with one more the parent answers.
    database.query("update chaz.tree_budgets set max_steps = 2")
    outcome = await stations.try_to_spawn(parent)
    assert outcome is not None
    assert outcome.error == "over_budget"
    database.query("update chaz.tree_budgets set max_steps = 3")
    assert await stations.try_to_spawn(parent, ordinal=1) is None


async def test_a_directive_that_placing_refuses_answers_the_parent(
    stations: Stations, parent: Claim, database: ScratchDatabase
) -> None:
    child = uuid4()
    waiting = await stations.spawn(parent)
    await stations.park(parent)
    # As from a version that writes options which this one does not know.
    with database.connect() as connection:
        connection.execute("update chaz.waits set child_run_id = %s", [child])
        connection.execute(
            """
            insert into chaz.entries (id, session_id, type, sender, author, recipient, content, run_id, metadata)
            select %s, session_id, type, sender, author, recipient, content, run_id, %s
            from chaz.entries where id = %s
            """,
            [child, Jsonb({"options": {"speed": 9}}), waiting],
        )
    await stations.place()
    assert await stations.state(child) == "failed"
    assert await stations.state(parent.run_id) == "queued"
    (wait,) = await stations.fetch("select answer from chaz.waits")
    assert wait["answer"]["error"] == "failed"
    assert "speed" in wait["answer"]["content"]


# Asking for an answer


async def test_without_waiting_the_result_is_the_child_s_id(stations: Stations, parent: Claim) -> None:
    outcome = await stations.try_to_spawn(parent, wait=False)
    assert outcome is not None
    await stations.place()
    (child,) = await stations.fetch("select id from chaz.runs where parent_run_id = %(p)s", p=parent.run_id)
    assert outcome == CallOutcome(kind="ok", content=str(child["id"]))
    assert await stations.fetch("select from chaz.waits") == []
    assert not await stations.park(parent)


async def test_an_answer_is_awaited_or_read(stations: Stations, parent: Claim) -> None:
    child = await stations.spawn(parent, wait=False)
    await stations.place()
    assert await stations.ask_for(parent, child, ordinal=1) is None
    assert await stations.park(parent)
    await stations.end(await stations.claim(child, "child"), "42")
    assert await stations.state(parent.run_id) == "queued"
    answer = CallOutcome(kind="ok", content="42")
    (wait,) = await stations.fetch("select answer from chaz.waits")
    assert CallOutcome.model_validate(wait["answer"]) == answer
    # It is there for as often as it is asked for, and of whom it is told alike.
    claim = await stations.claim(parent.run_id, "parent")
    assert await stations.ask_for(claim, child, ordinal=2) == answer


async def test_one_child_may_be_awaited_twice(stations: Stations, parent: Claim) -> None:
    child = await stations.spawn(parent)
    assert await stations.ask_for(parent, child, ordinal=1) is None
    assert await stations.ask_for(parent, child, ordinal=2) is None
    await stations.place()
    await stations.park(parent)
    await stations.end(await stations.claim(child, "child"), "42")
    assert await stations.state(parent.run_id) == "queued"
    assert await stations.fetch("select from chaz.waits where answer is null") == []


async def test_a_child_that_nobody_has_placed_is_awaited(stations: Stations, parent: Claim) -> None:
    child = await stations.spawn(parent, wait=False)
    assert await stations.ask_for(parent, child, ordinal=1) is None


@pytest.mark.parametrize("reason", ["model", "deadline", "budget"])
async def test_what_is_read_is_what_would_have_been_told(stations: Stations, parent: Claim, reason: str) -> None:
    child = await stations.spawn(parent)
    await stations.place()
    await stations.end(await stations.claim(child, "child"), "no luck", state="failed", reason=reason)
    (wait,) = await stations.fetch("select answer from chaz.waits")
    assert await stations.ask_for(parent, child, ordinal=1) == CallOutcome.model_validate(wait["answer"])


async def test_one_s_own_descendants_only(stations: Stations, parent: Claim) -> None:
    child = await stations.spawn(parent, agent="parent", wait=False)
    await stations.place()
    of_child = await stations.claim(child, "parent")
    await stations.step(of_child, *[a_call("spawn_agent")] * 5)
    grandchild, sibling = [await stations.spawn(of_child, ordinal=n, wait=False) for n in range(2)]
    await stations.place()
    of_sibling = await stations.claim(sibling, "child")
    await stations.step(of_sibling, *[a_call("agent_result")] * 4)
    stranger = await stations.claimed("other")
    later = await stations.send(str(of_child.session_id), recipient="parent")
    await stations.place()

    async def word(claim: Claim, child: UUID, ordinal: int) -> str:
        outcome = await stations.ask_for(claim, child, ordinal=ordinal)
        return "" if outcome is None else outcome.error

    # A child and a grandchild.
    assert [await word(parent, each, n) for n, each in enumerate((child, grandchild), 1)] == ["", ""]
    # Oneself, one's parent, one's sibling; what came into a child's session from elsewhere; others; nobody.
    assert await word(of_child, child, 2) == "unknown_run"
    assert await word(of_child, parent.run_id, 3) == "unknown_run"
    assert await word(of_sibling, grandchild, 0) == "unknown_run"
    assert await word(parent, later, 3) == "unknown_run"
    assert await word(parent, stranger.run_id, 4) == "unknown_run"
    assert await word(parent, uuid4(), 5) == "unknown_run"


async def test_what_a_descendant_said_is_no_descendant(stations: Stations, parent: Claim) -> None:
    child = await stations.spawn(parent, wait=False)
    await stations.place()
    await stations.end(await stations.claim(child, "child"), "42")
    (answer,) = await stations.fetch("select id from chaz.entries where type = 'message' and content = '42'")
    # To wait for it would be to wait for ever.
    outcome = await stations.ask_for(parent, answer["id"], ordinal=1)
    assert outcome is not None
    assert outcome.error == "unknown_run"


async def test_an_end_that_is_being_committed_is_waited_for(
    stations: Stations, parent: Claim, database: ScratchDatabase
) -> None:
    child = await stations.spawn(parent, wait=False)
    await stations.place()
    of_child = await stations.claim(child, "child")
    ended, released = asyncio.Event(), asyncio.Event()

    async def end(tx: Transaction) -> None:
        await completion.end_run(tx, of_child, RunOutcome(state="succeeded", text="42"))
        ended.set()
        await released.wait()

    ending = asyncio.create_task(stations.transact(end))
    await ended.wait()
    asking = asyncio.create_task(stations.ask_for(parent, child, ordinal=1))
    await asyncio.to_thread(database.until_blocked)
    released.set()
    await ending
    # Else it would wait for an end that has been.
    assert await asking == CallOutcome(kind="ok", content="42")


# Whose commit was in doubt


async def test_what_this_attempt_has_stored_is_told_and_no_other_s(stations: Stations, parent: Claim) -> None:
    async def told(claim: Claim, ordinal: int) -> tuple[int, CallOutcome | None] | None:
        asked = await stations.transact(partial(children.told, claim=claim, step=0, ordinal=ordinal))
        return None if asked is None else (len(asked.events), asked.outcome)

    assert await told(parent, 0) is None
    await stations.spawn(parent)
    assert await told(parent, 0) == (1, None)
    refused = await stations.try_to_spawn(parent, ordinal=1, agent="reader", max_steps=6)
    assert await told(parent, 1) == (2, refused)

    await stations.give_back(parent)
    again = await stations.claim(parent.run_id, "parent")
    assert [await told(again, ordinal) for ordinal in (0, 1)] == [None, None]
    with pytest.raises(StaleAttempt):
        await told(parent, 0)


async def test_an_end_that_answers_several_locks_the_deepest_first(stations: Stations) -> None:
    root, (mid_run,) = await stations.spawning("s")
    mid = await stations.claim(mid_run, "child")
    await stations.step(mid, a_call("spawn_agent"))
    leaf_run = await stations.spawn(mid)
    await stations.place()
    leaf = await stations.claim(leaf_run, "child")
    await stations.step(root, a_call("agent_result"), step=1)
    assert await stations.ask_for(root, leaf_run, step=1) is None

    with stations.scratch.connect() as holder, stations.scratch.connect() as other:
        holder.execute("select from chaz.runs where id = %s for update", [mid_run])
        ending = asyncio.create_task(stations.end(leaf))
        await asyncio.to_thread(stations.scratch.until_blocked, 1)
        other.execute("select from chaz.runs where id = %s for update nowait", [root.run_id])
        other.rollback()
        holder.rollback()
        await ending
