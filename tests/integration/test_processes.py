"""Each process says when it is ready and stops cleanly when it is asked to."""

from __future__ import annotations

import pytest

from chaz import Chaz
from tests.fixtures.broker import both_brokers
from tests.fixtures.processes import Processes

pytestmark = [pytest.mark.broker, both_brokers]


def test_every_process_stops_cleanly(chaz: Chaz, processes: Processes) -> None:
    running = [processes.listener(), processes.audit(), processes.worker()]
    assert chaz.session("s").direct("solo", "hello").get(timeout=30) == "You said: hello"
    for process in running:
        process.stop()
