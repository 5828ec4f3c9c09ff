"""The whole path on real processes: an insert, a listener, a worker, an audit consumer, an answer."""

from __future__ import annotations

import pytest

from chaz import Chaz
from chaz.testing import eventually
from tests.fixtures.broker import both_brokers
from tests.fixtures.model import answer, call, calls, script, spawn
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes

pytestmark = [pytest.mark.broker, both_brokers]


def effects(database: ScratchDatabase) -> list[str]:
    return [row["name"] for row in database.query("select name from effects order by at")]


def test_a_parent_its_child_and_their_tools(chaz: Chaz, database: ScratchDatabase, processes: Processes) -> None:
    processes.stack()
    child = script(
        calls(call("word_count", text="one two"), call("record_effect", name="child's")), answer("{{0.0}} words")
    )
    handle = chaz.session("s").direct(
        "parent",
        script(
            calls(spawn("child", child), spawn("child", child), call("record_effect", name="parent's")),
            answer("heard {{results}}"),
        ),
    )

    assert handle.get(timeout=30) == "heard 2 words; 2 words; recorded parent's"

    assert sorted(effects(database)) == ["child's", "child's", "parent's"]
    lines = [(entry.type, entry.position, entry.seq) for entry in handle.entries(follow=True)]
    assert lines[:2] == [("directive", 1, 0), ("ack", 2, 0)]
    assert sum(type == "tool_result" for type, _, _ in lines) == 3
    eventually(
        lambda: (
            database.value("select sum(event_seq) from chaz.runs")
            == database.value("select count(*) from chaz.entries where seq > 0")
        )
    )


def test_every_process_stops_cleanly(chaz: Chaz, processes: Processes) -> None:
    running = [processes.listener(), processes.audit(), processes.worker()]
    assert chaz.session("s").direct("solo", "hello").get(timeout=30) == "You said: hello"
    for process in running:
        process.stop()
