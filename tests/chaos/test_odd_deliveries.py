"""A delivery that is not a queued run's own: whatever it holds, it is said once and nothing comes of it."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any
from uuid import UUID, uuid4

import pytest
from kombu import Producer

from chaz.broker import run_queue
from chaz.celery import make_app
from chaz.testing import eventually_async
from tests.fixtures.broker import Broker, both_brokers
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Process, Processes
from tests.fixtures.stations import Stations

pytestmark = [pytest.mark.anyio, pytest.mark.chaos, pytest.mark.timeout(120), both_brokers]

JSON = "application/json"
NO_TASKS: list[tuple[bytes, str, str, str]] = [
    (b"{not json", JSON, "utf-8", "Can't decode message body: DecodeError(JSONDecodeError("),
    (b"\xff\xfe", JSON, "utf-8", "Can't decode message body: DecodeError(UnicodeDecodeError("),
    (b"", JSON, "utf-8", "Received and deleted unknown message"),
    (b'{"run": 1}', JSON, "utf-8", "Received and deleted unknown message"),
    (b"\x80\x04.", "application/x-python-serialize", "binary", "Can't decode message body: ContentDisallowed("),
    (b"{}", "text/plain", "utf-8", "Can't decode message body: ContentDisallowed("),
    (b"\x00\x01", "application/octet-stream", "binary", "Can't decode message body: ContentDisallowed("),
]
"""Bodies that are no task, with their content type and encoding, and what Celery says of each."""

BELL = {"publishes": 0, "publish_after": None}

NOT_A_RUNS: list[tuple[list[Any], dict[str, Any]]] = [
    ([], {}),
    ([], {"run": "no id at all"}),
    ([], {"kind": "order", "run": str(uuid4()), "agent": "solo", "session": str(uuid4())}),
    (["positional", {"rubbish": True}], {}),
]


async def in_all_states(stations: Stations) -> dict[UUID, str]:
    """Runs of ``solo`` that no delivery may start, and what is to be said of each."""
    running = await stations.claimed("running")
    pending = await stations.send("running")
    later = await stations.claimed("later")
    await stations.give_back(later, wait=3600)
    said = {uuid4(): "unknown", running.run_id: "not queued running", pending: "not queued pending"}
    for state in ("succeeded", "failed", "cancelled"):
        claim = await stations.claimed(state)
        await stations.end(claim, state=state, reason="so it was")
        said[claim.run_id] = state if state == "cancelled" else f"not queued {state}"
    first, merged = [await stations.say("merged", text, recipient="solo") for text in ("one", "two")]
    parked, (of_child,) = await stations.spawning("parked")
    await stations.park(parked)
    await stations.end(await stations.claim(first))
    return said | {
        later.run_id: "not yet its time has not come",
        merged: "not queued superseded",
        parked.run_id: "other agent parent",
        of_child: "other agent child",
    }


def complaints(worker: Process) -> list[str]:
    """What the worker has complained about since it was ready."""
    said = worker.said.partition(" ready.")[2]
    return re.findall(r"^\S+ \S+ (?:WARNING|ERROR|CRITICAL) (.*)", said, re.MULTILINE)


async def test_what_is_not_a_queued_runs_own_is_said_once(
    stations: Stations, processes: Processes, database: ScratchDatabase, broker: Broker
) -> None:
    said = await in_all_states(stations)
    before = await stations.fetch("select * from chaz.runs order by id")
    wanted = await stations.send("mine", script(calls(call("record_effect", name="once")), answer("done")))
    await stations.place()
    worker = processes.worker()
    app = make_app(broker.settings())
    queue: Any = run_queue(broker.prefix, "solo")

    def forge(run: object) -> None:
        facts = {"kind": "run", "run": str(run), "agent": "solo", "session": str(uuid4())}
        app.send_task("chaz.agent.solo", kwargs=facts, task_id=str(uuid4()), queue=queue)

    with broker.connect() as connection:
        producer: Producer = connection.Producer()
        for body, content_type, encoding, _ in NO_TASKS:
            producer.publish(
                body,
                exchange=queue.exchange,
                routing_key=queue.routing_key,
                content_type=content_type,
                content_encoding=encoding,
                declare=[queue],
            )
    for args, kwargs in NOT_A_RUNS:
        app.send_task("chaz.agent.solo", args=args, kwargs=kwargs, queue=queue)
    app.send_task("chaz.agent.nobodys", queue=queue)
    for run in said:
        forge(run)
    # A queued run's delivery may lie about all but the id: it runs in its own session, and once.
    forge(wanted)

    async def has_ended() -> bool:
        return await stations.state(wanted) == "succeeded"

    await eventually_async(has_ended, within=30)
    worker.stop()

    expected = Counter(why for *_, why in NO_TASKS)
    expected.update(f"delivery of run={run} for agent=solo came to nothing: {why}" for run, why in said.items())
    expected["Received unregistered task of type 'chaz.agent.nobodys'"] = 1
    expected["a delivery for agent=solo is not a run's: "] = len(NOT_A_RUNS)
    lines = complaints(worker)
    assert {start: sum(line.startswith(start) for line in lines) for start in expected} == expected
    assert len(lines) == expected.total()
    after = await stations.fetch("select * from chaz.runs where id <> %(mine)s order by id", mine=wanted)
    # But when to ring for it: a delivery that comes before a run's time is spent.
    assert [row | BELL for row in after] == [row | BELL for row in before]
    assert [entry.type for entry in await stations.log("mine")] == ["directive", "ack", "message"]
    assert database.value("select count(*) from effects") == 1
