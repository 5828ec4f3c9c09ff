"""A parent and its children: the parent parks, and holds no worker meanwhile."""

from __future__ import annotations

from chaz import Chaz
from chaz.testing import eventually
from tests.fixtures.broker import both_brokers
from tests.fixtures.model import answer, call, calls, script, spawn
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes


@both_brokers
def test_one_slot_serves_a_parent_and_its_child(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener()
    processes.audit()
    processes.worker("--concurrency", "1")
    deepest = script(calls(call("word_count", text="one two")), answer("child counted {{results}}"))

    with Chaz(database.url) as chaz:
        result = chaz.session("family").direct(
            "parent", script(calls(spawn("child", deepest)), answer("parent heard: {{results}}"))
        )

        assert result.get(timeout=60) == "parent heard: child counted 2"


def test_a_chain_of_six_needs_one_slot(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener()
    processes.audit()
    processes.worker("--concurrency", "1")
    instruction = script(answer("bottom"))
    for _ in range(6):
        instruction = script(calls(spawn("parent", instruction)), answer("over {{results}}"))

    with Chaz(database.url) as chaz:
        assert chaz.session("chain").direct("parent", instruction).get(timeout=90) == "over " * 6 + "bottom"
    assert database.query("select depth, depth_left, state from chaz.runs order by depth") == [
        {"depth": depth, "depth_left": None if depth == 0 else 16 - depth, "state": "succeeded"} for depth in range(7)
    ]


def test_a_waiting_parent_is_a_row_and_nothing_else(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener()
    processes.audit()
    processes.worker("--concurrency", "1")
    slow_child = script(calls(call("slow", seconds=3)), answer("done"))

    with Chaz(database.url) as chaz:
        result = chaz.session("family").direct(
            "parent", script(calls(spawn("child", slow_child)), answer("{{results}}"))
        )
        eventually(lambda: result.state == "parked", within=30)
        parent = database.query("select * from chaz.runs where id = %(id)s", id=result.id)[0]

        assert (parent["worker_id"], parent["waits_for"]) == (None, "child")
        assert result.get(timeout=60) == "done"


def test_children_run_next_to_each_other_and_to_ordinary_calls(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener()
    processes.audit()
    processes.worker()
    wanted = script(
        calls(spawn("child", "one"), call("record_effect", name="beside"), spawn("child", "two")),
        answer("{{results}}"),
    )

    with Chaz(database.url) as chaz:
        result = chaz.session("family").direct("parent", wanted)

        assert result.get(timeout=60) == "You said: one; recorded beside; You said: two"
    assert database.value("select count(*) from effects") == 1
    assert database.value("select attempt from chaz.runs where id = %(id)s", id=result.id) == 2


def test_a_child_that_fails_is_an_error_for_the_parent_s_model(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener(unknown_agent_grace="1")
    processes.audit()
    processes.worker()
    failing, nobody = spawn("child", script({"error": "refused"})), spawn("solo", "")

    with Chaz(database.url) as chaz:
        result = chaz.session("family").direct(
            "parent", script(calls(failing, nobody, spawn("stranger", "Hi")), answer("{{results}}"))
        )
        told = result.get(timeout=60) or ""

    assert "agent child failed (model)" in told
    assert "bad_arguments: spawn_agent: instruction: " in told
    assert "you may not spawn 'stranger'" in told
