"""Several listeners over the same inbox: every entry is placed once, makes one run, and is published by one of them."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from chaz.publishing import publishable
from chaz.testing import eventually_async
from tests.fixtures.listeners import A_MINUTE, Listeners, Watched
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.races import RACES, unruly
from tests.fixtures.stations import Stations

pytestmark = [pytest.mark.anyio, pytest.mark.chaos, pytest.mark.timeout(120)]

SESSIONS = 20
PROGRAMS = 4
ENTRIES = RACES * SESSIONS * PROGRAMS


class Smooth(Watched):
    """A listener that counts the rounds in which it could not place all at once."""

    stumbles = 0

    async def _place_and_publish_apart(self) -> bool:
        self.stumbles += 1
        return await super()._place_and_publish_apart()


def insert(database: ScratchDatabase, race: int) -> None:
    """A directive to each of many sessions, by one statement; each time another tenant's, whose turn it is."""
    database.query(
        """
        insert into chaz.entries (session_id, tenant, type, sender, recipient, content)
        select chaz.session_id(format('%%s of race %%s', n, %(race)s::int)), %(race)s::text, 'directive', 'etl', 'solo',
            n::text
        from generate_series(1, %(sessions)s) n
        """,
        race=race,
        sessions=SESSIONS,
    )


@pytest.mark.parametrize("how_many", [2, 4])
async def test_each_run_is_made_once_and_published_once(
    listeners: Listeners, stations: Stations, database: ScratchDatabase, how_many: int
) -> None:
    started = [await listeners.start(Smooth, sweep=A_MINUTE) for _ in range(how_many)]

    def published() -> Counter[object]:
        return Counter(run for listener in started for run in listener.published)

    for race in range(RACES):
        await asyncio.gather(*(asyncio.to_thread(insert, database, race) for _ in range(PROGRAMS)))

        async def all_are_published(race: int = race) -> bool:
            return len(published()) == (race + 1) * SESSIONS

        await eventually_async(all_are_published, every=0.002)

    async def all_are_placed() -> bool:
        return database.value("select count(position) from chaz.entries") == ENTRIES

    await eventually_async(all_are_placed)
    runs = await stations.fetch("select id, state, publishes from chaz.runs")
    queued = RACES * SESSIONS
    assert Counter(row["state"] for row in runs) == {"queued": queued, "pending": ENTRIES - queued}
    assert published() == Counter(row["id"] for row in runs if row["state"] == "queued")
    assert {row["publishes"] for row in runs if row["state"] == "queued"} == {1}
    assert unruly(database) == []
    # What the tables' constraints refuse has not been tried.
    assert sum(listener.stumbles for listener in started) == 0
    # The work was shared, or this shows nothing.
    assert sum(bool(listener.published) for listener in started) >= 2


async def test_what_is_due_again_is_published_by_one_of_them(stations: Stations, database: ScratchDatabase) -> None:
    insert(database, 0)
    await stations.place()
    for race in range(1, RACES + 1):
        database.query("update chaz.runs set publish_after = now()")
        taken = await asyncio.gather(
            *(stations.transact(lambda tx: publishable(tx, first_wait=A_MINUTE, limit=8)) for _ in range(PROGRAMS))
        )
        found = Counter(publication.delivery.run for publications in taken for publication in publications)
        assert set(found.values()) == {1}
        assert found.total() == SESSIONS
        assert database.value("select array_agg(distinct publishes) from chaz.runs") == [1 + race]
