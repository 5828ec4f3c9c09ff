"""A tool that always takes its process down: its run is given up, and nobody else's is."""

from __future__ import annotations

import sys

import pytest

from chaz import Chaz, RunFailed
from chaz.testing import eventually
from tests.fixtures.broker import both_brokers
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

SOON = {"lease": "5", "beat": "0.5", "sweep": "1"}
"""A worker that is starved for a moment must not be taken for one that was killed: attempts are counted here."""


@both_brokers
def test_a_tool_that_kills_its_process_is_isolated(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener(**SOON)
    processes.audit()
    isolation = processes.start("isolation", [sys.executable, "-m", "chaz", "worker", "--isolation"], **SOON)
    isolation.until_says("chaz worker ready: agents of suspect runs, alone")
    eventually(lambda: database.query("select 1 from chaz.workers where isolation and expires_at > now()"), within=30)
    first = processes.worker(**SOON)
    innocent = script(calls(call("slow", seconds=2)), calls(call("record_effect", name="innocent")), answer("done"))
    with Chaz(database.url) as chaz:
        others = [chaz.session(f"innocent {n}").direct("solo", innocent) for n in range(50)]
        eventually(lambda: database.value("select count(*) from chaz.calls where tool = 'slow'") == 50, within=60)
        killer = chaz.session("guilty").direct("solo", script(calls(call("kill_again")), answer("never")))
        first.exit_code(within=30)
        second = processes.worker(**SOON)

        with pytest.raises(RunFailed, match="crashes"):
            killer.get(timeout=90)
        assert {other.get(timeout=90) for other in others} == {"done"}
        again = chaz.session("guilty").direct("solo", script(answer("its session is usable")))
        assert again.get(timeout=30) == "its session is usable"

    (run,) = database.query("select crashes, attempt from chaz.runs where id = %(id)s", id=killer.id)
    assert (run["crashes"], run["attempt"]) == (2, 2)
    assert database.value("select count(*) from chaz.entries where type = 'error'") == 1
    assert database.value("select max(n) from (select count(*) as n from effects group by key) as executed") == 1
    second.stop()
    isolation.stop()


def test_without_an_isolation_worker_a_suspect_run_waits_for_none(
    processes: Processes, database: ScratchDatabase
) -> None:
    processes.listener(**SOON)
    first = processes.worker(**SOON)
    with Chaz(database.url) as chaz:
        result = chaz.session("talk").direct("solo", script(calls(call("kill_process")), answer("{{results}}")))
        first.exit_code(within=30)
        processes.worker(**SOON)

        assert "may or may not have run" in (result.get(timeout=60) or "")
