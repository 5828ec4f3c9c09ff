"""The listener: what is inserted is published, whatever happens to the listener, its connections and its neighbours.

The long poll is a minute, so that what is found was found by the bell, or by the sweep after a connect.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta

import pytest

from chaz.testing import eventually_async
from tests.fixtures.listeners import Listeners
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations

pytestmark = pytest.mark.anyio


async def test_what_is_inserted_is_published(listeners: Listeners, stations: Stations) -> None:
    listener = await listeners.start()
    run = await stations.send("s")
    await listener.until_published(run)
    assert await stations.lines("s") == [(1, "directive", "hello")]
    assert await stations.state(run) == "queued"


async def test_many_sessions_are_published_once_each(listeners: Listeners, stations: Stations) -> None:
    listener = await listeners.start()
    runs = await asyncio.gather(*(stations.send(f"s{number}") for number in range(40)))
    await listener.until_published(*runs)
    assert Counter(listener.published) == Counter(runs)


async def test_what_came_while_it_was_down_is_found_at_its_start(listeners: Listeners, stations: Stations) -> None:
    run = await stations.send("s")
    listener = await listeners.start(ready=False)
    await listener.until_published(run)


async def test_two_listeners_share_the_work(listeners: Listeners, stations: Stations) -> None:
    one, two = await listeners.start(), await listeners.start()
    runs = await asyncio.gather(*(stations.send(f"s{number}") for number in range(40)))

    async def all_are_published() -> bool:
        return {*one.published, *two.published} == set(runs)

    await eventually_async(all_are_published)
    assert Counter(one.published + two.published) == Counter(runs)


def terminate(database: ScratchDatabase, application: str) -> None:
    pids = database.backends(application)
    assert pids
    database.query("select pg_terminate_backend(pid) from unnest(%(pids)s::int[]) pid", pids=pids)


@pytest.mark.parametrize("cut", [["chaz-listen"], ["chaz-listener"], ["chaz-listen", "chaz-listener"]])
async def test_a_listener_that_was_cut_off_comes_back_and_hears(
    listeners: Listeners, stations: Stations, database: ScratchDatabase, cut: list[str]
) -> None:
    listener = await listeners.start()
    for application in cut:
        terminate(database, application)
    meanwhile = await stations.send("s")
    await listener.until_published(meanwhile)
    await listener.until_asleep()
    later = await stations.send("t")
    await listener.until_published(later)


# Who makes work


async def test_a_run_that_is_given_back_is_published_again(listeners: Listeners, stations: Stations) -> None:
    listener = await listeners.start()
    run = await stations.send("s")
    await listener.until_published(run)
    claim = await stations.claim(run)
    await listener.until_asleep()
    listener.published.clear()
    await stations.give_back(claim)
    await listener.until_published(run)


async def test_the_next_run_of_a_session_is_published_at_the_end_of_the_one_before(
    listeners: Listeners, stations: Stations
) -> None:
    listener = await listeners.start()
    first, second = [await stations.send("s") for _ in range(2)]
    await listener.until_published(first)
    claim = await stations.claim(first)
    await listener.until_asleep()
    assert second not in listener.published
    await stations.end(claim)
    await listener.until_published(second)


async def test_a_child_is_published_and_then_its_parent(listeners: Listeners, stations: Stations) -> None:
    listener = await listeners.start()
    run = await stations.send("s", recipient="parent")
    await listener.until_published(run)
    claim = await stations.claim(run, "parent")
    await stations.step(claim)
    child = await stations.spawn(claim)
    await listener.until_published(child)
    assert await stations.park(claim)
    await listener.until_asleep()
    listener.published.clear()
    await stations.end(await stations.claim(child, "child"))
    await listener.until_published(run)


async def test_a_broker_that_is_away_loses_nothing(listeners: Listeners, stations: Stations) -> None:
    listener = await listeners.start(sweep=0.2, long_poll=0.1)
    listener.broker_away = True
    run = await stations.send("s")
    await listener.until_publishing()
    assert await stations.state(run) == "queued"
    listener.broker_away = False
    await listener.until_published(run)


# Times


async def test_a_run_is_published_when_its_time_has_come(listeners: Listeners, stations: Stations) -> None:
    listener = await listeners.start(long_poll=0.05)
    run = await stations.send("s", countdown=timedelta(seconds=0.5))
    await listener.until_published(run)
    (row,) = await stations.fetch("select clock_timestamp() >= not_before as due from chaz.runs")
    assert row["due"]


async def test_the_runs_of_a_lost_worker_are_published_again(listeners: Listeners, stations: Stations) -> None:
    listener = await listeners.start(long_poll=0.05, lease=0.5)
    run = await stations.send("s")
    await listener.until_published(run)
    stations.beat(timedelta(minutes=1))
    await stations.claim(run)
    listener.published.clear()
    stations.beat(timedelta(seconds=-1))
    await listener.until_published(run)
    assert (await stations.run(run))["crashes"] == 1


async def test_a_run_of_an_unknown_agent_fails_after_the_grace(listeners: Listeners, stations: Stations) -> None:
    await listeners.start(long_poll=0.05, unknown_agent_grace=0.3)
    run = await stations.send("s", recipient="ghost")

    async def has_failed() -> bool:
        rows = await stations.fetch("select state from chaz.runs where id = %(id)s", id=run)
        return [row["state"] for row in rows] == ["failed"]

    await eventually_async(has_failed)
    row = await stations.run(run)
    assert row["reason"] == "unknown-agent"
    assert row["ended_at"] - row["queued_at"] >= timedelta(seconds=0.3)


# Neighbours


async def test_a_session_that_cannot_be_placed_stops_no_other(
    listeners: Listeners, stations: Stations, database: ScratchDatabase
) -> None:
    database.query(
        """
        create table sabotaged as select true as yes;
        create function sabotage() returns trigger language plpgsql as $$
            begin
                if exists (select from sabotaged) then raise 'sabotaged'; end if;
                return new;
            end $$;
        create trigger sabotage before update on chaz.entries for each row
            when (new.content = 'poison') execute function sabotage()
        """
    )
    listener = await listeners.start()
    poisoned = await stations.send("a", "poison")
    good = [await stations.send(session) for session in ("b", "c")]
    await listener.until_published(*good)
    database.query("delete from sabotaged")
    again = await stations.send("b")
    await listener.until_published(poisoned)
    assert again not in listener.published


async def test_a_head_that_was_taken_is_looked_at_again_soon(
    listeners: Listeners, stations: Stations, database: ScratchDatabase
) -> None:
    listener = await listeners.start()
    claim = await stations.claimed("s")
    await listener.until_asleep()
    rounds = listener.rounds
    with database.connect() as worker:
        # In a thread, because the listener that may hold the lock is on this loop.
        await asyncio.to_thread(
            worker.execute, "select from chaz.heads where session_id = %s for update", [claim.session_id]
        )
        await stations.send("s", "second")

        async def has_looked() -> bool:
            return listener.rounds > rounds

        await eventually_async(has_looked)
        await listener.until_rounds(2)
        worker.commit()

    async def is_placed() -> bool:
        return [position for position, _, _ in await stations.lines("s")] == [1, 2, 3]

    await eventually_async(is_placed, within=3)


async def test_a_session_that_cannot_be_placed_is_set_aside(
    listeners: Listeners, stations: Stations, database: ScratchDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    listener = await listeners.start(long_poll=0.05)
    # In threads: what waits here for a lock would stop the listener, which is on this loop and may hold it.
    # Whoever may write may give a position, and so take one that the listener is about to give.
    await asyncio.to_thread(
        database.query,
        """
        insert into chaz.entries (session_id, position, type, sender, author, content)
        values (chaz.session_id('spoilt'), 1, 'note', 'eve', 'program', '')
        """,
    )
    spoilt = await stations.send("spoilt")
    await listener.until_rounds(3)
    sound = [await stations.send(f"sound {n}") for n in range(3)]
    await listener.until_published(*sound)
    await listener.until_rounds(10)
    said = [record.getMessage() for record in caplog.records if "cannot be placed" in record.getMessage()]
    assert said[0].endswith("set aside for 1 s")
    assert len(said) < 5

    await asyncio.to_thread(database.query, "alter table chaz.entries disable trigger entries_append_only_delete")
    await asyncio.to_thread(database.query, "delete from chaz.entries where sender = 'eve'")
    await listener.until_published(spoilt, within=30)


async def test_a_kind_of_work_that_fails_holds_up_no_other(
    listeners: Listeners, stations: Stations, database: ScratchDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    listener = await listeners.start(long_poll=0.05, lease=0.5)
    lost, late = [await stations.claimed(session) for session in ("lost", "late")]
    await asyncio.to_thread(
        database.query,
        """
        create function refuse() returns trigger language plpgsql as $$ begin raise 'refused by the test'; end $$;
        create trigger refuse before update on chaz.runs for each row when (new.crashes > old.crashes)
            execute function refuse()
        """,
    )
    stations.beat(timedelta(seconds=-1))
    await asyncio.to_thread(
        database.query, "update chaz.runs set deadline = now() - interval '1 hour' where id = %(id)s", id=late.run_id
    )

    async def is_ended() -> bool:
        return await stations.state(late.run_id) == "failed"

    await eventually_async(is_ended)
    assert await stations.state(lost.run_id) == "running"
    assert "taking back the runs of lost workers failed; set aside for 1 s" in caplog.text

    await asyncio.to_thread(database.query, "drop trigger refuse on chaz.runs")
    await listener.until_published(lost.run_id, within=30)
