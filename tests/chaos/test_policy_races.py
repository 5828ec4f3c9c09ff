"""A child's answer and people's messages arrive together, at two hosts, under every policy: each is answered once."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import LiteralString
from uuid import UUID, uuid4

import pytest

from chaz import interrupts, publishing, sessionlog, steering
from chaz.aside import Aside
from chaz.errors import StaleAttempt
from chaz.runs import Claim
from tests.fixtures.postgres import ScratchDatabase, both_servers
from tests.fixtures.races import RACES, answered_once, at_once, deadlocks, shortly, unruly, untried
from tests.fixtures.stations import Stations, a_call

pytestmark = [pytest.mark.anyio, pytest.mark.chaos, pytest.mark.timeout(120), both_servers]

POLICIES = ["coalesce", "each", "reject", "interrupt", "steer"]
SHOWN_BY: dict[str, LiteralString] = {
    "reject": "select count(*) from chaz.runs where reason = 'busy'",
    "interrupt": "select count(*) from chaz.runs where reason = 'interrupted'",
    "steer": "select count(*) from chaz.entries where metadata->>'reason' = 'steered'",
    "coalesce": "select count(*) from chaz.runs where state = 'superseded'",
}


async def place_and_publish(stations: Stations) -> list[tuple[UUID, str]]:
    """A listener's round: what is to be delivered."""
    placed = await stations.place()
    await interrupts.interrupt(stations.database, aside=Aside())
    due = await stations.transact(partial(publishing.publishable, first_wait=0.0))
    return [(each.delivery.run, each.delivery.agent) for each in placed.publications + due]


async def work_on(stations: Stations, claim: Claim, turns: int) -> None:
    """A worker's way with a run: a step, what it hears, another, the end; for as long as the run is its own."""
    try:
        (row,) = await stations.fetch("select count(*) from chaz.steps where run_id = %(run)s", run=claim.run_id)
        await stations.step(claim, a_call("word_count"), step=row["count"])
        await shortly(turns, asyncio.sleep(0))
        if await stations.transact(partial(steering.is_spoken_to, claim=claim, after=claim.read_to)):
            hear = partial(steering.hear, claim=claim, step=row["count"] + 1, after=claim.read_to)
            await stations.transact(hear)
        await stations.end(claim, f"answer of {claim.run_id}")
    except StaleAttempt:
        pass


async def be_a_host(stations: Stations, order: random.Random) -> None:
    """Listener and worker in one, until nothing is left to do."""
    worker = uuid4()
    while True:
        deliveries = await place_and_publish(stations)
        for run, agent in deliveries:
            claim = await stations.try_to_claim(run, agent, worker)
            if isinstance(claim, Claim):
                await work_on(stations, claim, order.randint(0, 20))
        left = await stations.fetch(
            """
            select from chaz.entries where position is null
            union all select from chaz.runs where state in ('pending', 'queued', 'running', 'parked')
            """
        )
        if not left:
            return
        await asyncio.sleep(0)


@pytest.mark.parametrize("policy", POLICIES)
async def test_each_is_answered_once(database: ScratchDatabase, policy: str) -> None:
    order = random.Random(policy)
    said: list[UUID] = []
    async with untried(database) as stations:
        for number in range(RACES // 2):
            session = f"s{number}"
            await stations.transact(
                partial(sessionlog.configure, session=session, on_message=policy, tenant="", open_session=False)
            )
            parent, (child,) = await stations.spawning(session)
            ending = await stations.claim(child, "child")

            async def say(sender: str, session: str = session) -> None:
                said.append(await stations.say(session, f"{sender} says", sender=sender))

            async def park_or_go_on(parent: Claim = parent) -> None:
                if not await stations.park(parent):
                    await work_on(stations, parent, 5)

            await at_once(
                *(shortly(order.randint(0, 60), say(sender)) for sender in ("ada", "bob", "cy", "ada")),
                shortly(order.randint(0, 40), park_or_go_on()),
                shortly(order.randint(0, 60), stations.end(ending)),
                be_a_host(stations, order),
                be_a_host(stations, order),
                unless=[StaleAttempt],
            )
            # What was sent after both hosts had seen nothing left.
            await be_a_host(stations, order)
    answered_once(database, said)
    assert unruly(database) == []
    assert deadlocks(database) == 0
    # It came about, or this shows nothing.
    if policy in SHOWN_BY:
        assert database.value(SHOWN_BY[policy]) > 0
