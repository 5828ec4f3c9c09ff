"""A person's word, with real processes: who may give it, what it holds up, where it is seen, and what it closes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from chaz import Chaz, RunCancelled
from chaz.testing import eventually
from tests.acceptance.test_tool_policies import CARD, ESCAPED, in_audit_queue
from tests.fixtures.asking import CameTo, came_to, until_asked
from tests.fixtures.broker import Broker, both_brokers
from tests.fixtures.flower import Flower
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import ROOT, Process, Processes

pytestmark = pytest.mark.timeout(180)

BOUND = 60.0
WANTED = script(calls(call("record_effect", name="once")), answer("{{results}}"))
MADE = CameTo("approve", ["approve"], ("ok", None), 1)
CLOSED = CameTo("cancelled", ["cancelled"], None, 0)
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(processes: Processes) -> Command:
    """``chaz`` on the command line, to its end: its exit code and what it says."""

    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "chaz", *arguments],
            env=processes.environment | {"USER": "ada"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, (done.stdout + done.stderr).strip()

    return run


def start(processes: Processes, *flags: str) -> None:
    processes.environment |= {"CHAZ_APPROVERS": "ada,ops-*", "CHAZ_BEAT": "0.5"}
    processes.listener(sweep="1")
    processes.worker(*flags)


def notes(database: ScratchDatabase) -> list[str]:
    rows = database.query("select content from chaz.entries where type = 'note' order by session_id, position")
    return [row["content"] for row in rows]


def test_who_may_not_decide_changes_nothing(processes: Processes, database: ScratchDatabase, command: Command) -> None:
    start(processes)
    with Chaz(database.url) as chaz:
        run = chaz.session("s").direct("guarded", WANTED)
        (request,) = until_asked(chaz, [run])
        code, said = command("approve", str(request.id), "--by", "mallory")
        refusal = f"'mallory' may not decide request {request.id}; who may: ada, ops-*"
        assert (code, said) == (77, refusal)
        # Nor does the asking agent's own name.
        chaz.decide(request.id, "approve", by="guarded")
        eventually(lambda: notes(database) == [refusal, refusal.replace("mallory", "guarded")], within=BOUND)
        assert run.state == "parked"
        assert [open_one.id for open_one in chaz.approvals()] == [request.id]
        assert database.value("select count(*) from effects") == 0

        chaz.decide(request.id, "approve", by="ops-7")
        assert run.get(timeout=BOUND) == "recorded once"
        assert came_to(database, run) == MADE


def test_a_person_who_takes_long_holds_up_nobody_else(processes: Processes, database: ScratchDatabase) -> None:
    start(processes, "-c", "1")
    with Chaz(database.url) as chaz:
        waiting = [chaz.session(f"s{n}").direct("guarded", WANTED) for n in range(3)]
        requests = until_asked(chaz, waiting)
        for n in range(3):
            other = chaz.session("other").direct(
                "guarded", script(calls(call("word_count", text="a b")), answer("{{0.0}}"))
            )
            assert other.get(timeout=BOUND) == "2", n
        assert [run.state for run in waiting] == ["parked"] * 3
        for request in requests:
            request.approve(by="ada")
        assert [run.get(timeout=BOUND) for run in waiting] == ["recorded once"] * 3


def test_from_the_command_line(processes: Processes, database: ScratchDatabase, command: Command) -> None:
    start(processes)
    assert command("approvals") == (0, "nobody is asked anything")
    with Chaz(database.url) as chaz:
        wanted = {
            "approved": WANTED,
            "denied": WANTED,
            "all": script(calls(*[call("record_effect", name=name) for name in ("a", "b")]), answer("{{results}}")),
            "asks": script(
                calls(call("ask_human", question="Left or right?", options=["left", "right"])), answer("{{0.0}}")
            ),
        }
        runs = {name: chaz.session(name).direct("guarded", text) for name, text in wanted.items()}
        eventually(lambda: all(run.state == "parked" for run in runs.values()), within=BOUND)
        eventually(lambda: len(chaz.approvals()) == 5, within=BOUND)
        ids = {name: str(chaz.session(name).approvals()[0].id) for name in wanted}

        code, said = command("approvals")
        lines = said.splitlines()
        assert code == 0
        assert [line.split()[0] for line in lines] == [str(request.id) for request in chaz.approvals()]
        (line,) = [line for line in lines if line.startswith(ids["approved"])]
        assert 's left  low     guarded: record_effect {"name": "once"}' in line
        (line,) = [line for line in lines if line.startswith(ids["asks"])]
        assert "guarded: Left or right?" in line
        code, said = command("approvals", "--session", "asks", "--json")
        assert code == 0
        assert json.loads(said)["choices"] == ["left", "right"]

        code, said = command("approve", ids["approved"])
        assert code == 0
        assert f"request {ids['approved']} was approved by ada at " in said
        code, said = command("approve", ids["approved"])
        assert code == 0
        assert f"request {ids['approved']} was approved by ada at " in said
        assert said.endswith(" already; nothing was changed")
        code, said = command("deny", ids["denied"], "--reason", "not on a Friday")
        assert code == 0
        assert f"request {ids['denied']} was denied by ada" in said
        code, said = command("approve", ids["all"], "--all", "--by", "ops-1")
        assert code == 0
        assert "was approved by ops-1" in said
        code, said = command("answer", ids["asks"], "up")
        assert code == 65
        assert "is one of left, right" in said
        code, said = command("approve", ids["asks"])
        assert code == 65
        assert "is a question; answer it with a text, or deny it" in said
        prefix = shortest(ids["asks"], database)
        code, said = command("answer", prefix, "left", "--by", "mallory")
        assert code == 77
        code, said = command("answer", prefix, "left")
        assert code == 0
        assert f"request {ids['asks']} was answered by ada" in said
        code, said = command("approve", "no-such-id")
        assert code == 66
        assert "no-such-id" in said

        told = {name: run.get(timeout=BOUND) for name, run in runs.items()}
        assert told == {
            "approved": "recorded once",
            "denied": "denied by ada: not on a Friday",
            "all": "recorded a; recorded b",
            "asks": "left",
        }
        assert command("approvals") == (0, "nobody is asked anything")
        code, said = command("log", "denied")
        assert code == 0
        assert 'guarded asks: may guarded call record_effect? {"name": "once"}' in said
        assert "ada: deny: not on a Friday" in said
    assert sorted(row["name"] for row in database.query("select name from effects")) == ["a", "b", "once"]


def shortest(id: str, database: ScratchDatabase) -> str:
    """The shortest beginning of an id that no other request shares, of four characters and more."""
    others = [row["id"] for row in database.query("select id::text from chaz.approvals") if row["id"] != id]
    return next(id[:n] for n in range(4, 37) if not any(other.startswith(id[:n]) for other in others))


def test_a_run_that_is_cancelled_takes_its_question_back(
    processes: Processes, database: ScratchDatabase, command: Command
) -> None:
    start(processes)
    with Chaz(database.url) as chaz:
        session = chaz.session("s")
        run = session.direct("guarded", WANTED)
        (request,) = until_asked(chaz, [run])
        assert run.revoke(by="ada", reason="enough")
        with pytest.raises(RunCancelled, match="cancelled by ada: enough"):
            run.get(timeout=BOUND)
        assert session.direct("guarded", script(answer("usable"))).get(timeout=BOUND) == "usable"
        assert came_to(database, run) == CLOSED
        assert chaz.approvals() == []
        code, said = command("approve", str(request.id))
        assert code == 77
        assert "was closed with its run at " in said
        assert said.endswith("already; nothing was changed")


@pytest.mark.parametrize("policy", ["coalesce", "interrupt"])
def test_a_message_that_comes_while_it_waits(policy: Any, processes: Processes, database: ScratchDatabase) -> None:
    start(processes)
    with Chaz(database.url) as chaz:
        session = chaz.session("s")
        session.configure(on_message=policy)
        run = session.direct("guarded", WANTED)
        (request,) = until_asked(chaz, [run])
        later = session.say(script(answer("to the message"), text="Hi."))
        if policy == "interrupt":
            with pytest.raises(RunCancelled, match="interrupted"):
                run.get(timeout=BOUND)
            assert came_to(database, run) == CLOSED
            assert request.approve(by="ada") is None
        else:
            eventually(lambda: database.value("select count(*) from chaz.entries where position is null") == 0)
            assert [open_one.id for open_one in chaz.approvals()] == [request.id]
            request.approve(by="ada")
            assert run.get(timeout=BOUND) == "recorded once"
            assert came_to(database, run) == MADE
        assert later.get(timeout=BOUND) == "to the message"
        assert chaz.approvals() == []
    assert database.value("select count(*) from effects") == (policy == "coalesce")


def loud(processes: Processes, command: str) -> Process:
    """A process that says all it can."""
    process = processes.start(command, [sys.executable, "-m", "chaz", command, "--log-level", "DEBUG"], sweep="1")
    process.until_says(f"chaz {command} ready")
    return process


@both_brokers
def test_what_is_masked_is_found_nowhere(
    processes: Processes, database: ScratchDatabase, broker: Broker, command: Command
) -> None:
    processes.environment |= {"CHAZ_APPROVERS": "ada"}
    listener = loud(processes, "listener")
    worker = processes.worker("-l", "DEBUG")
    flower = Flower(processes)
    wanted = [
        script(calls(call("charge", card="CARD", amount=n)), answer("{{results}}")).replace("CARD", ESCAPED)
        for n in (3, 4)
    ]
    with Chaz(database.url) as chaz:
        # Flower sees what happens after it has begun to listen.
        eventually(lambda: chaz.session().direct("guarded", "Hi").get(BOUND) and flower.tasks(), within=BOUND)
        runs = [chaz.session(f"s{n}").direct("guarded", text) for n, text in enumerate(wanted)]
        requests = until_asked(chaz, runs)
        seen = {"a list": command("approvals"), "its JSON": command("approvals", "--json")}
        assert '"card": "***"' in seen["a list"][1]

        def parked() -> dict[str, Any]:
            task = flower.tasks()[str(runs[0].id)]
            assert task["state"] == "RETRY"
            return task

        task = eventually(parked, within=BOUND)
        assert task["exception"] == "parked: waits for approval of charge"
        assert flower.ask(f"task/result/{runs[0].id}") == {"task-id": str(runs[0].id), "state": "RETRY"}

        requests[0].approve(by="ada")
        requests[1].deny(by="ada", reason="too much")
        assert [run.get(timeout=BOUND) for run in runs] == ["charged 3 to ***", "denied by ada: too much"]
        eventually(lambda: flower.tasks()[str(runs[0].id)]["state"] == "SUCCESS", within=BOUND)
        seen |= {
            "Flower": flower.tasks(),
            "Flower's result": [flower.ask(f"task/result/{run.id}") for run in runs],
            "Flower's task": [flower.ask(f"task/info/{run.id}") for run in runs],
            "a log": [command("log", f"s{n}") for n in range(2)],
            "its JSON lines": [command("log", f"s{n}", "--json") for n in range(2)],
            "the runs": command("runs", "--json"),
        }
    assert database.query("select name from effects") == [{"name": CARD}]
    delivered = in_audit_queue(broker, 4)
    # What was taken from the queue is told again from the journal, and proven by the run's digest.
    audit = loud(processes, "audit")
    eventually(lambda: database.value("select count(*) from chaz.entries where type ^@ 'tool_'") == 4, within=BOUND)
    seen |= {
        "the audit queue": delivered,
        "the entries": database.query("select * from chaz.entries"),
        "the requests": database.query("select * from chaz.approvals"),
        "the runs' rows": database.query("select result, reason, waits_for from chaz.runs"),
        **{process.name: process.said for process in (listener, worker, audit, flower.process)},
    }
    for place, what in seen.items():
        text = str(what)
        assert CARD not in text, f"in {place}: …{text[max(0, text.find(CARD) - 200) :][:400]}"
    assert "***" in str(seen["the entries"])
    assert "charged 3" in str(seen["the audit queue"])
