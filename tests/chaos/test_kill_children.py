"""Processes that are killed at the worst moment: a pool's child in a call, a listener before it publishes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import pytest

from chaz import Chaz
from chaz.testing import eventually
from tests.fixtures.broker import Broker, both_brokers
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes
from tests.fixtures.proxy import Proxy

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

SOON = {"lease": "2", "beat": "0.5", "sweep": "1"}
BOUND = 60.0
TURNS = "select step, created_at from chaz.steps where run_id = %(run)s order by step"


@both_brokers
def test_a_child_of_a_prefork_pool_is_killed_in_a_call(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener(**SOON)
    processes.audit()
    command = [sys.executable, "-m", "chaz", "worker", "--pool", "prefork", "-c", "2"]
    worker = processes.start("prefork", command, **SOON)
    worker.until_says("chaz worker ready")
    wanted = script(
        calls(call("record_effect", name="before")),
        calls(call("slow", seconds=30)),
        calls(call("record_effect", name="after")),
        answer("through: {{1.0}}"),
    )
    with Chaz(database.url) as chaz:
        result = chaz.session("talk").direct("solo", wanted)
        eventually(lambda: database.query("select 1 from chaz.calls where tool = 'slow'"), within=30)
        turns = database.query(TURNS, run=result.id)
        killed = database.value("select pid from chaz.workers w join chaz.runs r on r.worker_id = w.id")
        assert killed != worker.pid

        os.kill(killed, signal.SIGKILL)

        assert "may or may not have run" in (result.get(timeout=BOUND) or "")
        again = chaz.session("other").direct("solo", "the pool serves on")
        assert again.get(timeout=BOUND) == "You said: the pool serves on"
    effects = {
        row["name"]: row["pids"]
        for row in database.query("select name, array_agg(pid) as pids from effects group by name")
    }
    assert effects["before"] == [killed]
    assert len(effects["after"]) == 1
    assert effects["after"] != [killed]
    assert database.query(TURNS, run=result.id)[: len(turns)] == turns
    assert database.query("select tool, outcome from chaz.calls order by step") == [
        {"tool": "record_effect", "outcome": "ok"},
        {"tool": "slow", "outcome": "unknown"},
        {"tool": "record_effect", "outcome": "ok"},
    ]
    assert database.query("select attempt, state from chaz.runs where id = %(id)s", id=result.id) == [
        {"attempt": 2, "state": "succeeded"}
    ]
    worker.stop()


@both_brokers
def test_a_listener_is_killed_between_commit_and_publishing(
    processes: Processes, database: ScratchDatabase, broker: Broker, proxy: Callable[..., Proxy]
) -> None:
    between = proxy(broker.url)
    doomed = processes.listener(broker_url=between.url, **SOON)
    worker = processes.worker(**SOON)
    between.freeze()
    with Chaz(database.url) as chaz:
        wanted = script(calls(call("record_effect", name="once")), answer("done"))
        result = chaz.session("talk").direct("solo", wanted)
        eventually(lambda: database.query("select 1 from chaz.runs where state = 'queued' and publishes > 0"))

        doomed.kill()
        # What was on its way must not arrive after all.
        between.cut()
        assert "received" not in worker.said
        processes.listener(**SOON)

        assert result.get(timeout=BOUND) == "done"
    assert database.query("select name, count(*) from effects group by name") == [{"name": "once", "count": 1}]
    assert database.query("select attempt, crashes from chaz.runs") == [{"attempt": 1, "crashes": 0}]
    assert database.value("select count(*) from chaz.entries where type = 'message'") == 1
