"""The listener: what is inserted is published, whatever happens to the listener, its connections and its neighbours.

The long poll is a minute, so that what is found was found by the bell, the sweep after a connect, or the proof.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import DictRow

from chaz.audit.publisher import AuditPublisher
from chaz.database import Database
from chaz.errors import BrokerUnavailable
from chaz.listener import Listener
from chaz.runs import Publication
from chaz.settings import Settings
from chaz.testing import eventually_async
from tests.fixtures.broker import Broker
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations

pytestmark = pytest.mark.anyio

A_MINUTE = 60.0


class Watched(Listener):
    """A listener that shows what it is about, and what it published."""

    def __init__(self, settings: Settings, database: Database) -> None:
        super().__init__(settings, database, self._capture, AuditPublisher(settings))
        self.published: list[UUID] = []
        self.rounds = 0
        self.naps = 0
        self.asleep = False
        self._held = False
        self._at_gate = threading.Semaphore(0)
        self._passes = threading.Semaphore(0)
        self.broker_away = False

    def _capture(self, publications: Sequence[Publication]) -> None:
        self._at_gate.release()
        if self._held:
            assert self._passes.acquire(timeout=30)
        if self.broker_away:
            raise BrokerUnavailable("nowhere", "away")
        self.published += [publication.delivery.run for publication in publications]

    def hold(self) -> None:
        """Stop it whenever it publishes, until :meth:`let_pass`."""
        self._held = True

    def let_pass(self, *, from_now_on: bool = False) -> None:
        """Let it publish this once."""
        self._held = not from_now_on
        self._passes.release()

    async def until_publishing(self) -> None:
        """Wait until it publishes once more."""
        assert await asyncio.to_thread(self._at_gate.acquire, timeout=5)

    async def _round(self, **options: Any) -> bool:
        self.rounds += 1
        return await super()._round(**options)

    async def _sleep(self, *arguments: Any) -> Any:
        self.naps += 1
        self.asleep = True
        try:
            return await super()._sleep(*arguments)
        finally:
            self.asleep = False

    async def until_asleep(self) -> None:
        await eventually_async(self._is_asleep)

    async def _is_asleep(self) -> bool:
        return self.asleep

    async def until_published(self, *runs: UUID, within: float = 5.0) -> None:
        async def check() -> bool:
            return set(runs) <= set(self.published)

        await eventually_async(check, within=within)

    async def until_rounds(self, more: int) -> None:
        """Wait for so many rounds more, or until it sleeps."""
        enough = self.rounds + more

        async def check() -> bool:
            return self.rounds >= enough or self.asleep

        await eventually_async(check)


class Listeners:
    """Starts listeners on the test's database."""

    def __init__(self, database: ScratchDatabase, broker: Broker, stack: AsyncExitStack) -> None:
        self._database, self._broker, self._stack = database, broker, stack

    async def start(self, *, ready: bool = True, **settings: Any) -> Watched:
        """A listener that sleeps."""
        listener = await self._stack.enter_async_context(self._running(settings))
        if ready:
            await listener.until_asleep()
        return listener

    @asynccontextmanager
    async def _running(self, settings: dict[str, Any]) -> AsyncGenerator[Watched]:
        chosen = self._broker.settings(database_url=self._database.url, **{"long_poll": A_MINUTE, **settings})
        database = await Database(self._database.url, name="chaz-listener").open()
        listener = Watched(chosen, database)
        task = asyncio.create_task(listener.run())
        yield listener
        listener.let_pass(from_now_on=True)
        listener.stop()
        await asyncio.wait_for(task, 10)
        await database.close()


