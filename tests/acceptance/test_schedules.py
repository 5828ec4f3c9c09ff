"""An agent that wakes by itself, from its definition to the real worker's runs; no restart wakes it again."""

from __future__ import annotations

from typing import Any

from chaz import Chaz
from chaz.testing import eventually
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes


def test_an_agent_wakes_by_itself_and_has_itself_woken(processes: Processes, database: ScratchDatabase) -> None:
    shortest = {"shortest_schedule": "1"}
    processes.listener()
    worker = processes.worker(agents="tests.sleepers", **shortest)

    def history(id: str) -> list[dict[str, Any]]:
        return chaz.agent("sleeper").schedules.history(id)

    def all_have_run() -> bool:
        fired = [one for id in ("first", "again", "silent") for one in history(id) if one["run_id"]]
        return [one["state"] for one in fired] == ["succeeded"] * 3

    with Chaz(database.url) as chaz:
        eventually(lambda: len(chaz.agent("sleeper").schedules.list()) == 3, within=60)
        eventually(all_have_run, within=60)
        (first,) = history("first")
        (again,) = [one for one in history("again") if one["run_id"]]
        (silent,) = [one for one in history("silent") if one["run_id"]]

        # It woke again where it had been, told what only it was told, and the log has no more than its answers.
        assert again["session_id"] == first["session_id"] != silent["session_id"]
        log = list(chaz.session(first["session"]).entries())
        assert [(e.type, e.sender, e.content) for e in log if not e.seq] == [
            ("ack", "sleeper", ""),
            ("message", "sleeper", "awake"),
            ("ack", "sleeper", ""),
            ("message", "sleeper", "awake again"),
        ]
        assert [e.type for e in chaz.session(silent["session"]).entries()] == ["ack"]
        assert chaz.result(first["run_id"]).get(timeout=10) == "awake"
        assert [one["reason"] for one in chaz.agent("sleeper").schedules.list()] == ["over: it has fired once"] * 3

        before = database.query("select schedule, slot, run_id from chaz.firings order by schedule, slot")
        chaz.agent("sleeper").schedules.remove("first", by="ada")
        worker.stop()
        processes.worker(agents="tests.sleepers", **shortest)
        assert database.query("select schedule, slot, run_id from chaz.firings order by schedule, slot") == before
        retired = {one["id"]: one["retired_by"] for one in chaz.agent("sleeper").schedules.list(retired=True)}
        assert retired == {"first": "ada", "again": None, "silent": None}
