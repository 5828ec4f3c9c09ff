"""Usage: each call of a model is booked once, with what it cost or that nobody knows, and told by whatever is asked."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from chaz import AsyncChaz, Budget, Chaz, InvalidEntry, Spent, UnknownSession, journal, requeueing, usage
from chaz.database import DatabaseUnavailable, Transaction
from chaz.errors import InvalidQuery, StaleAttempt
from chaz.outcomes import Turn, Usage
from chaz.runs import Claim
from chaz.writes import surely
from tests.fixtures.commands import command
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations, a_call

pytestmark = pytest.mark.anyio

USED = Usage(prompt=100, completion=20, cached=60, reasoning=5)


async def used(stations: Stations, session: str, *costs: str | None, **fields: Any) -> Claim:
    """A claimed run that has stored a turn for each of these costs."""
    claim = await stations.claimed(session, **fields)
    for step, cost in enumerate(costs):
        await stations.step(claim, a_call("spawn_agent"), step=step, usage=USED, cost=cost)
    return claim


def brief(rows: list[dict[str, Any]], *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(row[key] for key in keys) for row in rows]


async def test_a_handle_knows_what_its_run_used(stations: Stations, chaz: Chaz) -> None:
    assert chaz.result((await used(stations, "none")).run_id).usage == Spent()
    known = chaz.result((await used(stations, "known", "0.1", "0.2")).run_id).usage
    assert known == Spent(
        prompt=200, completion=40, cached=120, reasoning=10, calls=2, known_cost=0.3, unpriced_calls=0
    )
    assert known.cost == 0.3
    part = chaz.result((await used(stations, "part", "0.1", None)).run_id).usage
    assert (part.cost, part.known_cost, part.unpriced_calls) == (None, 0.1, 1)


async def test_it_is_told_by_whatever_is_asked(stations: Stations, chaz: Chaz) -> None:
    top = await used(stations, "s", "1", recipient="parent")
    child = await stations.spawn(top)
    await stations.place()
    await stations.step(await stations.claim(child, "child"), usage=USED, cost=None, model="openai:x")
    other = await used(stations, "t", "2", "2")
    keys = ("calls", "prompt", "cost", "known_cost", "unpriced_calls")

    assert brief(chaz.usage(), *keys) == [(4, 400, None, 5.0, 1)]
    by_agent = [("solo", 2, 200, 4.0, 4.0, 0), ("parent", 1, 100, 1.0, 1.0, 0), ("child", 1, 100, None, 0.0, 1)]
    assert brief(chaz.usage("agent"), "agent", *keys) == by_agent
    assert brief(chaz.usage("model"), "model", "calls") == [("scripted", 3), ("openai:x", 1)]
    sessions = brief(chaz.usage(["session", "tenant"]), "session", "tenant", "calls")
    assert sessions[:2] == [("t", "", 2), ("s", "", 1)]
    # A child's session has no name.
    assert UUID(sessions[2][0])
    assert brief(chaz.usage("tree"), "tree", "calls") == [(other.run_id, 2), (top.run_id, 2)]
    assert brief(chaz.usage(["run"], tree=child), "run", "calls") == [(top.run_id, 1), (child, 1)]
    assert brief(chaz.usage(["agent", "model"], session="t"), "agent", "model") == [("solo", "scripted")]
    assert brief(chaz.usage(agent="child"), "calls") == [(1,)]
    assert brief(chaz.usage(session=top.session_id), "calls") == [(1,)]


async def test_days_are_those_of_the_zone_and_come_in_order(stations: Stations, chaz: Chaz) -> None:
    claim = await used(stations, "s", "1", "2", "3")
    for step, at in enumerate(("2030-01-02 00:30+00", "2030-01-01 12:00+00", "2029-12-31 23:30+00")):
        stations.scratch.query(
            "update chaz.model_calls set created_at = %(at)s::timestamptz where step = %(step)s", at=at, step=step
        )
    days = brief(chaz.usage("day"), "day", "cost")
    assert [(f"{day}", cost) for day, cost in days] == [("2029-12-31", 3), ("2030-01-01", 2), ("2030-01-02", 1)]
    west = brief(chaz.usage(["agent", "day"], tz="America/New_York"), "day", "cost")
    assert [(f"{day}", cost) for day, cost in west] == [("2029-12-31", 3), ("2030-01-01", 3)]
    since = datetime(2030, 1, 1, tzinfo=UTC)
    assert brief(chaz.usage(since=since), "cost") == [(3,)]
    assert chaz.session(id=claim.session_id).usage(since=since).cost == 3
    with pytest.raises(InvalidEntry, match="Nowhere"):
        chaz.usage("day", tz="Nowhere")
    with pytest.raises(InvalidQuery, match="no time zone"):
        chaz.usage(since=datetime(2030, 1, 1))
    with pytest.raises(InvalidQuery, match="no usage by 'colour'"):
        chaz.usage("colour")  # pyright: ignore[reportArgumentType]


async def test_a_session_knows_what_it_used(stations: Stations, chaz: Chaz) -> None:
    await stations.end(await used(stations, "s", "1"), state="failed", reason="model")
    await used(stations, "s", "2")
    await used(stations, "t", "4")
    assert chaz.session("s").usage().cost == 3
    assert chaz.session("s").usage(since=timedelta(days=1)).calls == 2
    async with AsyncChaz(stations.scratch.url) as other:
        assert (await other.session("t").usage()).cost == 4
    with pytest.raises(UnknownSession):
        chaz.session("nowhere").usage()


async def test_a_step_that_is_stored_again_is_booked_once(stations: Stations, chaz: Chaz) -> None:
    claim = await stations.claimed("s")
    turn = Turn(usage=USED)
    store = partial(journal.store_step, claim=claim, step=0, turn=turn, version="v1", model="scripted", cost=None)

    async def store_and_lose(tx: Transaction) -> bool:
        if chaz.usage()[0]["calls"] == 0:
            await stations.transact(store)
            raise DatabaseUnavailable("here", "the commit is in doubt")
        return await store(tx)

    await surely(stations.database, claim.run_id, store_and_lose, partial(journal.has_step, claim=claim, step=0))
    assert chaz.result(claim.run_id).usage.calls == 1


async def test_turns_that_are_refused_are_booked_once_each(stations: Stations, chaz: Chaz) -> None:
    claim = await stations.claimed("s", budget=Budget(tokens=1000))
    has = partial(journal.has_refused, claim=claim, step=0, number=1)
    assert await stations.transact(has) is None
    await stations.refuse_turn(claim, 1, tokens=30)
    assert await stations.transact(has) is True
    await stations.refuse_turn(claim, 2, tokens=30)
    await stations.step(claim, a_call("spawn_agent"))
    await stations.refuse_turn(claim, 1, step=1, tokens=30)
    await stations.give_back(claim)
    with pytest.raises(StaleAttempt):
        await stations.refuse_turn(claim, 2, step=1, tokens=30)
    # The next attempt tries again from the first.
    await stations.refuse_turn(await stations.claim(claim.run_id), 1, step=1, tokens=30)
    spent = chaz.result(claim.run_id).usage
    assert (spent.calls, spent.prompt) == (5, 121)
    (tree,) = await stations.fetch("select tokens, steps from chaz.tree_budgets")
    assert (tree["tokens"], tree["steps"]) == (121, 1)


async def test_a_requeued_run_has_its_own_usage(stations: Stations, chaz: Chaz) -> None:
    old = await used(stations, "s", "1")
    await stations.end(old, state="failed", reason="model")
    new = await stations.transact(partial(requeueing.requeue, run_id=old.run_id))
    await stations.step(await stations.claim(new), usage=USED, cost="2")
    assert [chaz.result(id).usage.cost for id in (old.run_id, new)] == [1, 2]
    assert chaz.session("s").usage().cost == 3


async def test_what_many_runs_used_is_read_at_once(stations: Stations) -> None:
    one, two = await used(stations, "s", "1"), await used(stations, "t")
    spent = await usage.of_runs(stations.database, [one.run_id, two.run_id])
    assert {id: each.calls for id, each in spent.items()} == {one.run_id: 1, two.run_id: 0}


# The command line


async def test_the_command_prints_a_table(
    stations: Stations, database: ScratchDatabase, capsys: pytest.CaptureFixture[str]
) -> None:
    await used(stations, "s", "0.12", None)
    await used(stations, "t", None, recipient="child")
    here = ("--database", database.url)
    code, printed, _ = await asyncio.to_thread(command, capsys, "usage", *here)
    assert code == 0
    assert printed.splitlines() == [
        "agent  model     calls  prompt  cached  completion  reasoning  cost",
        "solo   scripted      2     200     120          40         10  ≥ 0.12, 1 call unknown",
        "child  scripted      1     100      60          20          5  unknown",
        "total                3     300     180          60         15  ≥ 0.12, 2 calls unknown",
    ]
    _, printed, _ = await asyncio.to_thread(
        command, capsys, "usage", "--by", "session,day", "--since", "1h", "--session", "s", "--json", *here
    )
    row = json.loads(printed)
    assert row.pop("day") == f"{datetime.now(UTC):%Y-%m-%d}"
    assert row == {
        "session": "s",
        "prompt": 200,
        "completion": 40,
        "cached": 120,
        "reasoning": 10,
        "calls": 2,
        "known_cost": 0.12,
        "unpriced_calls": 1,
        "cost": None,
    }
    _, printed, _ = await asyncio.to_thread(command, capsys, "usage", "--since", "2099-01-01", *here)
    assert printed.splitlines()[1].split() == ["total", "0", "0", "0", "0", "0"]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (("--by", "agent,colour"), "'colour' is none of agent, model"),
        (("--since", "yesterday"), "'yesterday' is no time; write a span, as in 7d"),
        (("--since", "99999999999d"), "'99999999999d' is no span of time"),
    ],
)
def test_what_cannot_be_asked_is_refused(capsys: pytest.CaptureFixture[str], wrong: tuple[str, str], why: str) -> None:
    code, out, said = command(capsys, "usage", *wrong)
    assert (code, out) == (2, "")
    assert why in said
