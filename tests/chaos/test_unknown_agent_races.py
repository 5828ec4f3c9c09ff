"""A sweep that gives up a run of an agent that nobody serves, in the very moment when somebody begins to."""

from __future__ import annotations

import pytest

from chaz import sweeps
from chaz.aside import Aside
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.races import RACES, at_once
from tests.fixtures.stations import Stations

pytestmark = [pytest.mark.anyio, pytest.mark.chaos, pytest.mark.timeout(120)]


async def waiting(stations: Stations, database: ScratchDatabase, session: str, agent: str) -> None:
    """A run that has waited for its agent past the grace."""
    await stations.send(session, recipient=agent)
    await stations.place()
    database.query("update chaz.runs set queued_at = now() - interval '1 minute' where agent = %(agent)s", agent=agent)


async def close_late(stations: Stations) -> int:
    return len(await sweeps.close_late(stations.database, grace=10, lease=15, aside=Aside()))


async def attached(stations: Stations, agent: str) -> int:
    return len(await stations.fetch("select from chaz.attachments where agent = %(agent)s", agent=agent))


async def test_a_run_that_is_not_given_up_keeps_its_agent(stations: Stations, database: ScratchDatabase) -> None:
    await waiting(stations, database, "s", "ghost")
    with database.connect() as busy:
        busy.execute("select from chaz.heads for update")
        assert await close_late(stations) == 0
    assert await attached(stations, "ghost") == 1
    assert await close_late(stations) == 1
    assert await attached(stations, "ghost") == 0


async def test_an_agent_is_given_up_with_its_run_or_not_at_all(stations: Stations, database: ScratchDatabase) -> None:
    for number in range(RACES):
        agent = f"late {number}"
        await waiting(stations, database, f"s{number}", agent)
        (run,) = await stations.fetch("select id from chaz.runs where agent = %(agent)s", agent=agent)

        async def begin_to_serve(agent: str = agent, run: object = run["id"]) -> None:
            await stations.register(agent)
            await stations.try_to_claim(run, agent)  # pyright: ignore[reportArgumentType]

        await at_once(begin_to_serve(), close_late(stations), close_late(stations))
        state = await stations.state(run["id"])
        assert (state, await attached(stations, agent)) in {("running", 1), ("failed", 0)}
