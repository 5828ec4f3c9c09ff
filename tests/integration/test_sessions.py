"""Sessions as they are listed: their agents, who is busy in them, and what waits."""

from __future__ import annotations

from typing import Any

import pytest

from chaz import Chaz
from chaz.entries import session_id
from chaz.listings import SessionFilter, list_sessions
from tests.fixtures.stations import Stations

pytestmark = pytest.mark.anyio


async def listed(stations: Stations, **wanted: Any) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in await list_sessions(stations.database, SessionFilter(**wanted))}


async def test_a_session_says_who_is_busy_and_what_waits(stations: Stations) -> None:
    claim = await stations.claimed("den")
    await stations.say("den", "and this?")
    await stations.send("den", recipient="parent")
    await stations.place()
    await stations.say("den", "not placed yet")
    await stations.send("elsewhere")

    found = await listed(stations)

    assert list(found) == ["den"], "a session is listed once something is placed in it"
    den = found["den"]
    assert (den["id"], den["run"], den["agent"], den["state"]) == (
        session_id("den"),
        claim.run_id,
        "solo",
        "running",
    )
    assert (den["agents"], den["entries"], den["unplaced"], den["pending"], den["asked"]) == (
        ["solo", "parent"],
        4,
        1,
        2,
        0,
    )
    assert den["last_at"] == (await stations.log("den"))[3].created_at
    assert den["since"] is not None


async def test_a_parked_session_says_what_it_waits_for(stations: Stations) -> None:
    await stations.asking("den", calls=2)

    den = (await listed(stations))["den"]

    assert (den["state"], den["waits_for"], den["asked"]) == ("parked", "child", 2)


async def test_an_idle_session_says_so(stations: Stations) -> None:
    await stations.end(await stations.claimed("den"))

    den = (await listed(stations))["den"]

    assert (den["run"], den["state"], den["unplaced"], den["pending"], den["asked"]) == (None, None, 0, 0, 0)


async def test_a_session_that_was_only_configured_is_listed(stations: Stations, chaz: Chaz) -> None:
    chaz.session("new").attach("solo")

    new = (await listed(stations))["new"]

    assert (new["agents"], new["entries"], new["last_at"], new["run"]) == (["solo"], 0, None, None)


async def test_filters(stations: Stations) -> None:
    await stations.end(await stations.claimed("an old Den"))
    await stations.asking("asking")
    parent, _ = await stations.spawning("family")
    children = {
        row["id"] for row in await list_sessions(stations.database, SessionFilter(children=True)) if not row["name"]
    }

    assert len(children) == 1, "the session that the parent opened for its child"
    assert list(await listed(stations)) == ["family", "asking", "an old Den"]
    assert list(await listed(stations, limit=1)) == ["family"]
    assert list(await listed(stations, name="den")) == ["an old Den"]
    assert list(await listed(stations, busy=True)) == ["family", "asking"]
    assert list(await listed(stations, waiting=True)) == ["asking"]
    assert list(await listed(stations, agent="parent")) == ["family"]
    assert list(await listed(stations, id=parent.session_id)) == ["family"]
    assert list(await listed(stations, tenant="")) == ["family", "asking", "an old Den"]
    assert list(await listed(stations, tenant="other")) == []
