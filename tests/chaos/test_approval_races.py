"""A person's word against whatever else happens to the run that asked: one of them comes first, and the log agrees."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Sequence
from uuid import UUID

import pytest

from chaz import approvals, deciding
from chaz.errors import StaleAttempt
from chaz.runs import Claim
from tests.fixtures.postgres import ScratchDatabase, both_servers
from tests.fixtures.races import at_once, deadlocks, shortly, unruly, untried
from tests.fixtures.stations import Stations, a_call

pytestmark = [pytest.mark.anyio, pytest.mark.chaos, pytest.mark.timeout(180), both_servers]

TIMES = 25


async def word(stations: Stations, request: UUID, decision: str) -> UUID | None:
    return await stations.transact(lambda tx: deciding.decide(tx, request, decision, "ada", decision))  # pyright: ignore[reportArgumentType]


async def time_out(stations: Stations, request: UUID) -> bool:
    return await stations.transact(lambda tx: approvals.time_out(tx, request))


def disagreeing(database: ScratchDatabase) -> Sequence[object]:
    """Requests that are open although their run is over, or of whose one decision the log says something else.

    Nor may a run be parked that waits for nothing, or a wait be answered by anything but the request's decision.
    """
    return database.query(
        """
        with said as (
            select d.metadata->>'request' as request, d.metadata->>'decision' as decision from chaz.entries d
            where d.type = 'approval_decision' and not exists (
                select from chaz.entries n where n.type = 'note' and n.metadata->>'entry' = d.id::text))
        select a.id::text, a.decision, r.state, (select jsonb_agg(said) from said where request = a.id::text) as log
        from chaz.approvals a join chaz.runs r on r.id = a.run_id
            left join chaz.waits w on (w.run_id, w.step, w.ordinal) = (a.run_id, a.step, a.ordinal)
        where (a.decision is null and r.ended_at is not null)
            or (select count(*) from said where request = a.id::text) <> (a.decision is not null)::int
            or exists (select from said where request = a.id::text and decision <> a.decision)
            or (a.decision is not null and a.decision <> 'cancelled' and w.run_id is not null and w.answer is null)
        union all
        select r.id::text, null, r.state, null from chaz.runs r where r.state = 'parked' and not exists (
            select from chaz.waits w where w.run_id = r.id and w.answer is null)
        """
    )


async def child_asking(stations: Stations, session: str) -> tuple[Claim, Claim, UUID]:
    """A root's run, its child's that asked in the root's session, and the request; neither is parked yet."""
    root, (child,) = await stations.spawning(session)
    claim = await stations.claim(child, "child")
    await stations.step(claim, a_call("delete_file"))
    assert await stations.ask(claim) is None
    return root, claim, approvals.request_id(child, 0, 0)


async def test_one_of_two_words_and_two_sweeps_decides(database: ScratchDatabase) -> None:
    order = random.Random(0)
    async with untried(database) as stations:
        for number in range(TIMES):
            _, (request,) = await stations.asking(f"s{number}")
            if number % 2:
                await word(stations, request, "approve")
                stations.scratch.query(
                    "update chaz.approvals set expires_at = clock_timestamp() where decision is null"
                )
            else:
                stations.scratch.query(
                    "update chaz.approvals set expires_at = clock_timestamp() where decision is null"
                )
                await word(stations, request, "approve")
            works: list[Awaitable[object]] = [
                stations.place(),
                stations.place(),
                time_out(stations, request),
                time_out(stations, request),
            ]
            await at_once(*(shortly(order.randint(0, 30), work) for work in works))
            await stations.place()
            await time_out(stations, request)
            await stations.place()
    decided = {row["decision"] for row in database.query("select decision from chaz.approvals")}
    assert decided == {"approve", "timed_out"}
    assert disagreeing(database) == []
    assert unruly(database) == []
    assert deadlocks(database) == 0


async def test_a_word_that_comes_while_the_run_parks_or_ends(database: ScratchDatabase) -> None:
    order = random.Random(0)
    async with untried(database) as stations:
        for number in range(TIMES):
            claim = await stations.claimed(f"s{number}")
            await stations.step(claim, a_call("delete_file"), a_call("delete_file"))
            assert await stations.ask(claim) is None
            first, second = (approvals.request_id(claim.run_id, 0, ordinal) for ordinal in (0, 1))
            await word(stations, first, "approve_all")
            works: list[Awaitable[object]] = [
                stations.ask(claim, ordinal=1),
                stations.place(),
                stations.place(),
                time_out(stations, first),
                stations.end(claim) if number % 3 == 0 else stations.park(claim),
                stations.close(claim.run_id, "parked"),
            ]
            await at_once(*(shortly(order.randint(0, 40), work) for work in works), unless=[StaleAttempt])
            await stations.place()
            # Covered either by having been asked before, or by not being asked at all.
            if await stations.state(claim.run_id) != "failed":
                open_ones = await stations.fetch(
                    "select from chaz.approvals where id = %(id)s and decision is null", id=second
                )
                assert open_ones == []
    assert disagreeing(database) == []
    assert unruly(database) == []
    assert deadlocks(database) == 0


async def test_a_child_that_asks_in_the_session_of_its_root_while_that_is_at_work(database: ScratchDatabase) -> None:
    order = random.Random(0)
    async with untried(database) as stations:
        for number in range(TIMES):
            session = f"s{number}"
            root, child, request = await child_asking(stations, session)
            await stations.step(child, a_call("delete_file"), step=1)
            await stations.step(root, a_call("delete_file"), step=1)
            await word(stations, request, "approve")
            await stations.say(session, "more")
            works: list[Awaitable[object]] = [
                stations.ask(child, step=1),
                stations.ask(root, step=1),
                stations.place(),
                stations.place(),
                stations.end(root) if number % 2 else stations.park(root),
                stations.end(child) if number % 3 == 0 else stations.park(child),
                stations.close(root.run_id, "parked", "running"),
                stations.close(child.run_id, "parked"),
            ]
            await at_once(*(shortly(order.randint(0, 60), work) for work in works), unless=[StaleAttempt])
            await stations.place()
    assert disagreeing(database) == []
    assert unruly(database) == []
    assert deadlocks(database) == 0


async def test_an_end_that_answers_an_ancestor_and_a_parent_against_words_for_both(database: ScratchDatabase) -> None:
    """Each of them waits for the same child and for a person: their rows are locked in one order by everybody."""
    order = random.Random(0)
    async with untried(database) as stations:
        for number in range(TIMES):
            session = f"s{number}"
            root, (mid_run,) = await stations.spawning(session)
            mid = await stations.claim(mid_run, "child")
            await stations.step(mid, a_call("spawn_agent"))
            leaf_run = await stations.spawn(mid)
            await stations.place()
            leaf = await stations.claim(leaf_run, "child")
            await stations.step(root, a_call("agent_result"), a_call("delete_file"), step=1)
            await stations.step(mid, a_call("delete_file"), step=1)
            assert await stations.ask_for(root, leaf_run, step=1) is None
            assert await stations.ask(root, step=1, ordinal=1) is None
            assert await stations.ask(mid, step=1) is None
            await stations.park(root)
            await stations.park(mid)
            await word(stations, approvals.request_id(root.run_id, 1, 1), "deny")
            await word(stations, approvals.request_id(mid_run, 1, 0), "deny")
            works: list[Awaitable[object]] = [stations.end(leaf), stations.place()]
            await at_once(*(shortly(order.randint(0, 20), work) for work in works))
            await stations.place()
            assert await stations.state(mid_run) == "queued"
    assert disagreeing(database) == []
    assert unruly(database) == []
    assert deadlocks(database) == 0
