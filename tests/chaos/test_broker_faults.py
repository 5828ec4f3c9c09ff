"""Brokers that forget, freeze or refuse: the listener goes on, and each run is delivered in the end."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from kombu import Connection, Exchange, Queue

from chaz import Chaz
from chaz.broker import declare, run_queue
from chaz.errors import BrokerUnavailable
from chaz.testing import eventually
from tests.fixtures.broker import Broker, both_brokers
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes
from tests.fixtures.proxy import Proxy

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

SOON = {"sweep": "1"}


def test_a_flushed_broker_loses_no_run_and_no_later_event(
    processes: Processes, database: ScratchDatabase, broker: Broker
) -> None:
    processes.listener(**SOON)
    processes.audit()
    processes.worker()
    with Chaz(database.url) as chaz:
        assert chaz.session("talk").direct("solo", "before").get(timeout=30) == "You said: before"

        forget_everything(broker)

        wanted = script(calls(call("word_count", text="a b")), answer("after {{results}}"))
        assert chaz.session("talk").direct("solo", wanted).get(timeout=60) == "after 2"
    eventually(lambda: database.value("select count(*) from chaz.entries where seq > 0") == 2, within=30)


def forget_everything(broker: Broker) -> None:
    """As FLUSHALL does, but for other tests' keys."""
    with broker.connect() as connection:
        client = connection.default_channel.client  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType, reportUnknownMemberType]
        for key in client.scan_iter(match=f"{broker.prefix}:*"):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            client.execute_command("DEL", key)  # pyright: ignore[reportUnknownMemberType]


@both_brokers
def test_a_listener_waits_for_no_frozen_broker(
    processes: Processes, database: ScratchDatabase, broker: Broker, proxy: Callable[..., Proxy]
) -> None:
    between = proxy(broker.url)
    listener = processes.listener(broker_url=between.url, **SOON)
    processes.worker()
    with Chaz(database.url) as chaz:
        assert chaz.session("talk").direct("solo", "before").get(timeout=30) == "You said: before"

        between.freeze()
        # The first one is on its way when the broker falls silent; the second must be placed all the same.
        chaz.session("one").direct("solo", "first")
        eventually(lambda: database.value("select count(*) from chaz.runs") == 2)
        chaz.session("two").direct("solo", "second")
        eventually(lambda: database.value("select count(*) from chaz.runs") == 3)

    listener.stop()


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_one_agent_s_broken_queue_holds_up_nobody_else(
    processes: Processes, database: ScratchDatabase, broker: Broker
) -> None:
    name = run_queue(broker.prefix, "child").name
    with Connection(broker.url) as connection:
        Queue(name, Exchange(f"{broker.prefix}.other"), durable=True)(connection.default_channel).declare()
    processes.listener(**SOON)
    processes.worker("-Q", run_queue(broker.prefix, "solo").name)

    with Chaz(database.url) as chaz, database.connect() as connection:
        broken = [chaz.session(f"b{n}").direct("child", "Hi", connection=connection) for n in range(3)]
        sound = [chaz.session(f"s{n}").direct("solo", "Hi", connection=connection) for n in range(3)]
        connection.commit()

        assert [handle.get(timeout=30) for handle in sound] == ["You said: Hi"] * 3
        assert {handle.state for handle in broken} == {"queued"}


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_a_worker_whose_queue_is_refused_ends(processes: Processes, broker: Broker) -> None:
    name = run_queue(broker.prefix, "child").name
    with Connection(broker.url) as connection:
        Queue(name, Exchange(f"{broker.prefix}.other"), durable=True)(connection.default_channel).declare()

    worker = processes.start("worker", [sys.executable, "-m", "celery", "-A", "chaz", "worker"])

    assert worker.exit_code() == 78
    assert f"chaz: the broker refuses the queue {name}: " in worker.said


def test_events_that_a_flush_takes_are_told_again(
    processes: Processes, database: ScratchDatabase, broker: Broker
) -> None:
    processes.listener(**SOON)
    processes.worker()
    with Chaz(database.url) as chaz:
        wanted = script(calls(*[call("word_count", text="a b")] * 5), answer("{{results}}"))
        for n in range(4):
            chaz.session(f"s{n}").direct("solo", wanted).wait(30)
    # Nobody has recorded any of it yet.
    forget_everything(broker)
    processes.audit()

    eventually(lambda: database.value("select count(*) from chaz.entries where seq > 0") == 40, within=60)
    verified = processes.start("verify", [sys.executable, "-m", "chaz", "audit", "verify"])
    assert verified.exit_code() == 0
    assert "4 ended runs told 40 events: 40 are recorded, 0 are missing" in verified.said


@both_brokers
def test_a_broker_that_is_lost_while_queues_are_declared_is_said_to_be_away(
    broker: Broker, proxy: Callable[..., Proxy]
) -> None:
    queue = run_queue(broker.prefix, "solo")
    between = proxy(broker.url)
    between.swallow(queue.name, odds=1.0, seed=0)
    with pytest.raises(BrokerUnavailable, match="is not available"):
        declare(Broker(between.url, broker.prefix).settings(), [queue])
    assert between.swallowed
