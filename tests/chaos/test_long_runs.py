"""Runs that outlast the broker's patience: it delivers them again while they run, and nothing is done twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chaz import Chaz
from chaz.testing import eventually
from tests.fixtures.broker import Broker
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Process, Processes
from tests.fixtures.proxy import Proxy
from tests.fixtures.rabbitmq import RabbitMQ

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

IMPATIENT_VALKEY = """
broker_transport_options = {"visibility_timeout": 2, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
"""
IMPATIENT_RABBITMQ = {"consumer_timeout": 2000, "channel_tick_interval": 500}
"""Milliseconds. So long without an acknowledgement, and the node closes the channel of all its deliveries."""


@pytest.fixture
def impatient_rabbitmq(rabbitmq: Callable[..., RabbitMQ]) -> Broker:
    return Broker(rabbitmq(**IMPATIENT_RABBITMQ).url, "test")


def test_a_run_outlasts_valkey_s_visibility_timeout(
    processes: Processes, database: ScratchDatabase, tmp_path: Path
) -> None:
    (tmp_path / "celeryconfig.py").write_text(IMPATIENT_VALKEY)
    processes.listener()
    worker = processes.worker()
    run_past_a_redelivery(worker, database)


@pytest.mark.parametrize("broker", ["impatient_rabbitmq"], indirect=True)
def test_a_run_outlasts_rabbitmq_s_consumer_timeout(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener()
    worker = processes.worker()
    run_past_a_redelivery(worker, database)
    assert "PRECONDITION_FAILED" in worker.said, "its channel was closed"


@pytest.mark.parametrize("broker", ["impatient_rabbitmq"], indirect=True)
def test_an_audit_consumer_outlasts_it_without_postgresql(
    processes: Processes, database: ScratchDatabase, proxy: Callable[..., Proxy]
) -> None:
    between = proxy(database.url)
    processes.listener()
    processes.worker()
    consumer = processes.audit(database_url=between.url)
    between.refuse()
    with Chaz(database.url) as chaz:
        wanted = script(calls(call("word_count", text="a b")), answer("{{results}}"))
        assert chaz.session("talk").direct("solo", wanted).get(timeout=30) == "2"
        consumer.until_says("PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out")
        between.admit()

        assert chaz.session("later").direct("solo", wanted).get(timeout=30) == "2"
    eventually(lambda: database.value("select count(*) from chaz.entries where seq > 0") == 4, within=30)


def run_past_a_redelivery(worker: Process, database: ScratchDatabase) -> None:
    """A run that lasts until it was delivered again, then another one; each is claimed once and acts once."""
    wanted = script(
        calls(call("record_effect", name="before")),
        calls(call("until_effect", name="delivered again")),
        calls(call("record_effect", name="after")),
        answer("through"),
    )
    with Chaz(database.url) as chaz:
        result = chaz.session("talk").direct("solo", wanted)
        worker.until_says(f"delivery of run={result.id} for agent=solo came to nothing: ")
        database.query("insert into effects (name) values ('delivered again')")

        assert result.get(timeout=30) == "through"
        assert chaz.session("later").direct("solo", "Hi").get(timeout=30) == "You said: Hi"
    assert (
        database.query("select attempt, crashes, state from chaz.runs")
        == [{"attempt": 1, "crashes": 0, "state": "succeeded"}] * 2
    )
    assert database.query("select name, count(*) from effects group by 1 order by 1") == [
        {"name": name, "count": 1} for name in ("after", "before", "delivered again")
    ]
