"""Existing Celery code waits for agents: ``AsyncResult`` by a run's id, on the application's own result backend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chaz import Chaz
from chaz.testing import eventually
from tests.fixtures.broker import both_brokers
from tests.fixtures.model import answer, call, calls, script, spawn
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import ROOT, Processes
from tests.fixtures.stations import Stations

ASK = """
import json, sys
from celery.exceptions import TimeoutError
from celery.result import AsyncResult
from chaz.celery import app
result = AsyncResult(sys.argv[1], app=app)
try:
    got = result.get(timeout=float(sys.argv[2]), propagate="propagate" in sys.argv)
except TimeoutError:
    got = "timeout"
except Exception as error:
    got = [c.__module__ + "." + c.__qualname__ for c in type(error).__mro__] + [str(error)]
again = AsyncResult(sys.argv[1], app=app)
print(json.dumps([got if isinstance(got, (str, list, type(None))) else repr(got), again.state, repr(again.result),
    again.traceback, [child.id for child in again.children or []], again.name, str(again.date_done), again.ready()]))
"""


def ask(processes: Processes, id: object, *how: str, timeout: float = 30) -> list[Any]:
    """What Celery says in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(id), str(timeout), *how],
        env=processes.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def celery_result(processes: Processes, id: object, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "celery", "-A", "chaz", "result", *flags, str(id)],
        env=processes.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@both_brokers
def test_celery_waits_for_an_agent(processes: Processes, database: ScratchDatabase) -> None:
    processes.stack()
    with Chaz(database.url) as chaz:
        wanted = script(
            calls(spawn("child", script(calls(call("slow", seconds=1)), answer("read")))), answer("{{results}}")
        )
        run = chaz.session("s").direct("parent", wanted)

        got, state, result, traceback, children, name, date_done, ready = ask(processes, run.id)

        assert (got, state, result, traceback, name) == ("read", "SUCCESS", "'read'", None, "chaz.agent.parent")
        assert children == [str(child.id) for child in run.children]
        assert (date_done, ready) == (str(run.date_done), True)

        failing = chaz.session("s").direct("solo", script({"error": "too bad"}))
        got, state, result, traceback, *_ = ask(processes, failing.id, "propagate")
        assert got[0] == "chaz.errors.RunFailed"
        assert (state, traceback) == ("FAILURE", f"chaz.errors.RunFailed: {got[-1]}")
        assert f"RunFailed(UUID('{failing.id}'), 'model'" in result
        assert ask(processes, failing.id)[0] == result, "without propagate it is given, not raised"

    done = celery_result(processes, run.id)
    assert (done.stdout, done.returncode) == ("read\n", 0), done.stderr
    done = celery_result(processes, failing.id, "--traceback")
    assert (done.stdout.strip(), done.returncode) == (traceback, 0), done.stderr
    assert celery_result(processes, failing.id).returncode == 1


@pytest.mark.anyio
async def test_each_state_in_celerys_words(processes: Processes, stations: Stations, chaz: Chaz) -> None:
    claim, (child,) = await stations.spawning("s")
    first, second = [chaz.session("t").say(text, recipient="solo") for text in ("one", "two")]
    nowhere = "00000000-0000-4000-8000-000000000000"

    def states() -> list[str]:
        return [
            ask(processes, id, timeout=0)[1] for id in (claim.run_id, child, first.id, second.id, nowhere, "no-uuid")
        ]

    assert states() == ["STARTED", "PENDING", "PENDING", "PENDING", "PENDING", "PENDING"]
    await stations.park(claim)
    await stations.place()
    taking = await stations.claim(first.id)
    waiting = ask(processes, claim.run_id, timeout=0)
    assert (waiting[0], waiting[4]) == ("timeout", [str(child)])
    assert "parked: waits for child" in waiting[2]
    assert states()[:4] == ["RETRY", "PENDING", "STARTED", "STARTED"], "a superseded run follows the one that took it"
    await stations.end(taking, "both")
    await stations.end(await stations.claim(child, "child"), "by ada", state="cancelled", reason="asked")
    assert states()[1:4] == ["REVOKED", "SUCCESS", "SUCCESS"]
    errors = ask(processes, child, "propagate")[0]
    assert {"chaz.errors.RunCancelled", "celery.exceptions.TaskRevokedError"} <= set(errors)
    nobody = chaz.session("u").say("anybody there?")
    await stations.place()
    assert ask(processes, nobody.id)[:2] == [None, "SUCCESS"]


OWN_TASKS = """
from chaz.celery import app

@app.task(ignore_result=False)
def add(a, b):
    return a + b
"""


def test_the_applications_own_tasks_may_keep_another_backend(
    processes: Processes, database: ScratchDatabase, tmp_path: Path
) -> None:
    url = processes.environment["CHAZ_BROKER_URL"]
    (tmp_path / "celeryconfig.py").write_text(f"result_backend = {url!r}\nimports = ['own_tasks']\n")
    (tmp_path / "own_tasks.py").write_text(OWN_TASKS)
    processes.environment["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    processes.stack()
    program = """
import own_tasks, sys
from celery.result import AsyncResult
from chaz import Chaz
from chaz.backend import Backend
from chaz.celery import app
assert own_tasks.add.delay(1, 2).get(timeout=20) == 3
run = Chaz.from_env().session().direct("solo", "Hello")
print(AsyncResult(str(run.id), backend=Backend(app), app=app).get(timeout=20))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=processes.environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ("You said: Hello\n", 0), done.stderr


def test_waiting_inside_a_tool_is_refused(processes: Processes, database: ScratchDatabase, tmp_path: Path) -> None:
    (tmp_path / "waiting_agents.py").write_text(
        """
from celery.result import AsyncResult
from chaz import Agent, tool

@tool
def wait_for(id: str, ask_celery: bool) -> str:
    "Wait."
    from chaz.celery import app
    return AsyncResult(id, app=app).get(timeout=5, disable_sync_subtasks=ask_celery)

solo = Agent("solo", instructions="", model="scripted", tools=[wait_for])
"""
    )
    processes.environment["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    processes.environment["CHAZ_AGENTS"] = "waiting_agents"
    processes.stack()
    with Chaz(database.url) as chaz:
        other = chaz.session("other").direct("solo", "Hi", countdown=3600)
        wanted = [call("wait_for", id=str(other.id), ask_celery=ask) for ask in (True, False)]
        told = chaz.session("s").direct("solo", script(calls(*wanted), answer("{{results}}"))).get(timeout=30) or ""
        eventually(lambda: other.state == "pending")
    assert "Never call result.get() within a task!" in told
    assert "WaitInsideRun" in told
    assert "spawn_agent" in told
