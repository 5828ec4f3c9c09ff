"""Processes that are asked to stop while something of theirs hangs."""

from __future__ import annotations

import pytest

from chaz import Chaz
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]


def test_a_hung_tool_keeps_no_worker_from_ending(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener()
    worker = processes.worker(shutdown_grace="2")
    with Chaz(database.url) as chaz:
        wanted = script(calls(call("hang")), answer("{{results}}"))
        told = chaz.session("talk").direct("solo", wanted).get(timeout=30) or ""
    assert told.startswith("hang did not end within 1 s")

    worker.stop()


@pytest.mark.parametrize("held", ["head", "session"])
def test_a_row_that_somebody_holds_stops_nobody_else(
    processes: Processes, database: ScratchDatabase, held: str
) -> None:
    processes.listener(sweep="1")
    processes.worker()
    with Chaz(database.url) as chaz, database.connect() as holder:
        assert chaz.session("held").direct("solo", "before").get(timeout=30) == "You said: before"
        if held == "head":
            # Its deadline passes while its session's head is held: a sweep has to do with it.
            late = chaz.session("held").direct("solo", script(calls(call("slow", seconds=60))), timeout=1.0)
            holder.execute("select from chaz.heads h join chaz.sessions s on s.id = session_id for update of h")
        else:
            holder.execute("select from chaz.sessions for update")
            late = chaz.session("held").direct("solo", "held")

        for n in range(3):
            assert chaz.session(f"free {n}").direct("solo", "Hi").get(timeout=20) == "You said: Hi"

        holder.rollback()
        late.wait(30)
