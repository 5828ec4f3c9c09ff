"""How often tools are called, on real PostgreSQL: whoever asks, however many at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from chaz import rates
from chaz.database import Database
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations

pytestmark = pytest.mark.anyio


async def admit(stations: Stations, tool: str = "send", **how: Any) -> float:
    how = {"burst": 1, "interval": 3600.0, "within": 10.0} | how
    return await stations.transact(lambda tx: rates.admit(tx, tool, **how))


async def test_a_burst_at_once_then_one_at_a_time(stations: Stations) -> None:
    assert [await admit(stations, burst=3) for _ in range(3)] == [0, 0, 0]
    waits = [await admit(stations, burst=3) for _ in range(3)]
    # Nothing was taken: the wait grows no longer.
    assert waits == sorted(waits, reverse=True)
    assert all(3500 < wait <= 3600 for wait in waits)


async def test_each_tool_has_its_own(stations: Stations) -> None:
    assert await admit(stations, "one") == await admit(stations, "two") == 0
    assert await admit(stations, "one") > 10


async def test_a_short_wait_is_taken(stations: Stations) -> None:
    first, second, third, refused = [await admit(stations, interval=400.0, within=1000.0) for _ in range(4)]
    assert first == 0
    assert 200 < second <= 400 < third <= 800 < 1000 < refused


async def test_what_was_not_called_comes_back_up_to_a_burst(stations: Stations) -> None:
    for _ in range(3):
        await admit(stations, burst=3)
    await stations.fetch("update chaz.tool_rates set next_at = next_at - interval '1 hour' returning 1")
    assert await admit(stations, burst=3) == 0
    assert await admit(stations, burst=3) > 10
    await stations.fetch("update chaz.tool_rates set next_at = next_at - interval '1 year' returning 1")
    assert [await admit(stations, burst=3) for _ in range(3)] == [0, 0, 0]
    assert await admit(stations, burst=3) > 10


async def test_a_higher_rate_does_not_wait_for_what_a_lower_one_had_said(stations: Stations) -> None:
    for _ in range(5):
        await admit(stations, burst=5)
    assert await admit(stations, burst=5) > 3500
    assert await admit(stations, interval=1.0) <= 11
    (row,) = await stations.fetch("select next_at < clock_timestamp() + interval '11 s' as soon from chaz.tool_rates")
    assert row["soon"]


def in_a_thread(url: str, ready: threading.Barrier, found: list[float], asked: int) -> Callable[[], None]:
    async def ask() -> None:
        database = Database(url, size=1)
        await database.open()
        ready.wait(30)
        for _ in range(asked):
            found.append(
                await database.transact(lambda tx: rates.admit(tx, "send", burst=5, interval=3600.0, within=10.0))
            )
        await database.close()

    return lambda: asyncio.run(ask())


@pytest.mark.parametrize("round_", range(3))
def test_two_at_once_never_exceed_it(database: ScratchDatabase, round_: int) -> None:
    ready, found = threading.Barrier(2), list[float]()
    threads = [threading.Thread(target=in_a_thread(database.url, ready, found, 10)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 20
    assert found.count(0) == 5


async def test_who_waited_for_the_row_reads_the_clock_after_that(stations: Stations, database: ScratchDatabase) -> None:
    await admit(stations, interval=0.001)
    with database.connect() as holder:
        holder.execute("select from chaz.tool_rates for update")
        asked = asyncio.create_task(admit(stations, interval=0.001))
        await asyncio.to_thread(database.until_blocked, 1)
        (let_go,) = holder.execute("select clock_timestamp() as at").fetchall()
        holder.commit()
        assert await asked == 0
    (row,) = await stations.fetch("select next_at from chaz.tool_rates")
    at: datetime = let_go["at"]
    assert row["next_at"] - timedelta(milliseconds=1) >= at
