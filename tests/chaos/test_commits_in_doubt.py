"""Connections that are lost in the very moment of a commit: whether it came through has to be looked up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chaz import Chaz
from chaz.testing import eventually
from tests.fixtures.model import answer, call, calls, script, spawn
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes
from tests.fixtures.proxy import Proxy

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

FAMILIES = 10


@pytest.mark.parametrize("seed", [1, 2])
def test_a_commit_in_doubt_is_recognised(
    processes: Processes, database: ScratchDatabase, proxy: Callable[..., Proxy], seed: int
) -> None:
    between = proxy(database.url, only="chaz-worker")
    processes.listener(sweep="1")
    processes.audit()
    # A lease that nobody's patience outlasts: what is recognised is recognised by the worker, and at once.
    worker = processes.worker(database_url=between.url, lease="600", beat="300")
    child = script(calls(call("record_effect", name="child")), answer("{{0.0}}"))
    wanted = script(calls(call("record_effect", name="parent"), spawn("child", child)), answer("{{results}}"))
    with Chaz(database.url) as chaz:
        between.swallow("COMMIT", odds=0.15, seed=seed)
        results = [chaz.session(f"family {n}").direct("parent", wanted) for n in range(FAMILIES)]
        answers = {result.get(timeout=60) for result in results}
    assert answers == {"recorded parent; recorded child"}
    assert between.swallowed > FAMILIES
    assert database.query("select key from effects group by key having count(*) <> 1") == []
    assert database.value("select count(*) from effects") == 2 * FAMILIES
    assert database.query("select distinct outcome from chaz.calls") == [{"outcome": "ok"}]
    # Each claimed once, and the parents once more after their children, if they had parked.
    assert database.value("select max(crashes) from chaz.runs") == 0
    assert database.value("select max(attempt) from chaz.runs where agent = 'child'") == 1
    assert database.value("select max(attempt) from chaz.runs") <= 2
    # A parent whose park was in doubt may have been claimed anew before it was looked up.
    children = [row["id"] for row in database.query("select id from chaz.runs where agent = 'child'")]
    assert not [id for id in children if f"attempt 1 of run {id} is over" in worker.said]
    expected = database.value("select sum(event_seq) from chaz.runs")
    eventually(lambda: database.value("select count(*) from chaz.entries where seq > 0") == expected, within=30)
