"""Audit consumers that are stopped and started again while events keep coming."""

from __future__ import annotations

import pytest

from chaz.audit.publisher import AuditPublisher
from chaz.testing import eventually
from tests.fixtures.broker import Broker, both_brokers
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes
from tests.fixtures.stations import Stations
from tests.integration.test_audit import told

pytestmark = [pytest.mark.chaos, pytest.mark.anyio, pytest.mark.timeout(180)]


@both_brokers
async def test_a_consumer_that_is_asked_to_stop_loses_nothing(
    stations: Stations, database: ScratchDatabase, processes: Processes, broker: Broker
) -> None:
    publisher = AuditPublisher(broker.settings())
    expected = 0
    for n in range(6):
        consumer = processes.audit()
        events = await told(stations, calls=20, session=f"s{n}")
        # Apart, so that some are on their way whenever it stops.
        for event in events[:20]:
            publisher.tell([event])
        consumer_has_begun = expected + 1
        eventually(lambda least=consumer_has_begun: count(database) >= least, within=20)
        for event in events[20:]:
            publisher.tell([event])
        expected += len(events)
        consumer.stop()
    processes.audit()

    eventually(lambda: count(database) == expected, within=30)
    publisher.close()


def count(database: ScratchDatabase) -> int:
    return database.value("select count(*) from chaz.entries where seq > 0")
