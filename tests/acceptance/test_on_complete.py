"""Who is told of a run's end: tasks, the rest of a chain, a webhook. Real processes, on both brokers."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from chaz import Chaz
from chaz.testing import eventually
from chaz.webhooks import signature
from tests.fixtures.broker import both_brokers
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import ROOT, Processes

TASKS = """
import os
import psycopg
from chaz.celery import app

def leave(name, key):
    with psycopg.connect(os.environ["CHAZ_DATABASE_URL"], autocommit=True) as connection:
        connection.execute("insert into effects (name, key) values (%s, %s)", (name, key))

@app.task(name="mine.fetch")
def fetch(what):
    return f"[{what}]"

@app.task(name="mine.store")
def store(text, where="store"):
    leave(where, text)
    return text.upper()

@app.task(name="mine.failed")
def failed(id):
    leave("failed", id)
"""
SECRET = "a-secret"


class Receiver:
    """A web server that refuses the first request and takes the next ones."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        got = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                got.append(({name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(503 if len(got) == 1 else 204)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                del format, args

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/ends"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def with_tasks(processes: Processes, tmp_path: Path) -> Processes:
    """A deployment with Celery tasks of its own."""
    (tmp_path / "celeryconfig.py").write_text("imports = ['mine']\n")
    (tmp_path / "mine.py").write_text(TASKS)
    processes.environment["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    processes.environment["CHAZ_WEBHOOK_SECRET"] = SECRET
    processes.stack()
    return processes


def effects(database: ScratchDatabase, name: str) -> list[str]:
    return [row["key"] for row in database.query("select key from effects where name = %(n)s order by at", n=name)]


def from_a_program(processes: Processes, tmp_path: Path, program: str) -> Any:
    """Run a Celery producer in a process of its own; what it prints as JSON."""
    process = processes.start("program", [sys.executable, "-c", "from mine import *\nimport json\n" + program])
    assert process.exit_code() == 0, process.said
    return json.loads(process.said.splitlines()[-1])


@both_brokers
def test_a_run_is_a_step_of_a_chain(with_tasks: Processes, database: ScratchDatabase, tmp_path: Path) -> None:
    worker_slots = "select count(*) from chaz.runs where state = 'running'"
    id, last = from_a_program(
        with_tasks,
        tmp_path,
        """
from celery import chain
from chaz.celery import agent_step
made = chain(fetch.s("a text"), agent_step("solo", "Read this."), store.s(), store.s(where="second")).apply_async()
print(json.dumps([made.parent.parent.id, made.id]))
""",
    )
    eventually(lambda: effects(database, "second"))
    assert effects(database, "store") == ["You said: Read this.\n\n[a text]"]
    assert effects(database, "second") == ["YOU SAID: READ THIS.\n\n[A TEXT]"]
    with Chaz(database.url) as chaz:
        run = chaz.result(id)
        assert (run.state, run.agent) == ("succeeded", "solo")
        assert [entry.content for entry in run.entries() if entry.type == "directive"] == ["Read this.\n\n[a text]"]
    assert database.value(worker_slots) == 0
    eventually(lambda: database.value("select count(*) from chaz.callbacks") == 0)
    assert last != id


@both_brokers
def test_a_chain_ends_where_its_run_fails(with_tasks: Processes, database: ScratchDatabase, tmp_path: Path) -> None:
    id = from_a_program(
        with_tasks,
        tmp_path,
        f"""
from celery import chain
from chaz.celery import agent_step
made = chain(agent_step("solo", {script({"error": "too bad"})!r}), store.s()).on_error(failed.s()).apply_async()
print(json.dumps(made.parent.id))
""",
    )
    eventually(lambda: effects(database, "failed") == [id])
    assert effects(database, "store") == []


def test_a_task_is_told_of_an_end_and_a_coalesced_message_too(with_tasks: Processes, database: ScratchDatabase) -> None:
    told: dict[str, Any] = {
        "task": "mine.store",
        "args": [],
        "kwargs": {},
        "options": {},
        "subtask_type": None,
        "immutable": False,
    }
    with Chaz(database.url) as chaz:
        busy = script(calls(call("slow", seconds=1)), answer("done"))
        chaz.session("s").direct("solo", busy, on_complete=told | {"kwargs": {"where": "busy"}})
        for text in ("one", "two"):
            chaz.session("s").say(text, recipient="solo", on_complete=told | {"kwargs": {"where": text}})
        nobody = chaz.session("empty").say("anybody?", on_complete=told | {"kwargs": {"where": "nobody"}})
        eventually(lambda: effects(database, "busy") == ["done"])
        eventually(lambda: effects(database, "one") == effects(database, "two") != [])
        assert nobody.get(timeout=20) is None
    eventually(lambda: database.value("select count(*) from chaz.callbacks") == 0)


def test_a_webhook_is_signed_and_sent_until_it_is_taken(
    with_tasks: Processes, database: ScratchDatabase, receiver: Receiver
) -> None:
    with Chaz(database.url) as chaz:
        run = chaz.session("s").direct("solo", script({"error": "too bad"}), on_complete=receiver.url)
        eventually(lambda: len(receiver.requests) == 2, within=30)
        eventually(lambda: database.value("select count(*) from chaz.callbacks") == 0)

        for headers, body in receiver.requests:
            at = headers["webhook-timestamp"]
            assert headers["webhook-id"] == str(run.id)
            assert headers["webhook-signature"] == signature(SECRET, str(run.id), at, body)
        data = json.loads(receiver.requests[1][1])["data"]
        assert (data["run"], data["state"], data["reason"]) == (str(run.id), "failed", "model")
        assert data["result"] == run.result


def test_what_cannot_be_told_is_tried_again_and_seen(processes: Processes, database: ScratchDatabase) -> None:
    processes.stack()
    nowhere: dict[str, Any] = {"task": "mine.store", "args": [], "kwargs": {}, "options": {"queue": "nowhere"}}
    with Chaz(database.url) as chaz:
        webhook = chaz.session().direct("solo", "Hi", on_complete="http://127.0.0.1:1/")
        task = chaz.session().direct("solo", "Hi", on_complete=nowhere)

        def errors() -> dict[Any, str]:
            rows = database.query("select run_id, last_error from chaz.callbacks where last_error is not null")
            return {row["run_id"]: row["last_error"] for row in rows}

        # Valkey takes everything, for whoever will come; an unsigned webhook is never sent.
        eventually(lambda: "CHAZ_WEBHOOK_SECRET is not set" in errors().get(webhook.id, ""))
        eventually(lambda: database.value("select count(*) from chaz.callbacks") == 1)
        assert task.successful()
