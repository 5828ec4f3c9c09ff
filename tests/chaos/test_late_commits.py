"""What an agent sees of a transaction that wrote before its claim and commits after: nothing, and its next run all."""

from __future__ import annotations

import pytest

from chaz import sessionlog
from chaz.runs import Claim
from tests.fixtures.postgres import ScratchDatabase, both_servers
from tests.fixtures.races import RACES
from tests.fixtures.stations import Stations

pytestmark = [pytest.mark.anyio, pytest.mark.chaos, pytest.mark.timeout(120), both_servers]

SEND = "select chaz.send(%s, 'message', 'bob', %s, recipient => 'solo') as id"


async def seen(stations: Stations, claim: Claim) -> tuple[list[str], list[str]]:
    """The conversation so far and what the run answers, as texts."""
    context, own = await stations.transact(
        lambda tx: sessionlog.context_entries(
            tx, session_id=claim.session_id, run_id=claim.run_id, read_to=claim.read_to
        )
    )
    return [entry.content for entry in context], [entry.content for entry in own]


@pytest.mark.parametrize("commits", [True, False])
async def test_a_run_sees_what_was_placed_at_its_claim_and_the_next_one_the_rest(
    stations: Stations, database: ScratchDatabase, commits: bool
) -> None:
    with database.connect() as slow:
        for number in range(RACES):
            session = f"s{number}"
            late = slow.execute(SEND, [session, "written first"]).fetchone()
            slow.execute(SEND, [f"{session} of others", "elsewhere"])
            assert late is not None
            first = await stations.say(session, "one", recipient="solo")
            await stations.place()
            claim = await stations.claim(first)
            assert await seen(stations, claim) == ([], ["one"])

            slow.commit() if commits else slow.rollback()
            await stations.place()
            assert await seen(stations, claim) == ([], ["one"])

            await stations.give_back(claim)
            again = await stations.claim(first)
            assert (again.attempt, again.read_to) == (claim.attempt + 1, claim.read_to)
            assert await seen(stations, again) == ([], ["one"])
            await stations.end(again, "answer")

            if commits:
                assert await seen(stations, await stations.claim(late["id"])) == (["one", "answer"], ["written first"])
            else:
                second = await stations.say(session, "two", recipient="solo")
                await stations.place()
                assert await seen(stations, await stations.claim(second)) == (["one", "answer"], ["two"])


async def test_two_that_cross_are_seen_in_the_order_of_their_commits(
    stations: Stations, database: ScratchDatabase
) -> None:
    with database.connect() as slow, database.connect() as quick:
        slow.execute(SEND, ["s", "slow"])
        quick.execute(SEND, ["s", "quick"])
        quick.commit()
        await stations.place()
        slow.commit()
        await stations.place()
    (run,) = await stations.fetch("select id from chaz.runs where state = 'queued'")
    # Both are placed by now, so that one run answers both.
    assert await seen(stations, await stations.claim(run["id"])) == ([], ["quick", "slow"])
