"""A worker that is killed: another goes on where it was, and repeats nothing that finished."""

from __future__ import annotations

import os
import signal

import pytest

from chaz import Chaz
from chaz.runtime.calling import MAY_HAVE_RUN
from chaz.testing import eventually
from tests.fixtures.broker import both_brokers
from tests.fixtures.model import answer, call, calls, script, spawn
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

SOON = {"lease": "2", "beat": "0.5", "sweep": "1"}
BOUND = 60.0
"""The deadline of a wait: lease, sweep and a good deal for a busy machine."""


@both_brokers
def test_finished_calls_and_stored_turns_are_not_repeated(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener(**SOON)
    processes.audit()
    first = processes.worker(**SOON)
    wanted = script(
        calls(call("record_effect", name="before")),
        calls(call("slow", seconds=30)),
        calls(call("record_effect", name="after")),
        answer("through: {{1.0}}"),
    )
    with Chaz(database.url) as chaz:
        result = chaz.session("talk").direct("solo", wanted)
        eventually(lambda: database.query("select 1 from chaz.calls where tool = 'slow'"), within=30)
        turns = database.query("select step, created_at from chaz.steps order by step")

        first.kill()
        processes.worker(**SOON)

        assert "may or may not have run" in (result.get(timeout=BOUND) or "")
    assert database.query("select name, count(*) from effects group by 1 order by 1") == [
        {"name": "after", "count": 1},
        {"name": "before", "count": 1},
    ]
    assert database.query("select step, created_at from chaz.steps order by step")[: len(turns)] == turns
    (run,) = database.query("select attempt, state, event_seq from chaz.runs")
    assert (run["attempt"], run["state"]) == (2, "succeeded")
    eventually(lambda: database.value("select count(*) from chaz.entries where seq > 0") == run["event_seq"], within=30)


def test_a_parent_and_its_children_survive(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener(**SOON)
    processes.audit()
    workers = [processes.worker(**SOON), processes.worker(**SOON)]
    child = script(calls(call("record_effect", name="child")), calls(call("slow", seconds=1)), answer("{{0.0}}"))
    with Chaz(database.url) as chaz:
        results = [
            chaz.session(f"family {n}").direct(
                "parent", script(calls(spawn("child", child), spawn("child", child)), answer("{{results}}"))
            )
            for n in range(10)
        ]
        eventually(lambda: database.value("select count(*) from effects") >= 5, within=30)

        workers[0].kill()

        answers = {result.get(timeout=BOUND) for result in results}
    # A call that the killed worker had just started may or may not have run, and its model was told so.
    told = {half for answer in answers for half in (answer or "").split("; ")}
    assert told <= {"recorded child", MAY_HAVE_RUN.content}
    assert database.value("select max(n) from (select count(*) as n from effects group by key) as executed") == 1
    assert database.value("select count(*) from chaz.calls where tool = 'record_effect' and outcome = 'ok'") <= (
        database.value("select count(*) from effects")
    )


def test_a_paused_worker_is_fenced(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener(**SOON)
    processes.audit()
    first = processes.worker(**SOON)
    wanted = script(calls(call("slow", seconds=1)), calls(call("record_effect", name="once")), answer("done"))
    with Chaz(database.url) as chaz:
        result = chaz.session("talk").direct("solo", wanted)
        eventually(lambda: database.query("select 1 from chaz.calls where tool = 'slow'"), within=30)

        os.kill(first.pid, signal.SIGSTOP)
        processes.worker(**SOON)
        assert result.get(timeout=BOUND) == "done"
        os.kill(first.pid, signal.SIGCONT)

        # By its beat or by a write that was refused, whichever came first.
        eventually(lambda: "no longer this worker's" in first.said or "is over:" in first.said, within=30)
    assert database.value("select count(*) from effects") == 1
    assert database.value("select count(*) from chaz.entries where type = 'message'") == 1


def test_a_worker_that_is_asked_to_stop_gives_back(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener(**SOON)
    processes.audit()
    first = processes.worker(**SOON)
    wanted = script(calls(call("slow", seconds=2)), calls(call("record_effect", name="once")), answer("done"))
    with Chaz(database.url) as chaz:
        result = chaz.session("talk").direct("solo", wanted)
        eventually(lambda: database.query("select 1 from chaz.calls where tool = 'slow'"), within=30)

        first.stop()
        processes.worker(**SOON)

        assert result.get(timeout=BOUND) == "done"
    (run,) = database.query("select attempt, crashes from chaz.runs")
    assert (run["attempt"], run["crashes"]) == (2, 0)
    assert database.value("select outcome from chaz.calls where tool = 'slow'") == "ok", "its step came to its end"
