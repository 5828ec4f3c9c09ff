"""Deliveries that nobody should have sent: nothing runs that should not, each is logged, and the worker lives."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from kombu import Producer

from chaz import Chaz
from chaz.broker import run_queue
from chaz.celery import make_app
from chaz.testing import eventually
from tests.fixtures.broker import Broker, both_brokers
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]


@both_brokers
def test_only_the_log_makes_an_agent_run(processes: Processes, database: ScratchDatabase, broker: Broker) -> None:
    processes.listener()
    worker = processes.worker()
    app = make_app(broker.settings())
    queue: Any = run_queue(broker.prefix, "solo")

    def forge(task: str, run: object, **besides: Any) -> None:
        facts = {"kind": "run", "run": str(run), "agent": "solo", "session": str(uuid4())}
        app.send_task(task, kwargs=facts | besides, task_id=str(uuid4()), queue=queue)

    with Chaz(database.url) as chaz:
        wanted = script(calls(call("record_effect", name="once")), answer("done"))
        finished = chaz.session("talk").direct("solo", wanted)
        assert finished.get(timeout=30) == "done"
        pending = chaz.session("later").direct("child", "Hi", countdown=3600)
        eventually(lambda: database.query("select 1 from chaz.runs where id = %(id)s", id=pending.id))

        for _ in range(3):
            forge("chaz.agent.solo", finished.id)
        forge("chaz.agent.solo", uuid4())
        forge("chaz.agent.solo", pending.id)
        forge("chaz.agent.solo", "no id at all")
        app.send_task("chaz.agent.solo", args=["positional", {"rubbish": True}], queue=queue)
        with broker.connect() as connection:
            producer: Producer = connection.Producer()
            for body, content_type in (
                (b"{not json", "application/json"),
                (b"\x80\x04.", "application/x-python-serialize"),
            ):
                producer.publish(
                    body,
                    exchange=queue.exchange,
                    routing_key=queue.routing_key,
                    content_type=content_type,
                    content_encoding="binary",
                    declare=[queue],
                )

        again = chaz.session("talk").direct("solo", script(answer("still here")))
        assert again.get(timeout=30) == "still here"
        for said, times in (("not queued succeeded", 3), ("unknown", 1), ("other agent", 1), ("is not a run's", 2)):
            worker.until_says(said, times=times)
    assert database.value("select count(*) from effects") == 1
    assert database.value("select state from chaz.runs where id = %(id)s", id=pending.id) == "pending"
    worker.stop()
