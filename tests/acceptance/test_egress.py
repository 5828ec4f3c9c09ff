"""A secret that a tool holds: nowhere in the log, the audit queue, what the model is shown, or a worker's log."""

from __future__ import annotations

from typing import Any

import pytest

from chaz import Chaz
from chaz.testing import StubServer, eventually
from tests.fixtures.broker import Broker
from tests.fixtures.model import answer, call, calls, script, spawn
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Process, Processes
from tests.integration.test_audit import in_queue

PLANTED = "ghp_" + "UwX2mQTyYGx0BkrvITgO" + "4bCdEf7hIjKlMn0p"
OWN = "correct-Horse-9-battery"
WHOLE = "{{1.0}}{{1.1}}"
"""As the script has it: what the model makes of the two halves that it was shown."""
LEAKS = script(
    calls(call("read_config"), call("fail_to_log_in")),
    calls(call("half", which=0), call("half", which=1)),
    calls(
        call("log_in", token=WHOLE),
        spawn("keeper", "Try it with ") | {"arguments": {"agent": "keeper", "instruction": f"Log in with {WHOLE}"}},
    ),
    answer(f"It is {WHOLE}. {{{{0.0}}}} {{{{0.1}}}} {{{{2.0}}}} {{{{2.1}}}}"),
)


def worker(processes: Processes, stub: StubServer, policy: str) -> Process:
    processes.environment |= {
        "CHAZ_AGENTS": "tests.keepers",
        "CHAZ_TEST_PLANTED": PLANTED,
        "VAULT_PASSWORD": OWN,
        "OPENAI_BASE_URL": stub.base_url,
        "OPENAI_API_KEY": "sk-of-the-stub",
    }
    return processes.worker("-l", "DEBUG", secrets=policy)


def shown(stub: StubServer) -> str:
    """All that the model was shown, but for its own turns: those it made itself."""
    return repr([message for body in stub.requests for message in body["messages"] if message["role"] != "assistant"])


def logged(database: ScratchDatabase) -> list[dict[str, Any]]:
    return database.query("select * from chaz.entries order by arrival") + database.query(
        "select result, reason, waits_for from chaz.runs"
    )


@pytest.mark.parametrize("policy", ["redact", "block"])
def test_a_secret_stays_where_it_is(
    policy: str, processes: Processes, database: ScratchDatabase, broker: Broker
) -> None:
    with StubServer() as stub, Chaz(database.url) as chaz:
        processes.listener()
        at_work = worker(processes, stub, policy)
        result = chaz.session("vault").direct("keeper", LEAKS)
        said = result.get(timeout=60)
        assert said is not None

        delivered = in_queue(broker, dead=False)
        eventually(lambda: delivered.extend(in_queue(broker, dead=False)) or "log_in" in repr(delivered))
        assert "tool_result" in repr(delivered)
        # What was taken from the queue is told again from the journal, and proven by the run's digest.
        processes.audit()
        eventually(lambda: database.value("select count(*) from chaz.entries where type ^@ 'tool_'") == 12, within=60)
        eventually(
            lambda: database.value("select count(*) from chaz.runs where audit_after is not null") == 0, within=60
        )

        for secret in (PLANTED, OWN):
            for place, text in {
                "the audit queue": repr(delivered),
                "the log": repr(logged(database)),
                "the model": shown(stub),
                "the worker's log": at_work.said,
            }.items():
                assert secret not in text, f"{secret} is in {place}: …{text[max(0, text.find(secret) - 200) :][:300]}"
        assert "[redacted: github-pat]" in said
        assert "[redacted: github-pat]" in repr(delivered)
        # The journal, and what is replayed from it, is exact.
        assert database.value("select arguments from chaz.calls where tool = 'log_in'") == f'{{"token": "{PLANTED}"}}'
        if policy == "redact":
            assert database.value("select name from effects") == PLANTED
            assert "[redacted: VAULT_PASSWORD]" in shown(stub)
            assert "Log in with [redacted: github-pat]" in said
        else:
            assert database.value("select count(*) from effects") == 0
            assert "withheld: the output of read_config was withheld: it contains a secret (" in said
            assert "secret_arguments: log_in was not called: its arguments contain a secret (github-pat)" in said
            assert "secret_arguments: spawn_agent was not called" in said


def test_a_tool_may_be_let_out_of_it(processes: Processes, database: ScratchDatabase) -> None:
    with StubServer() as stub, Chaz(database.url) as chaz:
        processes.listener()
        worker(processes, stub, "redact")
        result = chaz.session("vault").direct("keeper", script(calls(call("tell_all")), answer("{{results}}")))

        assert result.get(timeout=60) == "[redacted: github-pat]"
        assert PLANTED in shown(stub)
