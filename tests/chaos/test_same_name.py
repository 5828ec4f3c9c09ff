"""A worker that is started under the name of one that has not gone yet: a lease is a process's, never a name's."""

from __future__ import annotations

import os
import signal

import pytest

from chaz import Chaz
from chaz.testing import eventually
from tests.fixtures.broker import both_brokers
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

SOON = {"lease": "2", "beat": "0.5", "sweep": "1"}
BOUND = 60.0
NAME = ("-n", "same@%h")
EFFECTS = "select name, array_agg(pid) as pids from effects group by name"


def wanted(seconds: float, name: str) -> str:
    return script(calls(call("slow", seconds=seconds)), calls(call("record_effect", name=name)), answer(name))


@both_brokers
def test_one_that_drains_leaves_its_runs_to_the_new_one(processes: Processes, database: ScratchDatabase) -> None:
    listener = processes.listener(**SOON)
    first = processes.worker(*NAME, **SOON)
    with Chaz(database.url) as chaz:
        drained = chaz.session("drained").direct("solo", wanted(6, "drained"))
        eventually(lambda: database.query("select 1 from chaz.calls where tool = 'slow'"), within=30)

        os.kill(first.pid, signal.SIGTERM)
        first.until_says("Warm shutdown")
        # Some of these may come to the old one yet, which must not claim them.
        later = [chaz.session(f"later {n}").direct("solo", wanted(0, f"later {n}")) for n in range(10)]
        second = processes.worker(*NAME, **SOON)

        assert [result.get(timeout=BOUND) for result in later] == [f"later {n}" for n in range(10)]
        assert drained.get(timeout=BOUND) == "drained"
    assert first.exit_code() == 0
    effects = {row["name"]: row["pids"] for row in database.query(EFFECTS)}
    assert effects == {name: [second.pid] for name in ("drained", *(f"later {n}" for n in range(10)))}
    assert database.query("select attempt from chaz.runs where attempt > 1") == [{"attempt": 2}]
    assert "was lost" not in listener.said
    assert database.query("select distinct outcome from chaz.calls") == [{"outcome": "ok"}]
    second.stop()


@both_brokers
def test_one_that_is_paused_past_its_lease_is_refused(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener(**SOON)
    first = processes.worker(*NAME, **SOON)
    with Chaz(database.url) as chaz:
        result = chaz.session("talk").direct("solo", wanted(1, "once"))
        eventually(lambda: database.query("select 1 from chaz.calls where tool = 'slow'"), within=30)

        os.kill(first.pid, signal.SIGSTOP)
        second = processes.worker(*NAME, **SOON)
        assert result.get(timeout=BOUND) == "once"
        os.kill(first.pid, signal.SIGCONT)

        eventually(lambda: "no longer this worker's" in first.said or "is over:" in first.said, within=30)
    assert database.query(EFFECTS) == [{"name": "once", "pids": [second.pid]}]
    assert database.value("select count(*) from chaz.entries where type = 'message'") == 1
    assert database.query("select state, attempt from chaz.runs") == [{"state": "succeeded", "attempt": 2}]
    second.stop()
    first.stop()