@pytest.fixture
async def listeners(database: ScratchDatabase, broker: Broker) -> AsyncIterator[Listeners]:
    async with AsyncExitStack() as stack:
        yield Listeners(database, broker, stack)


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
    listener = await listeners.start(long_poll=0.05)
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
        create function sabotage() returns trigger language plpgsql as $$ begin raise 'sabotaged'; end $$;
        create trigger sabotage before update on chaz.entries for each row
            when (new.content = 'poison') execute function sabotage()
        """
    )
    listener = await listeners.start()
    poisoned = await stations.send("a", "poison")
    good = [await stations.send(session) for session in ("b", "c")]
    await listener.until_published(*good)
    database.query("drop trigger sabotage on chaz.entries")
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
        worker.execute("select from chaz.heads where session_id = %s for update", [claim.session_id])
        await stations.send("s", "second")

        async def has_looked() -> bool:
            return listener.rounds > rounds

        await eventually_async(has_looked)
        await listener.until_rounds(2)
        worker.commit()

    async def is_placed() -> bool:
        return [position for position, _, _ in await stations.lines("s")] == [1, 2, 3]

    await eventually_async(is_placed, within=3)


# The proof


class Sleeper:
    """A producer that was told that somebody is awake, and takes its time to commit."""

    def __init__(self, connection: psycopg.Connection[DictRow], session: str) -> None:
        self._connection = connection
        row = connection.execute(
            "select chaz.send(%s, 'directive', 'ada', 'slow', recipient => 'solo') as id", [session]
        ).fetchone()
        assert row is not None
        self.run: UUID = row["id"]
        connection.execute("set constraints all immediate")
        rung = connection.execute("select current_setting('chaz.rung', true) as rung").fetchone()
        assert rung is not None
        assert rung["rung"] != "on", "it rang, so nobody has to rely on the proof"

    def commit(self) -> None:
        self._connection.commit()


async def until_the_word_is_taken_back(database: ScratchDatabase) -> None:
    async def check() -> bool:
        return database.value("select awake_until < clock_timestamp() from chaz.doorbell")

    await eventually_async(check)


@asynccontextmanager
async def awake(listener: Watched, stations: Stations, database: ScratchDatabase) -> AsyncGenerator[None]:
    """A while in which the listener works, and has said so."""
    listener.hold()
    await stations.send("first")
    await listener.until_publishing()
    second = await stations.send("second")
    listener.let_pass()
    await listener.until_publishing()
    assert database.value("select awake_until > clock_timestamp() from chaz.doorbell")
    yield
    listener.let_pass(from_now_on=True)
    await listener.until_published(second)


async def test_who_relied_on_an_awake_listener_is_found_before_it_sleeps(
    listeners: Listeners, stations: Stations, database: ScratchDatabase
) -> None:
    listener = await listeners.start()
    with database.connect() as connection:
        async with awake(listener, stations, database):
            sleeper = Sleeper(connection, "slow")
        await until_the_word_is_taken_back(database)
        await listener.until_rounds(3)
        assert not listener.asleep
        sleeper.commit()
    await listener.until_published(sleeper.run, within=3)
    await listener.until_asleep()


async def test_work_that_turns_up_during_the_proof_does_not_cut_it_short(
    listeners: Listeners, stations: Stations, database: ScratchDatabase
) -> None:
    listener = await listeners.start()
    with database.connect() as one, database.connect() as two:
        async with awake(listener, stations, database):
            quick, slow = Sleeper(one, "quick"), Sleeper(two, "slow")
        await until_the_word_is_taken_back(database)
        quick.commit()
        await listener.until_published(quick.run, within=3)
        await until_the_word_is_taken_back(database)
        await listener.until_rounds(4)
        slow.commit()
    await listener.until_published(slow.run, within=3)


async def test_a_stopped_listener_takes_its_word_back(
    listeners: Listeners, stations: Stations, database: ScratchDatabase
) -> None:
    listener = await listeners.start()
    async with awake(listener, stations, database):
        listener.stop()

    async def has_stopped() -> bool:
        return database.value("select mode from chaz.listeners") == "stopped"

    await eventually_async(has_stopped)
    assert database.value("select awake_until < clock_timestamp() from chaz.doorbell")
