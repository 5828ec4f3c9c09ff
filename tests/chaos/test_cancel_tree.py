"""The root of a tree is cancelled while one of its agents is spawning and the worker of another is unreachable."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from chaz import Chaz, RunCancelled
from chaz.entries import derived_id
from chaz.listings import RunFilter
from chaz.testing import StubServer, eventually
from tests.fixtures.model import answer, calls, script, spawn
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes

pytestmark = pytest.mark.chaos

USAGE = {"prompt": 10, "completion": 1}
HANGS = script({"text": "", "fault": {"hang": True}})
SPAWNS = script({**calls(spawn("thinker", HANGS)), "usage": USAGE}, answer("not this"))


def spawning(*children: dict[str, Any]) -> str:
    return script({**calls(*children), "usage": USAGE}, answer("not this"))


def test_thirteen_agents_end_with_their_root(processes: Processes, database: ScratchDatabase) -> None:
    middle = [
        spawning(*[spawn("thinker", HANGS)] * 3),
        spawning(*[spawn("thinker", HANGS)] * 3),
        spawning(spawn("thinker", HANGS), spawn("far", HANGS), spawn("thinker", SPAWNS)),
    ]
    prefix = processes.environment["CHAZ_BROKER_PREFIX"]
    with StubServer() as stub, Chaz(database.url) as chaz:
        processes.environment |= {
            "OPENAI_BASE_URL": stub.base_url,
            "OPENAI_API_KEY": "the-key-of-the-test",
            "CHAZ_AGENTS": "tests.thinkers",
        }
        processes.listener()
        here = processes.worker("-Q", f"{prefix}.thinker")
        # Nobody takes it for dead in the meantime: it is its cancelled run that it must give up.
        there = processes.worker("-Q", f"{prefix}.far", lease="600")

        with database.connect() as held:
            # Its spawn comes to a stand in the middle, with its run's row locked.
            root = chaz.session("s").direct("thinker", spawning(*[spawn("thinker", text) for text in middle]))
            spawner = child(child(root.id, 2), 2)
            session = derived_id("child-session", str(spawner), "0.0")
            held.execute("insert into chaz.sessions (id) values (%s)", (session,))
            eventually(lambda: len(stub.requests) == 13, within=30)
            database.until_blocked()
            assert states(chaz, root.id) == {"parked": 4, "running": 9}
            os.kill(there.pid, signal.SIGSTOP)

            assert root.revoke(by="ada", reason="enough")
            with pytest.raises(RunCancelled, match="cancelled by ada: enough"):
                root.get(10)
            # All but the one that is spawning: its row is locked, and nothing waits for it.
            eventually(lambda: states(chaz, root.id) == {"cancelled": 12, "running": 1})
            held.rollback()

        # Its spawn came through, and is seen: the child ends with it.
        eventually(lambda: states(chaz, root.id) == {"cancelled": 14})
        eventually(lambda: stub.aborted == 7)
        os.kill(there.pid, signal.SIGCONT)
        there.until_says("was ended from outside; aborted")
        eventually(lambda: stub.aborted == 8)
        # No model was asked again, by anybody.
        assert len(stub.requests) == 13
        # Each is told why; only five turns had come, and they are what the tree has cost.
        reasons = {run["reason"] for run in runs(chaz, root.id)}
        assert reasons == {"requested", "parent"}
        assert (
            sum(run["usage"].get("prompt", 0) + run["usage"].get("completion", 0) for run in runs(chaz, root.id)) == 55
        )
        assert database.value("select tokens from chaz.tree_budgets where root_run_id = %(id)s", id=root.id) == 55
        # Both workers are fit for work.
        for agent in ("thinker", "far"):
            assert chaz.session(agent).direct(agent, script(answer("fit"))).get(20) == "fit"
        assert not database.query("select run_id from chaz.cancellations where done_at is null")
        for worker in (here, there):
            worker.stop()
            assert "Traceback" not in worker.said


def child(run: Any, ordinal: int) -> Any:
    return derived_id("child", str(run), f"0.{ordinal}")


def runs(chaz: Chaz, root: Any) -> list[dict[str, Any]]:
    return chaz.runs(RunFilter(root_run_id=root))


def states(chaz: Chaz, root: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for run in runs(chaz, root):
        found[run["state"]] = found.get(run["state"], 0) + 1
    return found
