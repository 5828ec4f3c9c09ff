"""Children that end in the very moment in which their parent parks: it is queued once, or it never parked."""

from __future__ import annotations

import random
from uuid import UUID

import pytest

from chaz.errors import StaleAttempt
from chaz.runs import Claim
from tests.fixtures.postgres import ScratchDatabase, both_servers
from tests.fixtures.races import RACES, at_once, deadlocks, shortly, unruly, untried
from tests.fixtures.stations import Stations

pytestmark = [pytest.mark.anyio, pytest.mark.chaos, pytest.mark.timeout(120), both_servers]

WATCH = """
    create table became (run uuid, state text, waits bigint);
    create function watch() returns trigger language plpgsql as $$
        begin
            insert into became
            select new.id, new.state, count(*) from chaz.waits where run_id = new.id and answer is null;
            return null;
        end $$;
    create trigger watch after update of state on chaz.runs for each row
        when (new.state <> old.state) execute function watch()
"""


async def became(stations: Stations, run: UUID, state: str) -> int:
    """How often a run came into a state; into the queue never with an open wait."""
    rows = await stations.fetch(
        "select waits from became where run = %(run)s and state = %(state)s", run=run, state=state
    )
    assert state != "queued" or not any(row["waits"] for row in rows)
    return len(rows)


async def ending(stations: Stations, children: list[UUID]) -> list[Claim]:
    return [await stations.claim(child, "child") for child in children]


async def unanswered(stations: Stations, parent: Claim) -> int:
    return len(await stations.fetch("select from chaz.waits where run_id = %(r)s and answer is null", r=parent.run_id))


@pytest.mark.parametrize("children", [1, 2])
async def test_the_last_end_queues_the_parent_or_it_never_parked(database: ScratchDatabase, children: int) -> None:
    database.query(WATCH)
    parked: list[bool] = []
    async with untried(database) as stations:

        async def park(parent: Claim) -> None:
            parked.append(await stations.park(parent))

        for number in range(RACES):
            parent, spawned = await stations.spawning(f"s{number}", children=children)
            ends = [stations.end(claim) for claim in await ending(stations, spawned)]
            # The first parks before any end, the last after all; between them either may be first.
            if number == 0:
                await park(parent)
                await at_once(*ends)
            elif number == RACES - 1:
                await at_once(*ends)
                await park(parent)
            else:
                await at_once(*ends, shortly(number * 3, park(parent)))

            assert await unanswered(stations, parent) == 0
            assert await stations.state(parent.run_id) == ("queued" if parked[-1] else "running")
            assert await became(stations, parent.run_id, "queued") == parked[-1]
    # Both came about, or this shows nothing.
    assert 0 < sum(parked) < len(parked) == RACES
    assert unruly(database) == []
    assert deadlocks(database) == 0


async def test_a_parent_that_ends_meanwhile_is_not_woken(database: ScratchDatabase) -> None:
    database.query(WATCH)
    order = random.Random(0)
    async with untried(database) as stations:
        for number in range(RACES):
            parent, spawned = await stations.spawning(f"s{number}", children=2)
            one, two = await ending(stations, spawned)
            works = [stations.end(parent, "without them"), stations.park(parent), stations.end(one), stations.end(two)]
            await at_once(*(shortly(order.randint(0, 50), work) for work in works), unless=[StaleAttempt])

            ended = await became(stations, parent.run_id, "succeeded")
            parked = await became(stations, parent.run_id, "parked")
            assert (ended, parked) in {(1, 0), (0, 1)}
            assert await stations.state(parent.run_id) == ("succeeded" if ended else "queued")
            assert await became(stations, parent.run_id, "queued") == parked
    assert unruly(database) == []
    assert deadlocks(database) == 0
