"""What no doorbell announces: workers that were lost, and times that have come."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID, uuid4

import pytest

from chaz import sweeps
from chaz.aside import Aside
from chaz.runs import CRASH_LIMIT, Claim
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations, a_call

pytestmark = pytest.mark.anyio

GONE = timedelta(seconds=-1)
ALIVE = timedelta(minutes=1)


async def close_late(stations: Stations, grace: float = 10, lease: float = 15) -> list[tuple[UUID, str]]:
    """What a listener ends, if its one look at all kinds of work tells it to."""
    if not (await sweeps.due(stations.database)).late:
        return []
    closed = await sweeps.close_late(stations.database, grace=grace, lease=lease, aside=Aside())
    return [(run, reason) for run, reason, _ in closed]


def past(database: ScratchDatabase, column: str, run: UUID, seconds: float = 1) -> None:
    database.query(
        f"update chaz.runs set {column} = now() - %(s)s * interval '1 second' where id = %(run)s",  # pyright: ignore[reportArgumentType]
        run=run,
        s=seconds,
    )


async def test_the_runs_of_a_lost_worker_are_queued_again(stations: Stations) -> None:
    lost, alive = await stations.claimed("s"), None
    run = await stations.send("t")
    await stations.place()
    alive = await stations.claim(run, worker=uuid4())
    stations.beat(GONE)
    stations.beat(ALIVE, (await stations.run(alive.run_id))["worker_id"])

    assert (await sweeps.due(stations.database)).lost
    assert await sweeps.rescue_lost(stations.database) == [(lost.run_id, stations.worker)]
    assert await sweeps.rescue_lost(stations.database) == []

    row = await stations.run(lost.run_id)
    assert (row["state"], row["crashes"], row["worker_id"]) == ("queued", 1, None)
    assert await stations.state(alive.run_id) == "running"
    assert (await stations.claim(lost.run_id, worker=uuid4())).attempt == 2


async def test_a_worker_with_a_fresh_lease_keeps_its_runs(stations: Stations) -> None:
    claim = await stations.claimed("s")
    assert stations.beat(ALIVE) == {claim.run_id: 1}
    assert not (await sweeps.due(stations.database)).lost
    assert await sweeps.rescue_lost(stations.database) == []


async def test_a_stored_step_forgives_the_crashes(stations: Stations) -> None:
    claim = await crash(stations, await stations.claimed("s"), times=3)
    assert (await stations.run(claim.run_id))["crashes"] == 3
    await stations.step(claim)
    assert (await stations.run(claim.run_id))["crashes"] == 0


async def crash(stations: Stations, claim: Claim, *, times: int) -> Claim:
    """Lose the worker under the run, so many times; the claim after the last."""
    for _ in range(times):
        stations.beat(GONE)
        await sweeps.rescue_lost(stations.database)
        stations.beat(ALIVE)
        claim = await stations.claim(claim.run_id)
    return claim


async def test_a_run_that_kills_its_workers_is_given_up(stations: Stations) -> None:
    claim = await crash(stations, await stations.claimed("s"), times=CRASH_LIMIT - 1)
    assert await close_late(stations) == []
    stations.beat(GONE)
    await sweeps.rescue_lost(stations.database)

    assert await close_late(stations) == [(claim.run_id, "crashes")]

    row = await stations.run(claim.run_id)
    assert (row["state"], row["reason"]) == ("failed", "crashes")
    assert (await stations.log("s"))[-1].type == "error"


async def test_past_its_deadline_a_run_fails_wherever_it_is(stations: Stations, database: ScratchDatabase) -> None:
    queued, pending = [await stations.send("s") for _ in range(2)]
    await stations.place()
    parked, _ = await stations.spawning("p")
    await stations.park(parked)
    for run in (queued, pending, parked.run_id):
        past(database, "deadline", run)

    assert sorted(await close_late(stations)) == sorted(
        [(queued, "deadline"), (pending, "deadline"), (parked.run_id, "deadline")]
    )
    for run in (queued, pending, parked.run_id):
        assert await stations.state(run) == "failed"


async def test_a_running_one_is_its_workers_to_end_for_a_lease(stations: Stations, database: ScratchDatabase) -> None:
    claim = await stations.claimed("s")
    await stations.step(claim, a_call("slow"))
    await stations.start_call(claim)
    past(database, "deadline", claim.run_id, seconds=10)
    assert await close_late(stations, lease=15) == []
    assert await close_late(stations, lease=5) == [(claim.run_id, "deadline")]
    (call,) = await stations.fetch("select outcome from chaz.calls")
    assert call["outcome"] == "unknown"


async def test_the_end_of_a_late_child_answers_its_parent(stations: Stations, database: ScratchDatabase) -> None:
    parent, (child,) = await stations.spawning("s")
    await stations.park(parent)
    past(database, "deadline", child)
    assert await close_late(stations) == [(child, "deadline")]
    assert await stations.state(parent.run_id) == "queued"


async def test_what_is_not_started_in_time_expires(stations: Stations, database: ScratchDatabase) -> None:
    first = await stations.send("s", expires_in=timedelta(hours=1))
    second = await stations.send("s", expires_in=timedelta(hours=1))
    await stations.place()
    claim = await stations.claim(first)
    for run in (first, second):
        past(database, "expires_at", run)
    assert await close_late(stations) == [(second, "expired")]
    # Started in time, it may be given back and go on.
    await stations.give_back(claim)
    assert await close_late(stations) == []
    await stations.claim(first)


async def test_an_agent_that_nobody_registers_in_time_is_unknown(stations: Stations, database: ScratchDatabase) -> None:
    run = await stations.send("s", recipient="ghost")
    await stations.place()
    assert await close_late(stations) == []
    past(database, "queued_at", run, seconds=11)
    assert await close_late(stations, grace=12) == []
    assert await close_late(stations, grace=10) == [(run, "unknown-agent")]
    error = (await stations.log("s"))[-1]
    assert "no worker has registered an agent 'ghost'" in error.content
    assert await stations.fetch("select 1 from chaz.attachments") == []


async def test_an_agent_that_registers_within_the_grace_serves(stations: Stations, database: ScratchDatabase) -> None:
    run = await stations.send("s", recipient="ghost")
    await stations.place()
    past(database, "queued_at", run, seconds=60)
    await stations.register("ghost")
    assert await close_late(stations) == []
    await stations.claim(run, "ghost")


async def test_after_an_unknown_agent_the_next_one_leads(stations: Stations, database: ScratchDatabase) -> None:
    run = await stations.send("s", recipient="ghost")
    await stations.send("s", recipient="solo")
    await stations.place()
    past(database, "queued_at", run, seconds=11)
    await close_late(stations)
    message = await stations.say("s", "to whom it may concern")
    await stations.place()
    assert (await stations.run(message))["agent"] == "solo"


async def test_a_run_whose_time_has_come_is_queued_if_its_session_is_free(
    stations: Stations, database: ScratchDatabase
) -> None:
    later, latest = [await stations.send("s", countdown=timedelta(hours=hours)) for hours in (1, 2)]
    claim = await stations.claimed("s", "now")
    for run in (latest, later):
        past(database, "not_before", run)
    assert not (await sweeps.due(stations.database)).scheduled
    assert await sweeps.queue_scheduled(stations.database) == 0
    await stations.end(claim)
    assert [await stations.state(run) for run in (later, latest)] == ["queued", "pending"]


async def test_listeners_share_what_is_scheduled(stations: Stations, database: ScratchDatabase) -> None:
    runs = [await stations.send(session, countdown=timedelta(hours=1)) for session in ("s", "t")]
    await stations.place()
    assert not (await sweeps.due(stations.database)).scheduled
    for run in runs:
        past(database, "not_before", run)
    assert (await sweeps.due(stations.database)).scheduled
    with database.connect() as other:
        other.execute("select from chaz.heads order by session_id limit 1 for update")
        assert await sweeps.queue_scheduled(stations.database) == 1
    assert await sweeps.queue_scheduled(stations.database) == 1
    assert [await stations.state(run) for run in runs] == ["queued", "queued"]
    (heads,) = await stations.fetch("select count(*) from chaz.heads where active_run is not null")
    assert heads["count"] == 2


async def test_sweeps_of_two_listeners_share(stations: Stations, database: ScratchDatabase) -> None:
    one, two = await stations.claimed("s"), await stations.claimed("t")
    stations.beat(GONE)
    with database.connect() as other:
        other.execute("select from chaz.runs where id = %s for update", [one.run_id])
        assert await sweeps.rescue_lost(stations.database) == [(two.run_id, stations.worker)]
    assert await sweeps.rescue_lost(stations.database) == [(one.run_id, stations.worker)]
