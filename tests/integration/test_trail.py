"""Is the audit trail complete: what is missing is found and told again, what is altered is noticed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from uuid import UUID

import pytest

from chaz.audit import recorder, trail
from chaz.deliveries import AuditEvent
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations, a_call

pytestmark = pytest.mark.anyio


async def told(stations: Stations, session: str = "s") -> tuple[UUID, list[AuditEvent]]:
    """A run that made three calls and ended; what it told."""
    claim = await stations.claimed(session)
    await stations.step(claim, *[a_call("word_count") for _ in range(3)])
    events: list[AuditEvent] = []
    for ordinal in range(2):
        events.append(await stations.start_call(claim, ordinal=ordinal))
        events.append(await stations.finish_call(claim, ordinal=ordinal))
    events.append(await stations.start_call(claim, ordinal=2))
    events += await stations.end(claim)
    return claim.run_id, events


def record(database: ScratchDatabase, events: Sequence[AuditEvent]) -> None:
    with database.connect(autocommit=True) as connection:
        assert recorder.record(connection, events) == set()


def its_time_has_come(database: ScratchDatabase) -> None:
    database.query("update chaz.runs set audit_after = now() where audit_after is not null")


async def test_what_was_not_recorded_is_told_again_as_it_was(stations: Stations, database: ScratchDatabase) -> None:
    run, events = await told(stations)
    record(database, [events[0], events[3]])
    assert (await trail.settle(stations.database)).runs == 0, "events may still be on their way"
    its_time_has_come(database)

    settled = await trail.settle(stations.database)

    assert settled.missing == [events[1], events[2], *events[4:]]
    assert (await stations.run(run))["audit_after"] is not None
    assert (await trail.settle(stations.database)).runs == 0, "not again at once"
    record(database, settled.missing)
    its_time_has_come(database)
    assert (await trail.settle(stations.database)).missing == []
    assert (await stations.run(run))["audit_after"] is None


async def test_a_run_without_events_is_never_looked_at(stations: Stations) -> None:
    claim = await stations.claimed("s")
    await stations.end(claim)
    assert (await stations.run(claim.run_id))["audit_after"] is None


async def test_a_whole_trail_is_proven(stations: Stations, database: ScratchDatabase) -> None:
    for session in ("s", "t"):
        _, events = await told(stations, session)
        record(database, events)
    going_on = await stations.claimed("u")
    await stations.step(going_on, a_call("word_count"))
    await stations.start_call(going_on)

    found = await trail.verify(stations.database, batch=2)

    assert found.proven
    assert (found.runs, found.open_runs, found.expected, found.recorded) == (2, 1, 12, 12)


async def test_a_missing_event_and_an_altered_one_are_noticed(stations: Stations, database: ScratchDatabase) -> None:
    lacking, events = await told(stations, "lacking")
    record(database, events[:-1])
    forged, events = await told(stations, "forged")
    record(database, [events[0].model_copy(update={"content": json.dumps({"text": "another"})}), *events[1:]])
    _, events = await told(stations, "sound")
    record(database, events)

    found = await trail.verify(stations.database)

    assert not found.proven
    assert (found.runs, found.missing, found.altered) == (3, 1, 1)
    assert set(found.bad_runs or []) == {lacking, forged}
    assert (await trail.verify(stations.database, events[0].session)).proven
