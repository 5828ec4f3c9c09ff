"""The budget of a tree: held for a step and settled with it, so that no crash and no race leaks or doubles it."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import pytest

from chaz import Budget, Chaz, requeueing, sweeps
from chaz.outcomes import Usage
from chaz.runs import Claim
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations, a_call

pytestmark = pytest.mark.anyio


async def settle(stations: Stations, claim: Claim, *, step: int = 0, tokens: int = 1, cost: str = "0") -> None:
    used = Usage(prompt=tokens)
    await stations.step(claim, *[a_call("spawn_agent")] * 5, step=step, usage=used, cost=cost)


async def tree(stations: Stations, kind: str = "steps") -> tuple[Any, Any]:
    """What is settled and what is held; the latter is also what the runs hold."""
    (row,) = await stations.fetch("select * from chaz.tree_budgets")
    (held,) = await stations.fetch(
        """
        select count(reserved_step) as steps, sum(reserved_tokens) as tokens, sum(reserved_cost) as cost from chaz.runs
        """
    )
    assert {name: row[f"reserved_{name}"] for name in held} == held
    return row[kind], row[f"reserved_{kind}"]


async def root(stations: Stations, budget: Budget, children: int = 0) -> tuple[Claim, list[Claim]]:
    """A claimed root with this budget and, after a first step that uses one token, its claimed children."""
    claim = await stations.claimed("s", recipient="parent", budget=budget)
    if not children:
        return claim, []
    await settle(stations, claim)
    spawned = [await stations.spawn(claim, ordinal=n) for n in range(children)]
    await stations.place()
    return claim, [await stations.claim(child, "child") for child in spawned]


async def test_a_step_is_held_then_settled(stations: Stations) -> None:
    claim, _ = await root(stations, Budget(steps=5, tokens=100, cost=1.0))
    assert claim.limited
    assert await stations.reserve(claim, tokens=30, cost="0.2") == "free"
    assert (await tree(stations, "steps"), await tree(stations, "tokens")) == ((0, 1), (0, 30))
    assert await tree(stations, "cost") == (0, Decimal("0.2"))
    await settle(stations, claim, tokens=40, cost="0.3")
    assert (await tree(stations, "steps"), await tree(stations, "tokens")) == ((1, 0), (40, 0))
    assert await tree(stations, "cost") == (Decimal("0.3"), 0)


async def test_a_step_that_held_nothing_is_settled_too(stations: Stations) -> None:
    claim = await stations.claimed("s")
    assert not claim.limited
    await settle(stations, claim, tokens=40)
    assert await tree(stations, "tokens") == (40, 0)


async def test_the_same_step_reserved_again_is_held_once(stations: Stations) -> None:
    claim, _ = await root(stations, Budget(steps=5))
    for _ in range(3):
        assert await stations.reserve(claim) == "free"
    assert await tree(stations) == (0, 1)


async def test_a_crash_neither_leaks_nor_doubles(stations: Stations) -> None:
    claim, _ = await root(stations, Budget(steps=2, tokens=100))
    await settle(stations, claim)
    await stations.reserve(claim, step=1, tokens=99)
    stations.beat(timedelta(0))
    await sweeps.rescue_lost(stations.database)
    assert await tree(stations) == (1, 1)
    stations.beat(timedelta(hours=1))
    again = await stations.claim(claim.run_id, "parent")
    # All that is left is its own, and the next attempt takes it over.
    assert await stations.reserve(again, step=1, tokens=99) == "last"
    assert await tree(stations) == (1, 1)
    await settle(stations, again, step=1, tokens=99)
    assert await tree(stations) == (2, 0)
    assert await stations.reserve(again, step=2) == "none"


@pytest.mark.parametrize("how", ["end", "close", "give_back"])
async def test_whatever_a_run_leaves_by_it_gives_back_what_it_held(stations: Stations, how: str) -> None:
    claim, _ = await root(stations, Budget(steps=5, tokens=100, cost=1.0))
    await stations.reserve(claim, cost="0.2")
    match how:
        case "end":
            await stations.end(claim)
        case "close":
            assert await stations.close(claim.run_id, "running") is not None
        case _:
            await stations.give_back(claim)
    assert [await tree(stations, kind) for kind in ("steps", "tokens", "cost")] == [(0, 0)] * 3


async def test_who_comes_last_waits_until_others_have_settled(stations: Stations) -> None:
    _, (one, two) = await root(stations, Budget(tokens=101), children=2)
    assert await stations.reserve(one, tokens=5000) == "free"
    # It holds what was left, not what it wished for.
    assert await tree(stations, "tokens") == (1, 100)
    assert await stations.reserve(two) == "held"
    await settle(stations, one, tokens=60)
    assert await stations.reserve(two) == "free"
    await settle(stations, two, tokens=60)
    # The last step may use more than there was; after that there are none.
    assert await tree(stations, "tokens") == (121, 0)
    assert await stations.reserve(one, step=1) == "none"


async def test_of_a_cost_too_it_holds_what_is_left(stations: Stations) -> None:
    _, (one, two) = await root(stations, Budget(cost=0.5), children=2)
    assert await stations.reserve(one, cost="3") == "free"
    assert await tree(stations, "cost") == (0, Decimal("0.5"))
    assert await stations.reserve(two, cost="0.1") == "held"


@pytest.mark.parametrize("budget", [Budget(steps=1), Budget(tokens=1), Budget(cost=0.5)])
async def test_each_limit_ends_the_tree(stations: Stations, budget: Budget) -> None:
    claim, _ = await root(stations, budget)
    assert claim.limited, "or no step of it would be held"
    assert await stations.reserve(claim) != "none"
    await settle(stations, claim, cost="0.5")
    assert await stations.reserve(claim, step=1) == "none"


async def test_many_at_once_take_no_more_steps_than_there_are(stations: Stations) -> None:
    _, children = await root(stations, Budget(steps=4), children=5)
    rooms = await asyncio.gather(*(stations.reserve(child) for child in children))
    assert sorted(rooms) == ["free", "free", "held", "held", "last"]
    assert await tree(stations) == (1, 3)


async def test_the_agent_s_own_budget_is_a_ceiling_for_the_root_alone(stations: Stations) -> None:
    parent, (child,) = await root(stations, Budget(steps=10, tokens=50), children=1)
    await stations.reserve(child, budget=Budget(steps=1))
    await stations.reserve(parent, step=1, budget=Budget(steps=5, tokens=80, cost=2.0))
    limits = "select max_steps, max_tokens, max_cost from chaz.tree_budgets"
    assert await stations.fetch(limits) == [{"max_steps": 5, "max_tokens": 50, "max_cost": 2}]
    # A ceiling raises nothing.
    await stations.reserve(parent, step=1, budget=Budget(steps=9, tokens=90, cost=9.0))
    assert await stations.fetch(limits) == [{"max_steps": 5, "max_tokens": 50, "max_cost": 2}]


async def test_so_it_is_for_a_run_that_takes_the_root_s_place(stations: Stations) -> None:
    old = await stations.send("s")
    await stations.place()
    await stations.close(old, "queued")
    again = await stations.claim(await stations.transact(partial(requeueing.requeue, run_id=old)))
    assert (again.is_top, again.limited) == (True, False)
    assert await stations.reserve(again, budget=Budget(steps=1)) == "last"


async def test_a_message_that_was_refused_keeps_its_budget_when_it_is_requeued(stations: Stations, chaz: Chaz) -> None:
    chaz.session("s").configure(on_message="reject")
    busy = await stations.claimed("s")
    refused = chaz.session("s").say("and?", budget=Budget(steps=1), priority=7)
    await stations.place()
    await stations.end(busy)
    again = await stations.claim(await stations.transact(partial(requeueing.requeue, run_id=refused.id)))
    assert again.limited
    assert (await stations.run(again.run_id))["priority"] == 7


# What a producer says


async def test_a_producer_s_budget_is_the_tree_s(chaz: Chaz, stations: Stations) -> None:
    chaz.session("s").direct("solo", "hello", budget=Budget(steps=3, cost=0.25))
    await stations.place()
    (row,) = await stations.fetch("select max_steps, max_tokens, max_cost from chaz.tree_budgets")
    assert row == {"max_steps": 3, "max_tokens": None, "max_cost": Decimal("0.25")}


async def test_a_budget_of_other_things_is_refused_at_the_door(database: ScratchDatabase) -> None:
    for wrong in ("[1]", '{"stepps": 3}'):
        with pytest.raises(Exception, match="a budget is a JSON object of steps, tokens and cost"):
            database.query("select chaz.send('s', 'message', 'ada', 'hi', budget => %(b)s::jsonb)", b=wrong)


async def test_a_budget_of_nothing_is_refused(stations: Stations, database: ScratchDatabase) -> None:
    database.query("""select chaz.send('s', 'directive', 'ada', 'hi', recipient => 'solo', budget => '{"steps": 0}')""")
    await stations.place()
    (run,) = await stations.fetch("select state, reason, result from chaz.runs")
    assert (run["state"], run["reason"]) == ("failed", "invalid")
    assert "metadata.options.budget.steps" in run["result"]
