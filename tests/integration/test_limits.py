"""Limits: what is used in a period is counted with each step, once; what is reached lets no model be asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from chaz import Agent, Budget, Chaz, Spent, UnknownAgent, UnknownSession
from chaz.errors import InvalidLimit, InvalidSubject, LimitReached, UnknownPrice
from chaz.outcomes import Usage
from chaz.runs import Claim
from chaz.runtime.agents import Agents
from chaz.settings import Settings
from chaz.worker import WorkerProcess
from tests.fixtures.commands import command
from tests.fixtures.postgres import ScratchDatabase, both_servers
from tests.fixtures.races import at_once, deadlocks, untried
from tests.fixtures.stations import Stations, a_call

pytestmark = pytest.mark.anyio

DAY = timedelta(days=1)
HOUR = timedelta(hours=1)


async def step(stations: Stations, claim: Claim, number: int = 0, *, tokens: int = 10, cost: str | None = "1") -> bool:
    return await stations.step(claim, a_call("spawn_agent"), step=number, usage=Usage(prompt=tokens), cost=cost)


def used(chaz: Chaz) -> dict[str, tuple[int, float, int]]:
    """The tokens, the cost and the calls of unknown cost that each limit has counted."""
    return {
        limit["kind"] + (f":{limit['name']}" if limit["name"] else ""): (
            limit["tokens"],
            limit["cost"],
            limit["unpriced"],
        )
        for limit in chaz.limits()
    }


async def test_each_step_counts_in_the_limits_of_its_run(stations: Stations, chaz: Chaz) -> None:
    claim, other = await stations.claimed("s"), await stations.claimed("t", recipient="child")
    for what in ("agent:solo", "session:s", "all", "agent:child", "session:t"):
        chaz.limit(what, tokens=1000, cost=100)
    await step(stations, claim)
    await stations.refuse_turn(claim, step=1, tokens=5)
    await step(stations, other, tokens=30)
    assert used(chaz) == {
        "agent:child": (30, 1, 0),
        "agent:solo": (15, 1, 1),
        "all": (45, 2, 1),
        "session:s": (15, 1, 1),
        "session:t": (30, 1, 0),
    }


async def test_what_was_used_before_counts_too(stations: Stations, chaz: Chaz) -> None:
    claim, other = await stations.claimed("s"), await stations.claimed("t", recipient="child")
    for number in range(3):
        await step(stations, claim, number, cost="0.5" if number else None)
    await step(stations, other, tokens=30)
    stations.scratch.query("update chaz.model_calls set created_at = now() - interval '1 day' where step = 2")
    for what in ("agent:solo", "session:s", "all", "agent:parent"):
        chaz.limit(what, tokens=1000)
    assert used(chaz) == {
        "agent:parent": (0, 0, 0),
        "agent:solo": (20, 0.5, 1),
        "all": (50, 1.5, 1),
        "session:s": (20, 0.5, 1),
    }


@pytest.mark.parametrize("what", ["agent:solo", "session:s", "all"])
async def test_what_is_reached_lets_no_model_be_asked(stations: Stations, chaz: Chaz, what: str) -> None:
    claim = await stations.claimed("s")
    assert not claim.limited
    # It holds for what is at work, from the next stored turn on.
    chaz.limit(what, tokens=20)
    assert await step(stations, claim)
    assert await stations.reserve(claim, step=1) == "free"
    await step(stations, claim, 1, tokens=15)
    with pytest.raises(LimitReached) as reached:
        await stations.reserve(claim, step=2)
    named = "the deployment" if what == "all" else what
    tomorrow = (datetime.now(UTC) + DAY).replace(hour=0, minute=0, second=0, microsecond=0)
    assert reached.value.args[0] == named
    assert str(reached.value) == (
        f"the limit of {named} is reached: 25 of 20 tokens used in its period of 1d; "
        f"the period ends at {tomorrow:%Y-%m-%d} 00:00:00 UTC"
    )
    (limit,) = chaz.limits()
    assert (limit["reached"], limit["ends_at"]) == (True, tomorrow)
    # Whom it is not for is not held up; whom it is for has to ask from the first.
    other = await stations.claimed("t", recipient="child")
    assert other.limited == (what == "all")
    assert (await stations.claimed("s2" if what == "agent:solo" else "t2")).limited == (what != "session:s")


async def test_a_cost_is_a_limit_too(stations: Stations, chaz: Chaz) -> None:
    chaz.limit("all", cost=1.5, period=30 * DAY)
    claim = await stations.claimed("s")
    await step(stations, claim, cost="1.25")
    assert await stations.reserve(claim, step=1) == "free"
    await step(stations, claim, 1, cost="0.25")
    with pytest.raises(LimitReached, match=r"a cost of 1\.5 of 1\.5 used in its period of 30d"):
        await stations.reserve(claim, step=2)


async def test_a_period_that_is_over_is_forgotten(stations: Stations, chaz: Chaz) -> None:
    chaz.limit("agent:solo", tokens=10, cost=5, period=HOUR)
    claim = await stations.claimed("s")
    await step(stations, claim)
    stations.scratch.query("update chaz.limits set ends_at = ends_at - interval '1 hour'")
    assert used(chaz) == {"agent:solo": (0, 0, 0)}
    assert await stations.reserve(claim, step=1) == "free"
    await step(stations, claim, 1, tokens=3)
    assert used(chaz) == {"agent:solo": (3, 1, 0)}
    (limit,) = chaz.limits()
    (row,) = await stations.fetch("select ends_at, now() < ends_at as ahead from chaz.limits")
    assert (row["ends_at"], row["ahead"]) == (limit["ends_at"], True)


@pytest.mark.parametrize(
    ("period", "at", "end"),
    [
        ("1 hour", "2030-01-02 10:59:59+00", "2030-01-02 11:00:00+00:00"),
        ("1 day", "2030-01-02 23:59:59+00", "2030-01-03 00:00:00+00:00"),
        ("1 day", "2030-01-03 00:00:00+00", "2030-01-04 00:00:00+00:00"),
        # Monday to Monday, and through the change of the clocks.
        ("7 days", "2030-03-31 12:00:00+00", "2030-04-01 00:00:00+00:00"),
    ],
)
@both_servers
def test_periods_begin_at_multiples(database: ScratchDatabase, period: str, at: str, end: str) -> None:
    with database.connect() as connection:
        connection.execute("set timezone = 'Europe/Vienna'")
        row = connection.execute(
            "select chaz.period_end(%s::interval, %s::timestamptz) = %s::timestamptz as right", [period, at, end]
        ).fetchone()
    assert row == {"right": True}


async def test_several_periods_each_have_their_own(stations: Stations, chaz: Chaz) -> None:
    chaz.limit("all", tokens=10, period=HOUR)
    chaz.limit("all", tokens=10_000, period=DAY)
    claim = await stations.claimed("s")
    await step(stations, claim, tokens=12)
    assert [(each["period"], each["tokens"], each["reached"]) for each in chaz.limits()] == [
        (3600, 12, True),
        (86_400, 12, False),
    ]
    # Said again, it takes the other's place, and what was used stays.
    chaz.limit("all", tokens=50, period=HOUR)
    assert await stations.reserve(claim, step=1) == "free"
    assert [each["max_tokens"] for each in chaz.limits()] == [50, 10_000]
    assert chaz.unlimit("all", period=DAY)
    assert len(chaz.limits()) == 1
    assert chaz.unlimit("all")
    assert not chaz.unlimit("all")
    assert not await step(stations, await stations.claimed("t"))


async def test_where_a_cost_is_limited_its_price_has_to_be_known(stations: Stations, chaz: Chaz) -> None:
    chaz.limit("agent:solo", tokens=100)
    claim, priced = await stations.claimed("s"), await stations.claimed("t", budget=Budget(cost=1))
    assert await stations.reserve(claim, cost=None) == "free"
    with pytest.raises(UnknownPrice, match="the cost of its tree of runs is limited, and the price of model scripted"):
        await stations.reserve(priced, cost=None)
    with pytest.raises(UnknownPrice, match="its tree of runs"):
        await stations.reserve(claim, cost=None, budget=Budget(cost=1))
    chaz.limit("agent:solo", cost=5)
    with pytest.raises(UnknownPrice, match="the cost of agent:solo is limited"):
        await stations.reserve(claim, cost=None)
    assert await stations.reserve(claim, cost="0.1") == "free"


async def test_what_cannot_be_limited_is_refused(stations: Stations, chaz: Chaz) -> None:
    for wrong in ("agents", "agent:", "solo"):
        with pytest.raises(InvalidSubject):
            chaz.limit(wrong, tokens=1)
    with pytest.raises(UnknownAgent):
        chaz.limit("agent:nobody", tokens=1)
    with pytest.raises(UnknownSession):
        chaz.limit("session:nowhere", tokens=1)
    for limit, why in [
        ({}, "limits nothing"),
        ({"tokens": 0}, "tokens are 0"),
        ({"cost": -1}, "cost is -1"),
        ({"cost": Decimal("nan")}, "cost is NaN"),
        ({"tokens": 1, "period": timedelta(0)}, "period is 0:00:00"),
    ]:
        kinds: dict[str, Any] = limit
        with pytest.raises(InvalidLimit, match=why):
            chaz.limit("all", **kinds)
    assert chaz.limits() == []


# At once


@both_servers
async def test_steps_at_once_are_all_counted_and_nobody_is_in_a_deadlock(database: ScratchDatabase, chaz: Chaz) -> None:
    async with untried(database) as stations:
        claims = [await stations.claimed(f"s{n}", recipient=("solo", "child")[n % 2]) for n in range(8)]
        whats = ["all", "session:s0", "agent:child", "agent:solo", "session:s1"]
        for period in (HOUR, DAY):
            for what in whats:
                chaz.limit(what, tokens=10**9, cost=10**6, period=period)
        rounds = 15
        for number in range(rounds):
            changing = asyncio.to_thread(chaz.limit, whats[number % 5], tokens=10**8, cost=10**6, period=DAY)
            works = [step(stations, claim, number) for claim in claims]
            refused = [stations.refuse_turn(claim, step=number) for claim in claims[::2]]
            reserved = [stations.reserve(claim, step=number + 1) for claim in claims]
            await at_once(*works, *refused, *reserved, changing)
        assert used(chaz) == {
            "agent:child": (4 * 10 * rounds, 4 * rounds, 0),
            "agent:solo": (4 * 11 * rounds, 4 * rounds, 4 * rounds),
            "all": (84 * rounds, 8 * rounds, 4 * rounds),
            "session:s0": (11 * rounds, rounds, rounds),
            "session:s1": (10 * rounds, rounds, 0),
        }
    chaz.close()
    assert deadlocks(database) == 0


async def test_who_asks_at_once_may_each_take_one_turn_more(stations: Stations, chaz: Chaz) -> None:
    chaz.limit("all", tokens=10)
    claims = [await stations.claimed(f"s{n}") for n in range(3)]
    rooms = await asyncio.gather(*(stations.reserve(claim) for claim in claims))
    assert rooms == ["free"] * 3
    for claim in claims:
        await step(stations, claim)
        with pytest.raises(LimitReached):
            await stations.reserve(claim, step=1)
    assert used(chaz) == {"all": (30, 3, 0)}


# A worker


@pytest.fixture
def worker(stations: Stations) -> Iterator[WorkerProcess]:
    """A worker in this process that serves ``solo``, which nobody knows the price of, and ``dear``."""
    agents = [
        Agent("solo", instructions="", model="scripted"),
        Agent("dear", instructions="", model="scripted", prices=(1_000_000, 0)),
    ]
    made = WorkerProcess(Settings.from_env({}, database_url=stations.scratch.url), Agents(agents), name="test")
    made.start()
    yield made
    made.close()


async def work(stations: Stations, worker: WorkerProcess, session: str, **fields: Any) -> UUID:
    """Send, place and run to the end."""
    run = await stations.send(session, **fields)
    await stations.place()
    await asyncio.to_thread(worker.execute, fields.get("recipient", "solo"), run)
    return run


async def test_a_run_fails_with_an_entry_that_says_why(stations: Stations, chaz: Chaz, worker: WorkerProcess) -> None:
    await stations.register("dear")
    chaz.limit("agent:dear", tokens=1)
    first = await work(stations, worker, "s", recipient="dear")
    assert chaz.result(first).state == "succeeded"
    second = chaz.result(await work(stations, worker, "s", recipient="dear"))
    assert (second.state, second.usage) == ("failed", Spent())
    *_, entry = await stations.log("s")
    assert entry.type == "error"
    assert "the limit of agent:dear is reached" in entry.content
    assert (await stations.run(second.id))["reason"] == "limit"
    # Others go on.
    assert chaz.result(await work(stations, worker, "t")).state == "succeeded"


@pytest.mark.parametrize("how", ["budget", "limit"])
async def test_a_run_whose_cost_cannot_be_counted_fails(
    stations: Stations, chaz: Chaz, worker: WorkerProcess, how: str
) -> None:
    await stations.register("dear")
    if how == "limit":
        chaz.limit("all", cost=10_000_000)
    budget = Budget(cost=10_000_000) if how == "budget" else None
    run = await stations.run(await work(stations, worker, "s", budget=budget))
    assert (run["state"], run["reason"], run["steps"]) == ("failed", "price", 0)
    assert "the price of model scripted is not known; give its agent prices" in run["result"]
    priced = chaz.result(await work(stations, worker, "t", recipient="dear", budget=budget))
    assert (priced.state, priced.usage.cost) == ("succeeded", float(priced.usage.prompt))


# The command line


async def test_limits_from_the_command_line(
    stations: Stations, database: ScratchDatabase, chaz: Chaz, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(*arguments: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(command, capsys, *arguments, "--database", database.url)

    claim = await stations.claimed("s")
    assert await run("limits") == (0, "nothing is limited\n", "")
    assert await run("limit", "agent:solo", "--tokens", "20") == (0, "agent:solo is limited\n", "")
    assert (await run("limit", "session:s", "--cost", "0.5", "--period", "30d"))[0] == 0
    await step(stations, claim, tokens=25, cost=None)

    code, printed, _ = await run("limits")
    assert code == 0
    agents, sessions = printed.splitlines()
    assert agents.startswith("agent:solo  25 of 20 tokens  each 1d, till ")
    assert agents.endswith("  reached")
    assert sessions.startswith("session:s  cost ≥ 0 of 0.5  each 30d, till ")
    _, printed, _ = await run("limits", "--json")
    first, second = map(json.loads, printed.splitlines())
    assert (first["kind"], first["name"], first["tokens"], first["reached"]) == ("agent", "solo", 25, True)
    assert (second["max_cost"], second["period"], second["unpriced"]) == (0.5, 2_592_000, 1)

    assert await run("limit", "session:s", "--remove", "--period", "1d") == (0, "session:s had no such limit\n", "")
    assert await run("limit", "session:s", "--remove") == (0, "session:s is limited no more\n", "")
    assert (await run("limit", "agent:nobody", "--tokens", "1"))[0] == 66
    for wrong in [("--remove", "--tokens", "1"), (), ("--period", "1d"), ("--tokens", "0"), ("--cost", "much")]:
        assert (await run("limit", "all", *wrong))[0] == 2
    assert len(chaz.limits()) == 1
