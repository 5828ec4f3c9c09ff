"""Brokers that are restarted, cut off and flushed under load: each run finishes once, and the trail is complete."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from chaz import AgentResult, Chaz
from chaz.broker import audit_queue, run_queue
from chaz.testing import eventually
from tests.fixtures.broker import Broker
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes
from tests.fixtures.proxy import Proxy
from tests.fixtures.rabbitmq import RabbitMQ
from tests.fixtures.valkey import Valkey

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

SOON = {"sweep": "1"}
BOUND = 90.0


class Load:
    """Runs of a few steps, each with an effect; all have to finish once."""

    def __init__(self, chaz: Chaz, database: ScratchDatabase) -> None:
        self._chaz, self._database = chaz, database
        self._sent: list[AgentResult] = []

    def send(self, runs: int, *, words: int = 0) -> None:
        """Start runs; ``words`` are the calls that each makes besides."""
        for n in range(len(self._sent), len(self._sent) + runs):
            counting = [calls(*[call("word_count", text=f"{step} {m}") for m in range(words // 2)]) for step in (1, 2)]
            wanted = script(*counting[: words and 2], calls(call("record_effect", name=f"run {n}")), answer("through"))
            self._sent.append(self._chaz.session(f"s{n}").direct("solo", wanted))

    def until_working(self) -> None:
        """Wait until the newest has made a step, and others are on their way."""
        newest = self._sent[-1].id
        query = "select 1 from chaz.runs where id = %(id)s and steps > 0"
        eventually(lambda: self._database.query(query, id=newest), within=BOUND)

    def until_through(self) -> None:
        """Wait until all have finished; each has left its effect once."""
        assert {result.get(timeout=BOUND) for result in self._sent} == {"through"}
        assert self._database.query("select name from effects group by 1 having count(*) > 1") == []
        assert self._database.value("select count(*) from effects") == len(self._sent)
        assert self._database.query("select distinct state, crashes from chaz.runs") == [
            {"state": "succeeded", "crashes": 0}
        ]


def until_recorded(processes: Processes, database: ScratchDatabase) -> None:
    """Wait until all audit events are recorded, and let `chaz audit verify` prove it."""
    told = database.value("select sum(event_seq) from chaz.runs")
    eventually(lambda: database.value("select count(*) from chaz.entries where seq > 0") == told, within=BOUND)
    verified = processes.start("verify", [sys.executable, "-m", "chaz", "audit", "verify"])
    assert verified.exit_code() == 0, verified.said


@pytest.fixture
def own_valkey(valkey: Valkey) -> Broker:
    return Broker(valkey.url, "test")


@pytest.mark.parametrize("broker", ["own_valkey"], indirect=True)
def test_valkey_is_restarted_and_then_forgets_everything(
    valkey: Valkey, broker: Broker, processes: Processes, database: ScratchDatabase
) -> None:
    processes.listener(**SOON)
    worker = processes.worker(**SOON)
    with Chaz(database.url) as chaz:
        load = Load(chaz, database)
        for _ in range(3):
            load.send(10, words=16)
            load.until_working()
            valkey.restart()
        load.until_through()
        worker.stop()
        load.send(50)
        eventually(lambda: length(valkey, run_queue(broker.prefix, "solo").name) >= 50, within=BOUND)
        assert database.value("select sum(event_seq) from chaz.runs") == 30 * 2 * 17
        assert length(valkey, audit_queue(broker.prefix).name), "nobody has recorded them"

        valkey.flush()
        processes.audit()
        processes.worker(**SOON)

        load.until_through()
        until_recorded(processes, database)


def length(valkey: Valkey, queue: str) -> int:
    return valkey.ask("LLEN", f"test:{queue}")


@pytest.fixture
def node(rabbitmq: Callable[..., RabbitMQ]) -> RabbitMQ:
    return rabbitmq()


@pytest.fixture
def between(node: RabbitMQ, proxy: Callable[..., Proxy]) -> Proxy:
    return proxy(node.url)


@pytest.fixture
def own_rabbitmq(between: Proxy) -> Broker:
    return Broker(between.url, "test")


@pytest.mark.parametrize("broker", ["own_rabbitmq"], indirect=True)
def test_rabbitmq_is_cut_off_and_restarted(
    node: RabbitMQ, between: Proxy, processes: Processes, database: ScratchDatabase
) -> None:
    processes.listener(**SOON)
    processes.audit()
    processes.worker(**SOON)
    with Chaz(database.url) as chaz:
        load = Load(chaz, database)
        for _ in range(3):
            load.send(10, words=16)
            load.until_working()
            assert between.cut() > 0
        load.send(10, words=16)
        load.until_working()
        node.restart()
        load.until_through()
        until_recorded(processes, database)

        load.send(1, words=16)
        load.until_through()
        until_recorded(processes, database)
