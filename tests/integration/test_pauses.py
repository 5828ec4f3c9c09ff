"""Pausing: what runs goes on, nothing new starts, and all of it starts again at once when it is resumed."""

from __future__ import annotations

from functools import partial
from uuid import UUID

import pytest

from chaz import Chaz, UnknownSession, publishing
from chaz.entries import session_id
from chaz.errors import InvalidSubject, UnknownAgent
from chaz.runs import Claim, Unclaimed
from chaz.settings import Settings
from tests.fixtures.listeners import A_MINUTE, Listeners
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations

pytestmark = pytest.mark.anyio

WHATS = ["agent:solo", "session:s", f"session:{session_id('s')}", "all"]


async def published(stations: Stations) -> list[UUID]:
    """What one round of a listener publishes, at its placing or after it."""
    placed = await stations.place()
    due = await stations.transact(partial(publishing.publishable, first_wait=A_MINUTE))
    return [publication.delivery.run for publication in placed.publications + due]


@pytest.fixture
async def session(stations: Stations) -> str:
    """A session that exists."""
    await stations.end(await stations.claimed("s", recipient="parent"))
    return "s"


@pytest.mark.parametrize("what", WHATS)
async def test_what_is_paused_is_placed_and_not_published(
    stations: Stations, session: str, chaz: Chaz, what: str
) -> None:
    assert chaz.pause(what)
    run = await stations.send(session)
    assert await published(stations) == []
    assert await stations.state(run) == "queued"
    elsewhere = await stations.send("other", recipient="child")
    assert await published(stations) == ([] if what == "all" else [elsewhere])

    assert chaz.resume(what)
    assert run in await published(stations)
    assert isinstance(await stations.try_to_claim(run), Claim)


@pytest.mark.parametrize("what", WHATS)
async def test_a_delivery_in_flight_is_refused_and_comes_again_at_the_resume(
    stations: Stations, session: str, chaz: Chaz, what: str
) -> None:
    run = await stations.send(session)
    assert await published(stations) == [run]
    chaz.pause(what)
    assert await stations.try_to_claim(run) == Unclaimed("held", "paused")
    assert await published(stations) == []
    chaz.resume(what)
    assert await published(stations) == [run]


async def test_what_runs_goes_on_and_what_was_parked_waits(stations: Stations, chaz: Chaz) -> None:
    parent, (child,) = await stations.spawning("s")
    claim = await stations.claim(child, "child")
    assert await stations.park(parent)
    chaz.pause("all")
    await stations.step(claim)
    await stations.end(claim)
    assert await stations.state(parent.run_id) == "queued"
    assert await published(stations) == []
    assert await stations.try_to_claim(parent.run_id, "parent") == Unclaimed("held", "paused")
    chaz.resume("all")
    assert await published(stations) == [parent.run_id]


async def test_one_that_was_given_back_for_a_while_does_not_come_sooner(stations: Stations, chaz: Chaz) -> None:
    claim = await stations.claimed("s")
    await stations.give_back(claim, wait=3600)
    chaz.pause("all")
    assert await stations.try_to_claim(claim.run_id) == Unclaimed("not yet", "its time has not come")
    chaz.resume("all")
    assert await published(stations) == []


async def test_a_listener_sleeps_while_all_is_paused_and_wakes_at_the_resume(
    stations: Stations, chaz: Chaz, listeners: Listeners
) -> None:
    listener = await listeners.start()
    chaz.pause("all")
    run = await stations.send("s")
    await listener.until_naps(1)
    assert listener.published == []
    chaz.resume("all")
    await listener.until_published(run)


async def test_pauses_are_listed_and_taken_once(chaz: Chaz, stations: Stations, session: str) -> None:
    assert chaz.paused() == []
    assert chaz.pause("agent:solo", by="ada", reason="too dear") is True
    assert chaz.pause("agent:solo", by="bob") is False
    assert chaz.pause(f"session:{session_id(session)}", by="bob") is True
    found = chaz.paused()
    assert [(row["kind"], row["name"], row["paused_by"], row["reason"]) for row in found] == [
        ("agent", "solo", "ada", "too dear"),
        ("session", "s", "bob", ""),
    ]
    assert chaz.resume("session:s") is True
    assert chaz.resume("session:s") is False


async def test_a_resume_is_of_nothing_else(stations: Stations, session: str, chaz: Chaz) -> None:
    for what in ("agent:solo", "agent:child", f"session:{session}", "all"):
        assert chaz.pause(what)
    assert chaz.resume("agent:solo")
    assert chaz.resume("all")
    assert [(row["kind"], row["name"]) for row in chaz.paused()] == [("agent", "child"), ("session", session)]
    runs = [await stations.send(name, recipient=to) for name, to in (("t", "solo"), ("u", "child"), (session, "solo"))]
    assert await published(stations) == runs[:1]


async def test_of_two_tenants_sessions_of_one_name_the_own_is_paused(
    stations: Stations, session: str, database: ScratchDatabase
) -> None:
    await stations.end(await stations.claimed(session, tenant="acme"))
    with Chaz(settings=Settings(database_url=database.url, tenant="acme")) as acme:
        assert acme.pause(f"session:{session}")
    ours, theirs = [await stations.send(session, tenant=tenant) for tenant in ("", "acme")]
    assert await published(stations) == [ours]
    assert await stations.try_to_claim(theirs) == Unclaimed("held", "paused")


def test_what_is_not_there_cannot_be_paused(chaz: Chaz, database: ScratchDatabase) -> None:
    for wrong in ("", "agents", "agent:", "agent", "all:x", "queue:x"):
        with pytest.raises(InvalidSubject):
            chaz.pause(wrong)
    with pytest.raises(UnknownAgent):
        chaz.pause("agent:nobody")
    with pytest.raises(UnknownSession):
        chaz.pause("session:nowhere")
    assert database.value("select count(*) from chaz.pauses") == 0
