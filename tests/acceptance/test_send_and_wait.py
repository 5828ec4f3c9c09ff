"""One insert, one answer: real processes, on both brokers."""

from __future__ import annotations

import json
import subprocess
import sys

from chaz import Chaz, as_completed
from chaz.testing import eventually
from chaz.waiter import waiting
from tests.fixtures.broker import both_brokers
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase, both_servers
from tests.fixtures.processes import Processes


@both_brokers
def test_a_directive_is_answered(processes: Processes, database: ScratchDatabase) -> None:
    processes.stack()
    with Chaz(database.url) as chaz:
        wanted = script(calls(call("word_count", text="a b c")), answer("counted {{results}}"))

        result = chaz.session("report").direct("solo", wanted)

        assert result.get(timeout=30) == "counted 3"
        assert result.state == "succeeded"
        assert [entry.type for entry in result.entries(follow=True)] == [
            *("directive", "ack"),
            *("tool_call", "tool_result", "message"),
        ] or sorted(entry.type for entry in result.entries()) == sorted(
            ["directive", "ack", "tool_call", "tool_result", "message"]
        )


@both_servers
def test_sql_is_a_producer_too(processes: Processes, database: ScratchDatabase) -> None:
    processes.stack()

    id = database.value("select chaz.send('report', 'directive', 'cron', 'Say it.', recipient => 'solo')")

    with Chaz(database.url) as chaz:
        assert chaz.result(id).get(timeout=30) == "You said: Say it."


def test_many_are_answered_as_they_end(processes: Processes, database: ScratchDatabase) -> None:
    processes.stack()
    with Chaz(database.url) as chaz:
        handles = [chaz.session().direct("solo", f"number {n}") for n in range(50)]

        answers = {handle.get() for handle in as_completed(handles, timeout=60)}

    assert answers == {f"You said: number {n}" for n in range(50)}


def test_a_thousand_waiting_producers_listen_once_and_one_end_reaches_them_all(
    processes: Processes, database: ScratchDatabase
) -> None:
    processes.stack()
    waiting_run = script(calls(call("until_effect", name="go")), answer("gone"))
    with Chaz(database.url) as chaz, Chaz(database.url) as other:
        run = chaz.session("s").direct("solo", waiting_run)
        futures = [producer.handle(run.id).future() for producer in (chaz, other) for _ in range(500)]
        eventually(lambda: waiting() == len(futures))
        assert len(database.backends("chaz-wait")) == 1

        database.query("insert into effects (name) values ('go')")

        for future in futures:
            future.result(60)
        assert len(database.backends("chaz-wait")) == 1
        assert run.get() == "gone"


def test_a_producer_needs_postgresql_and_nothing_else(processes: Processes, database: ScratchDatabase) -> None:
    processes.stack()
    program = """
import sys
for name in ("celery", "kombu", "amqp", "redis", "alembic", "openai", "sqlalchemy"):
    sys.modules[name] = None  # importing it is an ImportError from here on
from chaz import Chaz
with Chaz.from_env() as chaz:
    print(chaz.session("from-afar").direct("solo", "Hello").get(timeout=30))
"""
    environment = processes.environment | {"CHAZ_BROKER_URL": "amqp://nobody:wrong@127.0.0.1:1//"}

    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.stdout, done.returncode) == ("You said: Hello\n", 0), done.stderr


def test_a_waiting_command_prints_the_answer(processes: Processes) -> None:
    processes.stack()

    def chaz(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "chaz", *arguments],
            env=processes.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    sent = chaz("send", "talk", "Hello", "--to", "solo", "--wait", "--timeout", "30")
    assert (sent.stdout, sent.returncode) == ("You said: Hello\n", 0), sent.stderr

    failing = chaz("send", "talk", script({"error": "refused"}), "--to", "solo", "--json")
    id = json.loads(failing.stdout)["id"]
    waited = chaz("wait", id, "--timeout", "30")
    assert waited.returncode == 1
    assert waited.stderr.startswith(f"chaz: run {id} failed (model): ")
    waited = chaz("wait", id, "--json")
    assert (json.loads(waited.stdout)["state"], waited.returncode) == ("failed", 1)

    log = chaz("log", "talk")
    assert "program → solo: Hello" in log.stdout or "→ solo: Hello" in log.stdout
    assert "error: " in log.stdout
    assert "\033" not in log.stdout, "colours are for terminals"

    runs = [json.loads(line) for line in chaz("runs", "--session", "talk", "--json").stdout.splitlines()]
    assert [run["state"] for run in runs] == ["failed", "succeeded"]


def test_a_followed_log_grows(processes: Processes, database: ScratchDatabase) -> None:
    processes.stack()
    with Chaz(database.url) as chaz:
        chaz.session("talk").direct("solo", "first").wait(30)
        follower = processes.start("log", [sys.executable, "-m", "chaz", "log", "talk", "--follow", "--json"])
        follower.until_says('"You said: first"')

        chaz.session("talk").say("second")

        follower.until_says("You said: ", times=2)
        eventually(lambda: json.loads(follower.said.splitlines()[-1])["position"] == 6)
