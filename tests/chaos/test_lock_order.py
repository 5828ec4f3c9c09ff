"""Everybody at the same moment in one tree of runs: locks are taken in one order, so that nobody is ever in a deadlock.

The stores would try again after one; here nobody does, and the server is asked whether there was any.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID, uuid4

import pytest

from chaz import placing, publishing, requeueing, sweeps
from chaz.aside import Aside
from chaz.database import Transaction
from chaz.errors import StaleAttempt
from chaz.runs import Claim
from tests.fixtures.postgres import ScratchDatabase, both_servers
from tests.fixtures.races import RACES, at_once, deadlocks, shortly, unruly, untried
from tests.fixtures.stations import Stations, a_call

pytestmark = [pytest.mark.anyio, pytest.mark.chaos, pytest.mark.timeout(180), both_servers]

ROLES = {
    "ends": {"succeeded"},
    "spawns": {"running"},
    "steps": {"running"},
    "is given back": {"queued"},
    "is claimed": {"running"},
    "is lost": {"succeeded", "queued"},
    "is late": {"succeeded", "failed"},
    "is claimed late": {"running", "failed"},
}
"""What happens to each child in the race, and the states that it may be in afterwards."""


@dataclass
class Family:
    """A parent that is about to park, a run before it in its session that failed, and a child for each role."""

    parent: Claim
    failed: UUID
    children: dict[str, UUID]
    claims: dict[str, Claim]
    sessions: list[UUID]


async def a_family(stations: Stations, database: ScratchDatabase, session: str) -> Family:
    failed = await stations.claimed(session)
    await stations.end(failed, state="failed", reason="model")
    parent, spawned = await stations.spawning(session, children=len(ROLES))
    children, lost = dict(zip(ROLES, spawned, strict=True)), uuid4()
    claimed = [role for role in ROLES if "claimed" not in role]
    claims = await asyncio.gather(
        *(stations.claim(children[role], "child", lost if role == "is lost" else None) for role in claimed)
    )
    stations.beat(timedelta(seconds=-1), lost)
    database.query(
        "update chaz.runs set deadline = now() - interval '1 hour' where id = any(%(late)s)",
        late=[run for role, run in children.items() if "late" in role],
    )
    of_ends = claims[claimed.index("ends")].session_id
    database.query("update chaz.tree_budgets set max_steps = 1000")
    by_role = dict(zip(claimed, claims, strict=True))
    database.query(
        """
        insert into chaz.limits (kind, name, period, max_tokens, ends_at, set_by)
        values ('all', '', '1 day', 1000000, now() + interval '1 day', 'ada'),
            ('agent', 'child', '1 day', 1000000, now() + interval '1 day', 'ada')
        on conflict do nothing
        """
    )
    await stations.step(by_role["spawns"], a_call("spawn_agent"))
    return Family(parent, failed.run_id, children, by_role, [parent.session_id, of_ends])


async def listen(stations: Stations) -> None:
    """Be a listener, for one round."""

    async def work(tx: Transaction) -> None:
        await placing.place(tx, default_agent="", first_wait=5.0)
        await publishing.publishable(tx, first_wait=5.0)

    await stations.transact(work)


def produce(database: ScratchDatabase, sessions: list[UUID]) -> None:
    """Be a program that writes to several sessions in one transaction."""
    with database.connect() as connection:
        for session in sessions:
            connection.execute("select chaz.send(%s::text, 'message', 'ada', 'hi', recipient => 'solo')", [session])


async def race(stations: Stations, database: ScratchDatabase, family: Family, order: random.Random) -> None:
    children, claims = family.children, family.claims
    works = [
        stations.end(claims["ends"]),
        stations.park(family.parent),
        asyncio.to_thread(produce, database, family.sessions),
        asyncio.to_thread(produce, database, family.sessions[::-1]),
        listen(stations),
        stations.spawn(claims["spawns"]),
        stations.step(claims["steps"]),
        stations.refuse_turn(claims["ends"]),
        stations.refuse_turn(claims["is given back"]),
        stations.refuse_turn(family.parent, step=1),
        stations.reserve(claims["steps"]),
        stations.reserve(claims["ends"]),
        stations.reserve(claims["is given back"]),
        stations.reserve(family.parent, step=1),
        stations.ask_for(family.parent, children["ends"], ordinal=len(ROLES)),
        stations.ask_for(family.parent, children["is late"], ordinal=len(ROLES) + 1),
        stations.give_back(claims["is given back"]),
        stations.try_to_claim(children["is claimed"], "child"),
        stations.end(claims["is lost"]),
        sweeps.rescue_lost(stations.database),
        stations.end(claims["is late"]),
        stations.close(children["is late"], "running"),
        stations.close(children["is late"], "running"),
        sweeps.close_late(stations.database, grace=10, lease=15, aside=Aside()),
        stations.try_to_claim(children["is claimed late"], "child"),
        stations.transact(lambda tx: requeueing.requeue(tx, family.failed)),
        asyncio.to_thread(stations.beat, timedelta(hours=1)),
        listen(stations),
        sweeps.rescue_lost(stations.database),
        sweeps.close_late(stations.database, grace=10, lease=15, aside=Aside()),
        sweeps.queue_scheduled(stations.database),
    ]
    order.shuffle(works)
    await at_once(*(shortly(order.randint(0, 50), work) for work in works), unless=[StaleAttempt])


async def states(stations: Stations, family: Family) -> dict[str, str]:
    rows = await stations.fetch("select id, state from chaz.runs where id = any(%(i)s)", i=[*family.children.values()])
    by_run = {row["id"]: row["state"] for row in rows}
    return {role: by_run[run] for role, run in family.children.items()}


async def test_nobody_is_ever_in_a_deadlock(database: ScratchDatabase) -> None:
    async with untried(database) as stations:
        for number in range(RACES):
            family = await a_family(stations, database, f"s{number}")
            await race(stations, database, family, random.Random(number))

            found = await states(stations, family)
            assert all(found[role] in ROLES[role] for role in ROLES), found
            ended = {family.children[role] for role, state in found.items() if state in {"succeeded", "failed"}}
            answered = await stations.fetch(
                "select child_run_id from chaz.waits where run_id = %(p)s and answer is not null",
                p=family.parent.run_id,
            )
            assert {row["child_run_id"] for row in answered} == ended
            assert await stations.state(family.parent.run_id) == "parked"
            (held,) = await stations.fetch(
                """
                select b.reserved_steps, (
                    select count(*) from chaz.runs where root_run_id = %(r)s and reserved_step is not null) as by_runs
                from chaz.tree_budgets b where root_run_id = %(r)s
                """,
                r=family.parent.run_id,
            )
            assert held["reserved_steps"] == held["by_runs"]
        while (await stations.place()).entries:
            pass
    assert unruly(database) == []
    assert deadlocks(database) == 0
