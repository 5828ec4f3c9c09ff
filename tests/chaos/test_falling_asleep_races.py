"""An insert that commits in the very moment when the last listener goes to sleep, told that it need not ring.

The long poll and the sweep are a minute, so that nothing but the proof can find it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import DictRow

from chaz.testing import eventually_async
from tests.fixtures.listeners import A_MINUTE, Listeners, Watched
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.races import RACES
from tests.fixtures.stations import Stations

pytestmark = [pytest.mark.anyio, pytest.mark.chaos, pytest.mark.timeout(120)]

Connection = psycopg.Connection[DictRow]


MOMENTS = ["before its proof", "as its proof begins", "before a look", "after a look", "some time"]


class Proving(Watched):
    """A listener during whose proof, that it may sleep, something happens once."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.happening: dict[str, Callable[[], Awaitable[object]]] = {}

    async def _happen(self, moment: str) -> None:
        if work := self.happening.pop(moment, None):
            await work()

    async def _begin_proof(self) -> tuple[int, float]:
        await self._happen("before its proof")
        proof = await super()._begin_proof()
        await self._happen("as its proof begins")
        return proof

    async def _is_proven(self, proof: tuple[int, float]) -> bool:
        await self._happen("before a look")
        proven = await super()._is_proven(proof)
        await self._happen("after a look")
        return proven


def relying_on_it(connection: Connection, session: str) -> UUID | None:
    """An insert that found somebody awake and does not ring, not committed yet; None if it would ring."""
    (sent,) = connection.execute(
        "select chaz.send(%s, 'directive', 'ada', 'slow', recipient => 'solo') as id", [session]
    ).fetchall()
    connection.execute("set constraints all immediate")
    (rung,) = connection.execute("select current_setting('chaz.rung', true) = 'on' as rang").fetchall()
    if not rung["rang"]:
        return sent["id"]
    connection.rollback()
    return None


async def until_relying(connection: Connection, stations: Stations, race: int) -> UUID:
    """Keep the listeners awake until somebody relies on that."""
    for number in count():
        await stations.send(f"{race} awake {number}")
        if run := await asyncio.to_thread(relying_on_it, connection, f"{race} slow"):
            return run
    raise AssertionError("unreachable")


async def until_taken_back(database: ScratchDatabase) -> None:
    async def check() -> bool:
        return database.value("select awake_until < clock_timestamp() from chaz.doorbell")

    await eventually_async(check, every=0.001)


@pytest.mark.parametrize("how_many", [1, 2])
async def test_who_commits_as_the_last_one_goes_to_sleep_is_found(
    listeners: Listeners, stations: Stations, database: ScratchDatabase, how_many: int
) -> None:
    started = [await listeners.start(Proving, sweep=A_MINUTE, short_poll=0.005) for _ in range(how_many)]
    happening: dict[str, Callable[[], Awaitable[object]]] = {}
    for listener in started:
        listener.happening = happening
    with database.connect() as connection:

        async def commit() -> None:
            await asyncio.to_thread(connection.commit)

        for race in range(RACES):
            run = await until_relying(connection, stations, race)
            if (moment := MOMENTS[race % len(MOMENTS)]) == "some time":
                await until_taken_back(database)
                for _ in range(random.Random(race).randrange(100)):
                    await asyncio.sleep(0)
                await commit()
            else:
                happening[moment] = commit
                # The proof may have begun already: with more to do it begins anew.
                await stations.send(f"{race} once more")

            async def is_published(run: UUID = run) -> bool:
                return any(run in listener.published for listener in started)

            await eventually_async(is_published, within=5, every=0.002)
            assert not happening
            for listener in started:
                await listener.until_asleep()
            # Nobody claims them, and so many that are announced would hold back what comes after.
            database.query("update chaz.runs set publishes = 0, publish_after = 'infinity' where state = 'queued'")


async def test_nobody_relies_on_it_any_more_when_its_proof_begins(
    listeners: Listeners, stations: Stations, database: ScratchDatabase
) -> None:
    listener = await listeners.start(Proving, sweep=A_MINUTE, short_poll=0.005)
    relied: list[UUID | None] = []
    with database.connect() as connection:

        async def try_to_rely() -> None:
            relied.append(await asyncio.to_thread(relying_on_it, connection, "late"))
            connection.rollback()

        for race in range(RACES):
            listener.happening["as its proof begins"] = try_to_rely
            await listener.until_published(await stations.send(f"{race}"))
            await listener.until_asleep()
    assert relied == [None] * RACES
