"""Audit events that no run told, though much of them is true: buried with the reason, and the true ones recorded."""

from __future__ import annotations

from typing import Any

import pytest

from chaz.audit import trail
from chaz.deliveries import AuditEvent
from chaz.testing import eventually
from tests.fixtures.broker import Broker, both_brokers
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes
from tests.fixtures.stations import Stations
from tests.integration.test_audit import batch, in_queue, publish, told, until_recorded

pytestmark = [pytest.mark.anyio, pytest.mark.chaos, pytest.mark.timeout(120), both_brokers]

NOT_TOLD = "no run of its session told"


def forged(mine: AuditEvent, others: AuditEvent) -> dict[str, dict[str, Any]]:
    """What is changed in a true event, by what it amounts to. ``others`` is of another run of the same session."""
    return {
        "of another run, at my place": {"run": others.run},
        "of mine, at another run's place": {"position": others.position},
        "at a place without an ack": {"position": mine.position - 1},
        "past what was counted": {"seq": 5},
        "of no number": {"seq": 0},
        "of another tenant": {"tenant": "somebody else's"},
        "of another agent": {"agent": "parent"},
    }


async def test_what_no_run_told_is_buried(
    stations: Stations, database: ScratchDatabase, processes: Processes, broker: Broker
) -> None:
    mine, others = await told(stations, calls=2), await told(stations, calls=2)
    forgeries = forged(mine[0], others[0])
    for change in forgeries.values():
        publish(broker, batch(mine[0].model_copy(update=change)))
    # Nothing of a delivery is believed that is not of its type, though it be JSON.
    publish(broker, batch(mine[0]).__repr__(), content_type="text/plain", content_encoding="utf-8")
    publish(broker, batch(*mine))
    publish(broker, batch(*others))
    processes.audit()
    until_recorded(database, [*mine, *others])

    dead: list[str] = []

    def all_are_buried() -> bool:
        dead.extend(headers["x-chaz-reason"] for _, headers in in_queue(broker, dead=True))
        return len(dead) >= len(forgeries) + 1

    eventually(all_are_buried)
    assert sum(NOT_TOLD in reason for reason in dead) == len(forgeries)
    assert sum("cannot be decoded" in reason or "not an audit delivery" in reason for reason in dead) == 1
    assert in_queue(broker, dead=False) == []
    assert (await trail.verify(stations.database)).proven
    rows = await stations.fetch("select distinct tenant, sender, author from chaz.entries where seq > 0")
    assert rows == [{"tenant": "", "sender": "solo", "author": "agent"}]
