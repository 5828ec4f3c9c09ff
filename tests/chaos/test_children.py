"""However a child ends, its parent gets exactly one result, of the right kind, and goes on."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest

from chaz import Chaz, completion
from chaz.broker import run_queue
from chaz.celery import make_app
from chaz.channels import broker_name
from chaz.deliveries import RunDelivery
from chaz.outcomes import RunOutcome
from chaz.testing import eventually, eventually_async
from tests.fixtures.broker import Broker, both_brokers
from tests.fixtures.model import answer, call, calls, script, spawn
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Process, Processes
from tests.fixtures.stations import Stations

pytestmark = [pytest.mark.anyio, pytest.mark.chaos, pytest.mark.timeout(180)]

SOON = {"lease": "2", "beat": "0.5", "sweep": "1", "unknown_agent_grace": "1"}
BOUND = 60.0


@dataclass(frozen=True)
class Case:
    """What a parent's turn asks for, its spawn first, and what that comes to."""

    turn: dict[str, Any]
    error: str = ""
    told: str = ""
    attempts: int = 2
    """Of the parent: one, if there was nothing to park for."""


SLOW = (calls(call("slow", seconds=30)), answer("too late"))
CASES = {
    "succeeds": Case(calls(spawn("child", script(answer("42")))), told="42"),
    "is silent": Case(calls(spawn("child", script(answer(""))))),
    "raises": Case(calls(spawn("child", script({"error": "refused"}))), "failed", "(model)"),
    "takes its workers down": Case(calls(spawn("solo", script(calls(call("kill_again"))))), "failed", "(crashes)"),
    "is cancelled": Case(calls(spawn("child", script(*SLOW, text="to be cancelled"))), "cancelled", "by the test"),
    "is refused": Case(calls(spawn("stranger", "Hi")), "not_allowed", "you may spawn: child", attempts=1),
    "is nobody": Case(calls(spawn("nobody", "Hi")), "unknown_agent", "no worker has registered an agent 'nobody'"),
    "uses its steps up": Case(
        calls(spawn("child", script(calls(call("word_count", text="a b"))), max_steps=1)), told="(no tools left)"
    ),
    "outlives the wait's timeout": Case(calls(spawn("child", script(*SLOW), timeout=1)), "timed_out", "deadline"),
    "ends before its parent has parked": Case(
        calls(spawn("child", script(answer("early"))), call("slow", seconds=6)), told="early", attempts=1
    ),
}


def worker(processes: Processes, broker: Broker, *agents: str) -> Process:
    """A worker that serves these agents only."""
    return processes.worker("-Q", ",".join(broker_name(broker.prefix, agent) for agent in agents), **SOON)


def kind_of(error: str) -> str:
    return error if error == "cancelled" else "error" if error else "ok"


async def cancel(stations: Stations) -> None:
    """Cancel the child that is there to be cancelled, from outside, once it runs."""
    outcome = RunOutcome(state="cancelled", reason="cancelled", text="by the test")

    async def cancelled() -> bool:
        rows = await stations.fetch(
            """
            select r.id from chaz.runs r join chaz.entries e on e.id = r.id
            where starts_with(e.content, 'to be cancelled') and r.agent = 'child' and r.state = 'running'
                and exists (select from chaz.calls c where c.run_id = r.id)
            """
        )
        if not rows:
            return False
        run = rows[0]["id"]
        return None is not await stations.transact(
            lambda tx: completion.close_run(tx, run, outcome, states=("running",))
        )

    await eventually_async(cancelled, within=30)


def redeliver(broker: Broker, database: ScratchDatabase, agent: str) -> None:
    """Deliver all runs of the agent once more."""
    app = make_app(broker.settings())
    for row in database.query("select id, session_id from chaz.runs where agent = %(a)s", a=agent):
        delivery = RunDelivery(run=row["id"], agent=agent, session=row["session_id"])
        queue: Any = run_queue(broker.prefix, agent)
        app.send_task(f"chaz.agent.{agent}", kwargs=delivery.model_dump(mode="json"), task_id=str(uuid4()), queue=queue)


@both_brokers
async def test_each_end_of_a_child_is_one_result(
    processes: Processes, database: ScratchDatabase, stations: Stations, broker: Broker
) -> None:
    processes.listener(**SOON)
    processes.audit()
    isolation = processes.start("isolation", [sys.executable, "-m", "chaz", "worker", "--isolation"], **SOON)
    serving = worker(processes, broker, "parent", "child")
    doomed = worker(processes, broker, "solo")
    isolation.until_says("chaz worker ready")
    with Chaz(database.url) as chaz:
        parents = {
            name: chaz.session(name).direct("parent", script(case.turn, answer("{{0.0}}")))
            for name, case in CASES.items()
        }
        await cancel(stations)
        doomed.exit_code(within=30)
        answers = {name: parent.get(timeout=BOUND) or "" for name, parent in parents.items()}
        # Delivered again, they change nothing.
        redeliver(broker, database, "child")
        redeliver(broker, database, "parent")
        eventually(lambda: serving.said.count("came to nothing") >= 2 * len(CASES) - 3, within=30)

    told = {
        name: database.query(
            "select outcome, error, result from chaz.calls where run_id = %(run)s and tool = 'spawn_agent'",
            run=parent.id,
        )
        for name, parent in parents.items()
    }
    assert {name: [(row["outcome"], row["error"] or "") for row in rows] for name, rows in told.items()} == {
        name: [(kind_of(case.error), case.error)] for name, case in CASES.items()
    }
    assert [name for name, case in CASES.items() if case.told not in answers[name]] == []
    assert answers["is silent"] == ""
    # Told once: to the model, and to the audit trail.
    assert {name: rows[0]["result"] for name, rows in told.items()} == answers
    results = "select count(*) from chaz.entries where type = 'tool_result' and run_id = %(run)s"
    for name, parent in parents.items():
        eventually(lambda run=parent.id: database.value(results, run=run) > 0, within=30)
        expected = len(CASES[name].turn["calls"])
        assert (name, database.value(results, run=parent.id)) == (name, expected)
    attempts = {
        name: database.value("select attempt from chaz.runs where id = %(run)s", run=parent.id)
        for name, parent in parents.items()
    }
    assert attempts == {name: case.attempts for name, case in CASES.items()}
    assert database.value("select count(*) from chaz.waits where answer is null") == 0


async def test_children_end_while_nobody_serves_their_parent(
    processes: Processes, database: ScratchDatabase, broker: Broker
) -> None:
    processes.listener(**SOON)
    processes.audit()
    host = worker(processes, broker, "parent")
    with Chaz(database.url) as chaz:
        both = calls(spawn("child", script(answer("one"))), spawn("child", script({"error": "refused"})))
        result = chaz.session("family").direct("parent", script(both, answer("{{results}}")))
        eventually(lambda: result.state == "parked", within=30)
        host.kill()

        worker(processes, broker, "child")
        eventually(lambda: result.state == "queued", within=30)
        assert database.value("select count(*) from chaz.waits where answer is not null") == 2
        worker(processes, broker, "parent")

        assert (result.get(timeout=BOUND) or "").startswith("one; failed: agent child failed (model)")
    assert database.query("select attempt, crashes from chaz.runs where id = %(id)s", id=result.id) == [
        {"attempt": 2, "crashes": 0}
    ]
