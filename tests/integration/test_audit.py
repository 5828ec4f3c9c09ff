"""The audit trail on a real broker, recorded by real `chaz audit` processes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any, cast
from uuid import UUID

import pytest

from chaz.audit.publisher import AuditPublisher
from chaz.broker import audit_queue, dead_letter_queue
from chaz.deliveries import AuditBatch, AuditEvent
from chaz.outcomes import MAX_RESULT
from chaz.sender import BATCH_BYTES, BUFFER_BYTES
from chaz.testing import eventually
from tests.fixtures.broker import Broker, both_brokers
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes
from tests.fixtures.stations import Stations, a_call

pytestmark = [pytest.mark.anyio, pytest.mark.broker, both_brokers]


@pytest.fixture
def publisher(broker: Broker) -> Iterator[AuditPublisher]:
    made = AuditPublisher(broker.settings())
    yield made
    made.close()


async def told(stations: Stations, calls: int = 1, session: str = "s") -> list[AuditEvent]:
    """The events of a run that has made so many calls."""
    claim = await stations.claimed(session)
    await stations.step(claim, *[a_call("word_count")] * calls)
    events: list[AuditEvent] = []
    for ordinal in range(calls):
        events += [await stations.start_call(claim, ordinal=ordinal)]
        events += [await stations.finish_call(claim, ordinal=ordinal, content=str(ordinal))]
    await stations.end(claim)
    return events


def recorded(database: ScratchDatabase) -> list[dict[str, Any]]:
    return database.query("select * from chaz.entries where seq > 0 order by session_id, position, seq")


def places(database: ScratchDatabase) -> set[tuple[UUID, int, int]]:
    return {(row["run_id"], row["position"], row["seq"]) for row in recorded(database)}


def until_recorded(database: ScratchDatabase, events: list[AuditEvent]) -> None:
    wanted = {(event.run, event.position, event.seq) for event in events}
    eventually(lambda: places(database) == wanted, within=20)


def publish(broker: Broker, body: Any, **properties: Any) -> None:
    """Any delivery, on the audit queue."""
    queue = audit_queue(broker.prefix)
    with broker.connect() as connection:
        connection.Producer().publish(
            body, exchange=queue.exchange, routing_key=queue.routing_key, declare=[queue], **properties
        )


def batch(*events: AuditEvent) -> dict[str, Any]:
    return AuditBatch(events=events).model_dump(mode="json")


def in_queue(broker: Broker, *, dead: bool) -> list[tuple[bytes, dict[str, Any]]]:
    """Take all deliveries of a queue: their bodies and headers."""
    queue = dead_letter_queue(broker.prefix) if dead else audit_queue(broker.prefix)
    found: list[tuple[bytes, dict[str, Any]]] = []
    with broker.connect() as connection:
        bound = queue.bind(connection.default_channel)
        bound.declare()
        while (message := bound.get()) is not None:
            body = cast("Any", message.body)
            found.append((body.encode() if isinstance(body, str) else bytes(body), cast("Any", message.headers)))
            message.ack()
    return found


async def test_what_a_run_tells_becomes_entries_at_its_ack(
    stations: Stations, database: ScratchDatabase, processes: Processes, publisher: AuditPublisher
) -> None:
    consumer = processes.audit()
    events = await told(stations)
    publisher.tell(events)
    until_recorded(database, events)

    call, result = recorded(database)
    ack = next(entry for entry in await stations.log("s") if entry.type == "ack")
    assert (call["type"], call["position"], call["seq"], call["content"]) == (
        "tool_call",
        ack.position,
        1,
        '{"text": "a b c"}',
    )
    assert (result["type"], result["position"], result["seq"], result["content"]) == (
        "tool_result",
        ack.position,
        2,
        "0",
    )
    assert (call["sender"], call["author"], call["run_id"]) == ("solo", "agent", events[0].run)
    assert result["metadata"] == {
        "tool": "word_count",
        "step": 0,
        "ordinal": 0,
        "call_id": "call_1",
        "attempt": 1,
        "outcome": "ok",
    }
    consumer.stop()


async def test_an_event_told_again_is_the_same_entry(
    stations: Stations, database: ScratchDatabase, processes: Processes, publisher: AuditPublisher, broker: Broker
) -> None:
    processes.audit()
    events = await told(stations, calls=2)
    publish(broker, batch(events[2], events[0], events[0]))
    for _ in range(3):
        publisher.tell(events)
    until_recorded(database, events)
    before = recorded(database)
    others = await told(stations, session="t")
    publisher.tell(events)
    publisher.tell(others)
    until_recorded(database, events + others)
    assert [row for row in recorded(database) if row["run_id"] == events[0].run] == before
    assert in_queue(broker, dead=True) == []


async def test_what_cannot_be_recorded_is_buried_with_its_reason_and_its_neighbours_live(
    stations: Stations, database: ScratchDatabase, processes: Processes, broker: Broker
) -> None:
    events = await told(stations, calls=2)
    strangers = await told(stations, session="t")
    of_another_session = events[0].model_copy(update={"session": strangers[0].session})
    never_told = events[0].model_copy(update={"seq": 99})
    of_nobody = events[0].model_copy(update={"run": UUID(int=7)})
    not_storable = events[3].model_copy(update={"position": 2**40, "seq": 3, "content": "a\0b"})
    bad: list[tuple[Any, dict[str, Any], str]] = [
        ("{ no json", {"content_type": "application/json", "content_encoding": "utf-8"}, "cannot be decoded"),
        (b"\x80\x04pickled", {"content_type": "application/x-python-serialize"}, "cannot be decoded"),
        (b"\xff\xfe", {"content_type": "application/json", "content_encoding": "utf-8"}, "cannot be decoded"),
        ([1, 2], {}, "not an audit delivery of version 1"),
        (batch(events[0]) | {"version": 2}, {}, "not an audit delivery of version 1"),
        (batch(events[0]) | {"events": [{"kind": "rumour"}]}, {}, "not an audit delivery of version 1"),
        (batch(of_another_session), {}, "no run of its session told"),
        (batch(never_told), {}, "no run of its session told"),
        (batch(of_nobody), {}, "no run of its session told"),
        (batch(not_storable), {}, "cannot be recorded"),
    ]
    for number, (body, properties, _) in enumerate(bad):
        publish(broker, body, **properties)
        publish(broker, batch(events[number % 4]))
    processes.audit()
    until_recorded(database, events)

    dead: list[tuple[bytes, dict[str, Any]]] = []

    def all_are_buried() -> bool:
        dead.extend(in_queue(broker, dead=True))
        return len(dead) >= len(bad)

    eventually(all_are_buried)
    assert len(dead) == len(bad)
    reasons = sorted(headers["x-chaz-reason"] for _, headers in dead)
    for reason, wanted in zip(reasons, sorted(why for _, _, why in bad), strict=True):
        assert wanted in reason
    bodies = [body for body, _ in dead]
    assert b"{ no json" in bodies
    assert any(b"rumour" in body for body in bodies)
    assert in_queue(broker, dead=False) == []


async def test_a_consumer_that_is_killed_loses_nothing(
    stations: Stations, database: ScratchDatabase, processes: Processes, publisher: AuditPublisher
) -> None:
    events = [event for n in range(10) for event in await told(stations, calls=5, session=f"s{n}")]
    consumer = processes.audit()
    with database.connect() as blocker:
        # It has taken them and cannot commit: killed now, it has acknowledged none.
        blocker.execute("lock table chaz.entries in exclusive mode")
        publisher.tell(events)
        database.until_blocked()
        consumer.kill()
        blocker.rollback()
    processes.audit()
    until_recorded(database, events)


async def test_a_consumer_outlives_a_cut_connection_to_postgresql(
    stations: Stations, database: ScratchDatabase, processes: Processes, publisher: AuditPublisher
) -> None:
    consumer = processes.audit()
    (pid,) = database.backends("chaz-audit")
    database.query("select pg_terminate_backend(%(pid)s)", pid=pid)
    events = await told(stations)
    publisher.tell(events)
    until_recorded(database, events)
    consumer.stop()


async def test_two_consumers_share(
    stations: Stations, database: ScratchDatabase, processes: Processes, publisher: AuditPublisher, broker: Broker
) -> None:
    processes.audit()
    processes.audit()
    events = [event for n in range(10) for event in await told(stations, calls=5, session=f"s{n}")]
    for event in events:
        publisher.tell([event])
    until_recorded(database, events)
    assert in_queue(broker, dead=True) == []


async def test_telling_never_waits_for_a_broker(stations: Stations, broker: Broker) -> None:
    events = await told(stations, calls=10)
    # A broker that takes connections and says nothing, and one that is not there.
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [silent.getsockname()[1], other.getsockname()[1]]
        other.close()
        for port in ports:
            scheme = broker.url.partition("://")[0]
            publisher = AuditPublisher(
                broker.settings().model_copy(update={"broker_url": f"{scheme}://127.0.0.1:{port}"}), buffer=10
            )
            started = time.monotonic()
            for _ in range(5):
                publisher.tell(events)
            assert time.monotonic() - started < 1
            assert publisher.dropped >= 80
            started = time.monotonic()
            publisher.close(timeout=0.2)
            assert time.monotonic() - started < 2


async def test_a_publisher_sends_what_it_has_before_it_closes(stations: Stations, broker: Broker) -> None:
    publisher = AuditPublisher(broker.settings())
    events = await told(stations, calls=30)
    publisher.tell(events)
    publisher.close()
    batches = [json.loads(body) for body, _ in in_queue(broker, dead=False)]
    assert [event["seq"] for batch in batches for event in batch["events"]] == list(range(1, 61))


async def test_long_results_bound_buffer_and_deliveries_in_bytes(stations: Stations, broker: Broker) -> None:
    events = [event.model_copy(update={"content": "x" * MAX_RESULT}) for event in await told(stations, calls=10)]
    away = broker.settings().model_copy(update={"broker_url": f"{broker.url.partition('://')[0]}://127.0.0.1:1"})
    publisher = AuditPublisher(away)
    for _ in range(100):
        publisher.tell(events)
    kept = 2000 - publisher.dropped
    publisher.close(timeout=0.2)
    # A batch may be in the sender's hands.
    assert kept * MAX_RESULT <= BUFFER_BYTES + 2 * BATCH_BYTES

    publisher = AuditPublisher(broker.settings())
    publisher.tell(events)
    publisher.close()
    bodies = [body for body, _ in in_queue(broker, dead=False)]
    assert sum(len(json.loads(body)["events"]) for body in bodies) == len(events)
    assert max(map(len, bodies)) < 2 * BATCH_BYTES
