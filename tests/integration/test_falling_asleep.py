"""Going to sleep is a proof: who relied on an awake listener is found before it sleeps.

The long poll is a minute, so that nothing but the proof can find it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import DictRow

from chaz.testing import eventually_async
from tests.fixtures.listeners import Listeners, Watched
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations

pytestmark = pytest.mark.anyio


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
