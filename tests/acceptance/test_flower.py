"""What a person sees in Flower: the real one, through its API."""

from __future__ import annotations

import json

from chaz import Chaz
from chaz.testing import eventually
from tests.fixtures.broker import both_brokers
from tests.fixtures.flower import Flower
from tests.fixtures.model import answer, call, calls, script, spawn
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes

SECRET = "a-secret-in-a-prompt"


@both_brokers
def test_a_parked_run_is_seen_to_wait(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener()
    processes.audit()
    processes.worker()
    flower = Flower(processes)
    ask, tasks = flower.ask, flower.tasks

    with Chaz(database.url) as chaz:
        # Flower sees what happens after it has begun to listen.
        eventually(lambda: str(chaz.session().direct("solo", "Hi").id) in tasks() or tasks(), within=30)
        slow = script(calls(call("slow", seconds=3)), answer("done"))
        result = chaz.session("talk").direct("parent", script(calls(spawn("child", slow)), answer(SECRET)))

        parked = eventually(lambda: tasks().get(str(result.id), {}).get("state") == "RETRY" and tasks()[str(result.id)])
        assert isinstance(parked, dict)
        assert parked["name"] == "chaz.agent.parent"
        assert parked["exception"] == "parked: waits for child"
        assert parked["args"] == f"parent {chaz.session('talk').id}"
        assert ask(f"task/result/{result.id}") == {"task-id": str(result.id), "state": "RETRY"}

        result.wait(60)
        eventually(lambda: tasks()[str(result.id)]["state"] == "SUCCESS")
        children = [task for task in tasks().values() if task["name"] == "chaz.agent.child"]
        assert [task["parent_id"] for task in children] == [str(result.id)]
        assert SECRET not in json.dumps(tasks())

        # Whoever asks for a result gets it, from the run's row.
        assert ask(f"task/result/{result.id}") == {"task-id": str(result.id), "state": "SUCCESS", "result": SECRET}
        failing = chaz.session("talk").direct("solo", script({"error": "too bad"}))
        assert f"UUID('{failing.id}'), 'model'" in ask(f"task/result/{failing.id}?timeout=30")["result"]
        waited = ask(f"task/result/{failing.id}")
        assert waited["state"] == "FAILURE"
        assert f"RunFailed: run {failing.id} failed (model)" in waited["traceback"]
