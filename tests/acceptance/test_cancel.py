"""A run is cancelled by whoever asks, from wherever: real processes, and the real Flower."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest

from chaz import Chaz, RunCancelled
from chaz.result import AgentResult
from chaz.testing import StubServer, eventually
from tests.fixtures.broker import both_brokers
from tests.fixtures.flower import Flower
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import ROOT, Processes

HANG = {"text": "", "fault": {"hang": True}}
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def stub(processes: Processes) -> Iterator[StubServer]:
    """A model endpoint for the test's workers."""
    with StubServer() as server:
        processes.environment |= {"OPENAI_BASE_URL": server.base_url, "OPENAI_API_KEY": "the-key-of-the-test"}
        yield server


@pytest.fixture
def command(processes: Processes) -> Command:
    """``chaz`` or ``celery`` on the command line, to its end."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            env=processes.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def until(result: AgentResult, state: str) -> None:
    eventually(lambda: result.state == state, within=30)


def effects(database: ScratchDatabase) -> list[str]:
    return [row["name"] for row in database.query("select name from effects order by at")]


def test_a_model_call_is_cut_off_in_its_middle(
    processes: Processes, database: ScratchDatabase, stub: StubServer
) -> None:
    processes.listener()
    # No beat comes to find it out.
    processes.worker(agents="tests.thinkers", beat="3600", lease="7200")
    with Chaz(database.url) as chaz:
        session = chaz.session("s")
        result = session.direct("thinker", script(HANG))
        eventually(lambda: stub.requests, within=20)
        assert result.revoke(by="ada", reason="enough")
        with pytest.raises(RunCancelled, match="cancelled by ada: enough"):
            result.get(20)
        eventually(lambda: stub.aborted == 1)
        assert session.direct("thinker", script(answer("at work again"))).get(20) == "at work again"
        assert [entry.type for entry in session.entries()] == [
            "directive",
            "ack",
            "error",
            "directive",
            "ack",
            "message",
        ]


def test_a_synchronous_tool_is_told_and_its_late_result_refused(
    processes: Processes, database: ScratchDatabase
) -> None:
    processes.listener()
    processes.audit()
    worker = processes.worker()
    with Chaz(database.url) as chaz:
        result = chaz.session("s").direct("solo", script(calls(call("until_told")), answer("not this")))
        eventually(lambda: effects(database) == ["started"], within=20)
        assert result.revoke(by="ada")
        eventually(lambda: effects(database) == ["started", "told"])
        log = list(result.entries(follow=True))
        assert [entry.type for entry in log] == ["directive", "ack", "tool_call", "tool_result", "error"]
        assert log[3].content == "the run ended during the call; it may or may not have run"
    # What the tool came to in the end was not written.
    assert database.value("select outcome from chaz.calls") == "unknown"
    worker.stop()
    assert "Traceback" not in worker.said


def test_from_the_command_line_with_everything_down(
    processes: Processes, database: ScratchDatabase, command: Command
) -> None:
    with Chaz(database.url) as chaz:
        unplaced = chaz.session("s").direct("solo", script(calls(call("record_effect", name="ran")), answer("done")))
    done = command("chaz", "cancel", str(unplaced.id), "--reason", "enough", "--by", "ada")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"run {unplaced.id} is to be cancelled with the runs that it spawned; a listener ends them\n"

    processes.stack()

    waited = command("chaz", "wait", str(unplaced.id))
    assert (waited.returncode, waited.stdout) == (3, "")
    assert waited.stderr == f"chaz: run {unplaced.id} was cancelled (requested): cancelled by ada: enough\n"
    again = command("chaz", "cancel", str(unplaced.id))
    assert (again.returncode, again.stdout) == (0, f"run {unplaced.id} is over already: cancelled\n")
    told = json.loads(command("chaz", "cancel", str(unplaced.id), "--json").stdout)
    assert told == {"id": str(unplaced.id), "asked": False, "state": "cancelled"}
    unknown = command("chaz", "cancel", str(uuid4()))
    assert unknown.returncode == 66
    assert unknown.stderr.startswith("chaz: no run ")
    assert effects(database) == []


@both_brokers
def test_celery_control_revoke_is_heard_by_whoever_is_up(
    processes: Processes, database: ScratchDatabase, command: Command
) -> None:
    wait = script(calls(call("slow", seconds=50)), answer("done"))
    listener = processes.listener()
    with Chaz(database.url) as chaz:
        # By a listener alone: no worker is up, and the run is queued.
        database.query("insert into chaz.agents values ('solo', 'solo', 'v1', 30, '1 hour')")
        queued = chaz.session("queued").direct("solo", wait)
        until(queued, "queued")
        revoked = command("celery", "-A", "chaz", "control", "revoke", str(queued.id))
        assert "chaz-listener-" in revoked.stdout, revoked.stderr
        with pytest.raises(RunCancelled, match="cancelled by celery: revoked"):
            queued.get(20)

        # By a worker alone: the cancellation waits for a listener.
        worker = processes.worker()
        running = chaz.session("running").direct("solo", wait)
        until(running, "running")
        listener.stop()
        revoked = command("celery", "-A", "chaz", "control", "terminate", "TERM", str(running.id))
        assert "chaz-listener-" not in revoked.stdout
        assert "error" not in revoked.stdout, revoked.stdout
        eventually(lambda: database.query("select run_id from chaz.cancellations where run_id = %(id)s", id=running.id))
        processes.listener()
        with pytest.raises(RunCancelled, match="cancelled by celery: terminated"):
            running.get(20)

        # A revoke may come before its run. What Celery then drops does not stay queued.
        id = uuid4()
        command("celery", "-A", "chaz", "control", "revoke", str(id))
        dropped = chaz.session("dropped").direct("solo", wait, id=id)
        with pytest.raises(RunCancelled, match="cancelled by celery: revoked"):
            dropped.get(20)
        worker.until_says("Discarding revoked task", within=1)
        # Other commands are the workers' to answer.
        pong = command("celery", "-A", "chaz", "inspect", "ping")
        assert "1 node online" in pong.stdout


@both_brokers
def test_flowers_terminate_is_a_cancel_and_is_shown_as_revoked(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener()
    worker = processes.worker()
    ask = Flower(processes).ask

    with Chaz(database.url) as chaz:
        # Flower sees what happens after it has begun to listen.
        eventually(lambda: str(chaz.session().direct("solo", "Hi").id) in ask("tasks") or ask("tasks"), within=30)
        result = chaz.session("s").direct("solo", script(calls(call("until_told")), answer("done")))
        until(result, "running")
        eventually(lambda: effects(database) == ["started"])
        ask(f"task/revoke/{result.id}?terminate=true", "POST")
        with pytest.raises(RunCancelled, match="cancelled by celery: terminated"):
            result.get(20)
        eventually(lambda: ask("tasks")[str(result.id)]["state"] == "REVOKED")
        # The worker lives: others' runs were in the same process.
        assert chaz.session().direct("solo", "Hi").get(20) == "You said: Hi"
    assert "Traceback" not in worker.said
