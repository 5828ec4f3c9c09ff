"""Celery's revoke where something breaks: the listener's link to the broker, or the process, which is meant to."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest

from chaz import Chaz, RunCancelled
from chaz.celery import make_app
from chaz.testing import eventually
from tests.fixtures.broker import Broker, both_brokers
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes
from tests.fixtures.proxy import Proxy

pytestmark = pytest.mark.chaos


def control(broker: Broker) -> Any:
    """What `celery control` and Flower say it with."""
    return cast("Any", make_app(broker.settings()).control)


@both_brokers
def test_a_listener_that_lost_the_broker_hears_again(
    processes: Processes, database: ScratchDatabase, broker: Broker, proxy: Callable[..., Proxy]
) -> None:
    between = proxy(broker.url)
    listener = processes.listener(broker_url=between.url)
    with Chaz(database.url) as chaz:
        result = chaz.session("s").direct("solo", "Hi", countdown=3600)
        eventually(lambda: database.query("select id from chaz.runs where state = 'pending'"))
        assert between.cut() > 0
        listener.until_says("not on the control exchange")

        def revoked() -> bool:
            # Once more each time: what is said while it is away, it does not hear.
            control(broker).revoke(str(result.id))
            return result.ready()

        eventually(revoked, within=30, every=0.5)
        with pytest.raises(RunCancelled, match="cancelled by celery: revoked"):
            result.get(5)


@both_brokers
def test_terminate_kills_a_process_of_a_prefork_pool_and_cancels_its_run(
    processes: Processes, database: ScratchDatabase, broker: Broker
) -> None:
    processes.listener()
    worker = processes.start("prefork", [sys.executable, "-m", "chaz", "worker", "--pool", "prefork", "-c", "1"])
    worker.until_says("chaz worker ready")
    with Chaz(database.url) as chaz:
        result = chaz.session("s").direct("solo", script(calls(call("slow", seconds=50)), answer("not this")))
        eventually(lambda: database.query("select run_id from chaz.calls where tool = 'slow'"), within=20)
        pid = database.value("select pid from chaz.workers w join chaz.runs r on r.worker_id = w.id")

        control(broker).terminate(str(result.id), signal="KILL")

        # The second word is its redelivery's, which Celery drops; it may be first.
        with pytest.raises(RunCancelled, match=r"cancelled by celery: (terminated|revoked)"):
            result.get(20)
        eventually(lambda: not os.path.exists(f"/proc/{pid}"))
        assert chaz.session("other").direct("solo", "Hi").get(30) == "You said: Hi"
