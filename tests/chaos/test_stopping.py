"""Processes that are asked to stop while something of theirs hangs."""

from __future__ import annotations

import sys

import pytest

from chaz import Chaz
from chaz.testing import eventually
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


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_worker_stops_at_the_end_of_a_step_and_another_goes_on(
    processes: Processes, database: ScratchDatabase, pool: str
) -> None:
    processes.listener(sweep="1")
    command = [sys.executable, "-m", "chaz", "worker", "--pool", pool, "-c", "2"]
    first = processes.start("first", command, shutdown_grace="10")
    first.until_says("chaz worker ready")
    steps = [calls(call("slow", seconds=0.5)) for _ in range(20)]
    with Chaz(database.url) as chaz:
        result = chaz.session("talk").direct("solo", script(*steps, answer("through")))
        eventually(lambda: database.value("select coalesce(max(steps), 0) from chaz.runs") >= 2, within=30)

        first.stop()
        assert database.value("select steps from chaz.runs") < 20
        processes.start("second", command)

        assert result.get(timeout=60) == "through"
    assert database.query("select distinct outcome from chaz.calls") == [{"outcome": "ok"}]
    assert database.value("select crashes from chaz.runs") == 0


def test_past_its_grace_a_worker_gives_back_in_mid_step(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener(sweep="1")
    first = processes.worker(shutdown_grace="1")
    with Chaz(database.url) as chaz:
        result = chaz.session("talk").direct("solo", script(calls(call("slow", seconds=50)), answer("{{results}}")))
        eventually(lambda: database.query("select 1 from chaz.calls"), within=30)

        first.stop()
        processes.worker()

        assert "may or may not have run" in (result.get(timeout=30) or "")
    assert database.query("select crashes, suspect from chaz.runs") == [{"crashes": 0, "suspect": False}]
