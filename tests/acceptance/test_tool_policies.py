"""Tool policies, seen from outside: tries, rates over several workers, and what is not shown."""

from __future__ import annotations

from typing import Any, cast

from chaz import Chaz
from chaz.broker import audit_queue
from chaz.testing import eventually
from tests.fixtures.broker import Broker, both_brokers
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes

CARD = "4111-planted-2222"
ESCAPED = "".join(f"\\u{ord(character):04x}" for character in CARD)
"""As it may stand in a script, where no search for it finds it."""
CALLS = 12


def test_a_tool_is_tried_again_and_only_its_last_outcome_counts(
    processes: Processes, database: ScratchDatabase
) -> None:
    processes.listener()
    processes.audit()
    worker = processes.worker()
    with Chaz(database.url) as chaz:
        wanted = script(calls(call("third_time", name="tried")), answer("{{results}}"))
        result = chaz.session("s").direct("careful", wanted)
        assert result.get(timeout=60) == "in try 3"
    assert database.query("select name, count(*), count(distinct key) as keys from effects group by name") == [
        {"name": "tried", "count": 3, "keys": 1}
    ]
    worker.until_says("failed in try 2 of 4; again in 1 s")
    assert worker.said.count("tool third_time") == 2
    recorded = "select type, content from chaz.entries where seq > 0 order by seq"
    eventually(lambda: len(database.query(recorded)) == 2, within=20)
    assert [(row["type"], row["content"]) for row in database.query(recorded)] == [
        ("tool_call", '{"name": "tried"}'),
        ("tool_result", "in try 3"),
    ]


def test_the_deployments_word_is_what_counts(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener()
    processes.worker(tool_policies='{"third_*": {"retries": 0}, "seldom": {"rate_limit": "1/h"}}')
    with Chaz(database.url) as chaz:
        wanted = script(
            calls(call("third_time", name="tried")),
            calls(call("seldom", name="first")),
            calls(call("seldom", name="second")),
            answer("{{results}}"),
        )
        told = chaz.session("s").direct("careful", wanted).get(timeout=60) or ""
    assert "rate_limited: seldom is called too often; try again in 3" in told
    assert database.query("select name from effects order by at") == [{"name": "tried"}, {"name": "first"}]
    assert database.query("select tool, outcome, error from chaz.calls order by step") == [
        {"tool": "third_time", "outcome": "error", "error": None},
        {"tool": "seldom", "outcome": "ok", "error": None},
        {"tool": "seldom", "outcome": "error", "error": "rate_limited"},
    ]


def test_a_rate_holds_over_all_workers(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener()
    # More calls than one of them has room for.
    for _ in range(2):
        processes.worker("--concurrency", "4")
    with Chaz(database.url) as chaz:
        wanted = script(calls(call("seldom", name="called")), answer("{{results}}"))
        results = [chaz.session(f"s{n}").direct("careful", wanted) for n in range(CALLS)]
        assert [result.get(timeout=90) for result in results] == ["recorded called"] * CALLS
    # Two at once, then one every 0.5 s from the first on, whose run had been claimed before.
    sooner = database.query(
        """
        select * from (
            select row_number() over (order by at) as n, at,
                (select min(started_at) from chaz.runs) as began from effects) called
        where at < began + (n - 2) * interval '0.5 seconds'
        """
    )
    assert sooner == []
    assert database.value("select count(*) from effects") == CALLS
    assert database.value("select count(distinct pid) from effects") == 2


@both_brokers
def test_a_sensitive_parameter_stays_with_the_workers(
    processes: Processes, database: ScratchDatabase, broker: Broker
) -> None:
    listener = processes.listener(sweep="0.5")
    worker = processes.worker()
    wanted = script(calls(call("pay", card="CARD", amount=3)), answer("{{results}}")).replace("CARD", ESCAPED)
    with Chaz(database.url) as chaz:
        assert chaz.session("s").direct("careful", wanted).get(timeout=60) == "paid 3"
    # The tool got it, and the journal has it.
    assert database.value("select name from effects") == CARD
    (stored,) = database.query("select arguments, shown from chaz.calls")
    assert CARD in stored["arguments"]
    assert stored["shown"] == '{"card": "***", "amount": 3}'
    told = in_audit_queue(broker, 2)
    assert len(told) == 2
    # What the queue lost is told again from the journal, and fits what the run said that it told.
    audit = processes.audit()
    recorded = "select content from chaz.entries where type = 'tool_call'"
    eventually(lambda: database.query(recorded) == [{"content": stored["shown"]}], within=60)
    eventually(lambda: database.value("select audit_after from chaz.runs") is None, within=60)
    entries = str(database.query("select * from chaz.entries"))
    for seen in (*told, entries, listener.said, worker.said, audit.said):
        assert CARD not in seen


def in_audit_queue(broker: Broker, events: int) -> list[str]:
    """Take what was told of so many events, as text."""
    found: list[str] = []
    with broker.connect() as connection:
        bound = audit_queue(broker.prefix).bind(connection.default_channel)
        bound.declare()

        def told() -> bool:
            while (message := bound.get()) is not None:
                batch = cast("dict[str, Any]", message.decode())
                found.extend(str(event) for event in batch["events"])
                message.ack()
            return len(found) >= events

        eventually(told, within=20)
    return found
