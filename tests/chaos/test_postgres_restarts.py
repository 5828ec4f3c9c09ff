"""A PostgreSQL of the test's own that is shut down or crashes under runs, and comes back."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaz import Chaz
from chaz.embedded import EmbeddedServices, start_services
from chaz.schema import upgrade
from chaz.testing import eventually
from tests.fixtures.broker import Broker
from tests.fixtures.model import answer, call, calls, script, spawn
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

SOON = {"lease": "2", "beat": "0.5", "sweep": "1"}
BOUND = 90.0
STEPS = 8


class PrivatePostgres:
    """A server that keeps its folder and its port; what it has committed survives a crash of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._services: EmbeddedServices = start_services(folder, valkey=False)
        self.url = self._services.database_url

    def end(self, how: signal.Signals) -> None:
        os.kill(self._services.processes["postgres"], how)
        eventually(lambda: "postgres" not in self._services.processes, within=30)
        self._services.stop()

    def start(self) -> None:
        port = int(self.url.rsplit(":", 1)[1].split("/")[0])
        self._services = start_services(self._folder, valkey=False, postgres_port=port)

    def close(self) -> None:
        self._services.stop()


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[PrivatePostgres]:
    made = PrivatePostgres(tmp_path / "postgres")
    yield made
    made.close()


@pytest.fixture
def stack(postgres: PrivatePostgres, broker: Broker, tmp_path: Path) -> Iterator[Processes]:
    upgrade(postgres.url)
    ScratchDatabase(postgres.url).query("create table effects (name text, key text, pid int)")
    made = Processes(postgres.url, broker, tmp_path)
    yield made
    made.end()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["fast", "crash"])
def test_runs_and_children_go_on_after_a_restart(
    stack: Processes, postgres: PrivatePostgres, how: signal.Signals
) -> None:
    kept = [stack.listener(**SOON), stack.audit(**SOON), stack.worker(**SOON), stack.worker(**SOON)]
    database = ScratchDatabase(postgres.url)
    steps = [calls(call("record_effect", name=f"step {n}"), call("slow", seconds=0.3)) for n in range(STEPS)]
    child = script(*steps, answer("child"))
    with Chaz(postgres.url) as chaz:
        alone = [chaz.session(f"alone {n}").direct("solo", script(*steps, answer("solo"))) for n in range(4)]
        family = script(calls(spawn("child", child), spawn("child", child)), answer("{{results}}"))
        parents = [chaz.session(f"family {n}").direct("parent", family) for n in range(2)]
        for effects in (10, 30):
            eventually(lambda least=effects: database.value("select count(*) from effects") >= least, within=BOUND)
            postgres.end(how)
            postgres.start()

        assert [result.get(timeout=BOUND) for result in alone] == ["solo"] * 4
        assert [result.get(timeout=BOUND) for result in parents] == ["child; child"] * 2

    assert database.query("select state, count(*) from chaz.runs group by state") == [
        {"state": "succeeded", "count": 10}
    ]
    assert database.query("select 1 from chaz.calls where outcome is null") == []
    assert database.value("select max(n) from (select count(*) as n from effects group by key) as executed") == 1
    assert database.value("select count(*) from chaz.calls where tool = 'record_effect' and outcome = 'ok'") <= (
        database.value("select count(*) from effects")
    )
    told = database.value("select sum(event_seq) from chaz.runs")
    eventually(lambda: database.value("select count(*) from chaz.entries where seq > 0") == told, within=BOUND)
    verified = stack.start("verify", [sys.executable, "-m", "chaz", "audit", "verify"])
    assert verified.exit_code() == 0, verified.said
    for process in kept:
        process.stop()
