"""A cap on an agent's runs over all machines, and turns of tenants when the queue is long."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial
from uuid import UUID, uuid4

import pytest

from chaz import publishing, runs
from chaz.runs import Claim, Unclaimed
from tests.fixtures.listeners import A_MINUTE, Listeners
from tests.fixtures.postgres import ScratchDatabase, both_servers
from tests.fixtures.races import RACES, deadlocks, untried
from tests.fixtures.stations import Stations

pytestmark = [pytest.mark.anyio, both_servers]

AT_CAP = Unclaimed("held", "its agent is at its cap")


async def published(stations: Stations) -> list[UUID]:
    """What one round of a listener publishes, at its placing or after it."""
    placed = await stations.place()
    due = await stations.transact(partial(publishing.publishable, first_wait=A_MINUTE))
    return [publication.delivery.run for publication in placed.publications + due]


async def send_many(stations: Stations, count: int, **fields: object) -> list[UUID]:
    """So many directives, each in a session of its own."""
    return [await stations.send(str(uuid4())[:8], f"{n}", **fields) for n in range(count)]


# The cap


async def test_no_more_are_published_than_may_run(stations: Stations) -> None:
    await stations.register("solo", max_concurrent=2)
    runs = await send_many(stations, 5)
    first = await published(stations)
    assert len(first) == 2
    assert await published(stations) == []
    claims = [await stations.claim(run) for run in first]
    assert await published(stations) == []
    await stations.end(claims[0])
    (third,) = await published(stations)
    assert {*first, third} < {*runs}


async def test_a_claim_beyond_the_cap_is_refused_and_comes_again(stations: Stations) -> None:
    await stations.register("solo", max_concurrent=1)
    one, two = await send_many(stations, 2)
    await stations.place()
    claim = await stations.claim(one)
    assert await stations.try_to_claim(two) == AT_CAP
    assert await published(stations) == []
    await stations.end(claim)
    assert await published(stations) == [two]
    assert isinstance(await stations.try_to_claim(two), Claim)


async def test_a_claim_beyond_the_cap_rings(stations: Stations, database: ScratchDatabase) -> None:
    one, two = await send_many(stations, 2)
    assert {*await published(stations)} == {one, two}
    await stations.register("solo", max_concurrent=1)
    claim = await stations.claim(one)
    with database.connect(autocommit=True) as connection:
        connection.execute("listen chaz")
        # It counts as announced, so that a listener which heard of an end meanwhile has found no room.
        assert await stations.try_to_claim(two) == AT_CAP
        heard = await asyncio.to_thread(lambda: list(connection.notifies(timeout=10, stop_after=1)))
    assert len(heard) == 1
    await stations.end(claim)
    assert await published(stations) == [two]


async def test_what_is_no_matter_of_the_cap_is_not_held_by_it(stations: Stations) -> None:
    await stations.register("solo", max_concurrent=1)
    (run,) = await send_many(stations, 1)
    assert await published(stations) == [run]
    lapsed = uuid4()
    stations.beat(timedelta(seconds=-1), lapsed)
    # Held, it would be published at once, and come to the same worker again and again.
    assert await stations.try_to_claim(run, worker=lapsed) == Unclaimed(
        "not yet", "the lease of this worker has run out"
    )
    assert await published(stations) == []
    await stations.transact(partial(runs.ring_again, run_id=run, wait=0.001))
    assert await published(stations) == [run]
    # The next one is due as after a first, not a second one that was lost.
    row = await stations.run(run)
    assert row["publishes"] == 1


async def test_a_parked_run_leaves_its_place_to_others(stations: Stations) -> None:
    await stations.register("parent", max_concurrent=1)
    parent, (child,) = await stations.spawning("s")
    other = await stations.send("t", recipient="parent")
    await published(stations)
    assert await stations.try_to_claim(other, "parent") == AT_CAP
    assert await stations.park(parent)
    assert await published(stations) == [other]
    claim = await stations.claim(other, "parent")
    await stations.end(await stations.claim(child, "child"))
    assert await stations.try_to_claim(parent.run_id, "parent") == AT_CAP
    await stations.end(claim)
    assert await published(stations) == [parent.run_id]


async def test_the_latest_registration_holds(stations: Stations) -> None:
    await stations.register("solo", max_concurrent=1)
    one, two = await send_many(stations, 2)
    await stations.place()
    await stations.claim(one)
    await stations.register("solo")
    assert isinstance(await stations.try_to_claim(two), Claim)


async def test_other_agents_have_their_own(stations: Stations) -> None:
    await stations.register("solo", max_concurrent=1)
    await stations.claimed("s")
    assert isinstance(await stations.claimed("t", recipient="child"), Claim)


@pytest.mark.chaos
@pytest.mark.timeout(120)
async def test_claims_at_once_do_not_exceed_it(database: ScratchDatabase) -> None:
    async with untried(database) as stations:
        await stations.register("solo", max_concurrent=2)
        stations.beat(timedelta(hours=1))
        for _ in range(RACES):
            runs = await send_many(stations, 5)
            await stations.place()
            claims = await asyncio.gather(*(stations.try_to_claim(run) for run in runs))
            won = [claim for claim in claims if isinstance(claim, Claim)]
            assert len(won) == 2
            assert all(claim == AT_CAP for claim in claims if not isinstance(claim, Claim))
            for claim in won:
                await stations.end(claim)
            database.query("update chaz.runs set state = 'cancelled', ended_at = now() where state = 'queued'")
    assert deadlocks(database) == 0


async def test_an_end_that_makes_room_wakes_the_listener(stations: Stations, listeners: Listeners) -> None:
    await stations.register("solo", max_concurrent=1)
    listener = await listeners.start()
    one, two = await send_many(stations, 2)
    await listener.until_naps(1)
    (first,) = listener.published
    claim = await stations.claim(first)
    assert listener.published == [first]
    await stations.end(claim)
    # Its long poll is a minute: the bell was rung.
    await listener.until_published(one, two)


# Turns


async def test_a_tenant_that_comes_later_does_not_wait_for_all_of_another(stations: Stations) -> None:
    many = await send_many(stations, publishing.ANNOUNCED_AHEAD + 50, tenant="a")
    # The broker's queue: first come, first served.
    queue = await published(stations)
    assert len(queue) == publishing.ANNOUNCED_AHEAD
    few = await send_many(stations, 3, tenant="b")
    begun: list[UUID] = []
    queue += await published(stations)
    while queue:
        # On a slow machine a run may be announced twice.
        if isinstance(claim := await stations.try_to_claim(queue.pop(0)), Claim):
            begun.append(claim.run_id)
        queue += await published(stations)
    assert sorted(begun) == sorted(many + few)
    assert max(begun.index(run) for run in few) < publishing.ANNOUNCED_AHEAD + len(few)


async def test_tenants_take_turns_in_what_is_due(stations: Stations, database: ScratchDatabase) -> None:
    tenants = {run: tenant for tenant in "abc" for run in await send_many(stations, 4, tenant=tenant)}
    await stations.place()
    database.query("update chaz.runs set publishes = 0, publish_after = now()")
    due = await stations.transact(partial(publishing.publishable, first_wait=A_MINUTE, limit=9))
    turns = [tenants[publication.delivery.run] for publication in due]
    assert [sorted(turns[n : n + 3]) for n in (0, 3, 6)] == [["a", "b", "c"]] * 3


async def test_a_tenant_has_as_much_ahead_as_any_other(stations: Stations, database: ScratchDatabase) -> None:
    publish = partial(publishing.publishable, first_wait=A_MINUTE, ahead=2)
    for tenant in "ab":
        runs = await send_many(stations, 3, tenant=tenant)
        await stations.place()
        database.query("update chaz.runs set publishes = 0, publish_after = now() where tenant = %(t)s", t=tenant)
        due = {publication.delivery.run for publication in await stations.transact(publish)}
        assert (len(due), due < set(runs)) == (2, True)
        assert await stations.transact(publish) == []


async def test_who_comes_later_does_not_overtake_who_waits(stations: Stations, database: ScratchDatabase) -> None:
    (waiting,) = await send_many(stations, 1)
    await stations.place()
    database.query("update chaz.runs set publishes = 0, publish_after = now()")
    (later,) = await send_many(stations, 1)
    assert (await stations.place()).publications == []
    assert await published(stations) == [waiting, later]


async def test_what_is_given_up_is_not_published(stations: Stations, database: ScratchDatabase) -> None:
    alone, often, fine = await send_many(stations, 3)
    await stations.place()
    database.query("update chaz.runs set publishes = 0, publish_after = now()")
    database.query("update chaz.runs set lost_alone = true where id = %(run)s", run=alone)
    database.query("update chaz.runs set crashes = 10 where id = %(run)s", run=often)
    assert await published(stations) == [fine]


async def test_what_another_listener_publishes_is_not_waited_for(stations: Stations, database: ScratchDatabase) -> None:
    theirs, ours = await send_many(stations, 2)
    await stations.place()
    database.query("update chaz.runs set publishes = 0, publish_after = now()")
    with database.connect() as other:
        other.execute("select from chaz.runs where id = %s for update", (theirs,))
        assert await published(stations) == [ours]
    assert await published(stations) == [theirs]


async def test_a_higher_priority_goes_before_turns(stations: Stations, database: ScratchDatabase) -> None:
    await send_many(stations, 3, tenant="a")
    urgent = await send_many(stations, 2, tenant="a", priority=5)
    await send_many(stations, 1, tenant="b")
    await stations.place()
    database.query("update chaz.runs set publishes = 0, publish_after = now()")
    due = await published(stations)
    assert set(due[:2]) == set(urgent)


async def test_what_is_refilled_comes_without_a_bell(stations: Stations, listeners: Listeners) -> None:
    runs = await send_many(stations, publishing.ANNOUNCED_AHEAD + 20)
    listener = await listeners.start(sweep=A_MINUTE)
    assert len(listener.published) == publishing.ANNOUNCED_AHEAD
    for run in list(listener.published):
        await stations.claim(run)
    # Its long poll is a minute, and a claim rings nothing.
    await listener.until_published(*runs, within=30)
    assert len(listener.published) == len(runs)
