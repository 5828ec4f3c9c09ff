"""A deep queue that nobody works on is not multiplied by the sweep that publishes what was not claimed."""

from __future__ import annotations

from collections import Counter
from math import log2
from uuid import UUID

import pytest

from chaz import publishing
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations

pytestmark = [pytest.mark.anyio, pytest.mark.chaos, pytest.mark.timeout(120)]

RUNS = 5000
SWEEP = 5.0
ROUNDS = int(25 * 60 / SWEEP)
AT_MOST = log2(25 * 60 / SWEEP) + 2


def queue(database: ScratchDatabase) -> None:
    """So many sessions, and a run in each that a listener has just placed and published."""
    database.query(
        """
        with made as (
            insert into chaz.runs (id, session_id, agent, state, cause, root_run_id, deadline, publishes, publish_after,
                queued_at)
            select id, id, 'solo', 'queued', 'directive', id, now() + interval '1 hour', 1,
                now() + %(sweep)s * interval '1 second', now()
            from (select gen_random_uuid() as id from generate_series(1, %(runs)s)) ids returning id)
        insert into chaz.heads (session_id, active_run) select id, id from made
        """,
        runs=RUNS,
        sweep=SWEEP,
    )


def rounds_till_one_is_due(database: ScratchDatabase) -> int:
    """After how many rounds of the sweep there is something to publish; in those before nothing would happen."""
    return database.value(
        """
        select greatest(1, ceil(extract(epoch from min(publish_after) - now()) / %(sweep)s))::int from chaz.runs
        """,
        sweep=SWEEP,
    )


def let_time_pass(database: ScratchDatabase, rounds: int) -> None:
    database.query("update chaz.runs set publish_after = publish_after - %(s)s * interval '1 second'", s=rounds * SWEEP)


async def publish(stations: Stations, limit: int = 200) -> list[UUID]:
    """All that a listener publishes in one round, in several transactions."""
    published: list[UUID] = []
    while found := await stations.transact(
        lambda tx: publishing.publishable(tx, first_wait=SWEEP, limit=limit, ahead=2 * RUNS)
    ):
        assert len(found) <= limit
        published += [publication.delivery.run for publication in found]
    return published


async def test_a_run_that_nobody_claims_is_published_less_and_less_often(
    stations: Stations, database: ScratchDatabase
) -> None:
    queue(database)
    deliveries: Counter[UUID] = Counter()
    passed = 0
    while (rounds := rounds_till_one_is_due(database)) <= ROUNDS - passed:
        let_time_pass(database, rounds)
        passed += rounds
        deliveries.update(await publish(stations))
        # With the one at its placing, of which nobody was told here.
        assert 1 + max(deliveries.values()) <= AT_MOST, f"{max(deliveries.values())} times within {passed * SWEEP:g} s"

    assert len(deliveries) == RUNS
    assert sum(deliveries.values()) + RUNS < 12 * RUNS
    rows = await stations.fetch("select id, publishes from chaz.runs")
    assert {row["id"]: row["publishes"] for row in rows} == {run: 1 + n for run, n in deliveries.items()}
    # And each is still rung for, after some minutes at the latest: a broker may have forgotten them all.
    assert database.value(
        "select max(publish_after) <= now() + %(most)s * interval '1 second' from chaz.runs", most=60 * SWEEP
    )


async def test_a_run_given_back_begins_anew(stations: Stations, database: ScratchDatabase) -> None:
    claim = await stations.claimed("s")
    database.query("update chaz.runs set publishes = 15")
    await stations.give_back(claim)
    assert await publish(stations) == [claim.run_id]
    assert database.value("select publish_after - now() <= interval '5 seconds' from chaz.runs")
