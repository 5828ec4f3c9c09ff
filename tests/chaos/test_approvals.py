"""Approvals while workers, listeners and brokers die: an execution or none, and all who know of it agree."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from chaz import AgentResult, Chaz, RunFailed
from chaz.broker import run_queue
from chaz.deciding import Request
from chaz.runtime.calling import MAY_HAVE_RUN
from chaz.testing import eventually
from tests.acceptance.test_holding_back import registered
from tests.fixtures.asking import CameTo, came_to, until_asked
from tests.fixtures.broker import Broker
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes
from tests.fixtures.valkey import Valkey

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

SOON = {"lease": "2", "beat": "0.5", "sweep": "1", "approvers": "ada"}
BOUND = 60.0
ASKED = ("approve", "approve_all", "deny")
RACES = 12


class Word(NamedTuple):
    """A person's word, or none in time, and what has to come of it."""

    told: str
    came_to: CameTo


WORDS: Mapping[str, Word] = {
    "approve": Word("recorded approve", CameTo("approve", ["approve"], ("ok", None), 1)),
    "approve_all": Word("recorded approve_all", CameTo("approve_all", ["approve_all"], ("ok", None), 1)),
    "deny": Word("denied by ada: not today", CameTo("deny", ["deny"], ("error", "denied"), 0)),
    "timed_out": Word(
        "timed_out: not approved in time; it was not made",
        CameTo("timed_out", ["timed_out"], ("error", "timed_out"), 0),
    ),
}


def send(chaz: Chaz, *, patience: float) -> dict[str, AgentResult]:
    """A run for each word, in a session of its own; the one that gets none waits for ``patience`` seconds."""
    runs: dict[str, AgentResult] = {}
    for word in WORDS:
        session = chaz.session(word)
        turns = [calls(call("record_effect", name=word))]
        if word == "timed_out":
            session.configure(approval_timeout=patience)
        elif word == "approve_all":
            turns.append(calls(call("record_effect", name="and again")))
        runs[word] = session.direct("guarded", script(*turns, answer("{{0.0}}")))
    return runs


def give(word: str, request: Request[Any]) -> None:
    match word:
        case "approve":
            request.approve(by="ada")
        case "approve_all":
            request.approve_all(by="ada")
        case "deny":
            request.deny(by="ada", reason="not today")
        case _:
            pass


def until_through(database: ScratchDatabase, runs: Mapping[str, AgentResult]) -> None:
    """Wait until all have answered, and compare what the model, the journal, the log and the world have of it."""
    for word, run in runs.items():
        assert run.get(timeout=BOUND) == WORDS[word].told, word
        assert came_to(database, run) == WORDS[word].came_to, word
    assert database.value("select count(*) from effects where name = 'and again'") == 1
    assert database.value("select count(*) from chaz.approvals") == len(runs), "what approve_all covers is not asked"
    assert database.value("select max(n) from (select count(*) as n from effects group by key) as executed") == 1


@pytest.fixture
def own_valkey(valkey: Valkey) -> Broker:
    return Broker(valkey.url, "test")


@pytest.mark.parametrize("broker", ["own_valkey"], indirect=True)
@pytest.mark.parametrize("broker_is", ["flushed", "restarted"])
def test_everything_is_restarted_while_they_wait(
    broker_is: str, valkey: Valkey, broker: Broker, processes: Processes, database: ScratchDatabase
) -> None:
    registered(database, "guarded")
    # It announces each run once.
    listener = processes.listener(**SOON | {"sweep": "600"})
    with Chaz(database.url) as chaz:
        runs = send(chaz, patience=1)
        queue = f"{broker.prefix}:{run_queue(broker.prefix, 'guarded').name}"
        eventually(lambda: valkey.ask("LLEN", queue) == len(runs), within=BOUND)
        # None is there to close what times out before the worker dies.
        listener.kill()
        worker = processes.worker(**SOON)
        requests = until_asked(chaz, list(runs.values()))
        worker.kill()
        if broker_is == "flushed":
            valkey.flush()
        else:
            valkey.restart()

        assert {request.id for request in chaz.approvals()} == {request.id for request in requests}
        for word, request in zip(runs, requests, strict=True):
            give(word, request)
        processes.listener(**SOON)
        processes.worker(**SOON)

        until_through(database, runs)


def test_the_worker_dies_between_the_word_and_the_call(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener(**SOON)
    first = processes.worker(**SOON)
    with Chaz(database.url) as chaz, database.connect() as held:
        # Nobody writes a call now: what was decided is read, and its worker goes no further.
        held.execute("lock table chaz.calls in share mode")
        runs = send(chaz, patience=1)
        for word, request in zip(ASKED, until_asked(chaz, [runs[word] for word in ASKED]), strict=True):
            give(word, request)
        database.until_blocked(len(runs))
        first.kill()
        database.query(
            """
            select pg_terminate_backend(pid) from pg_stat_activity
            where datname = current_database() and wait_event_type = 'Lock'
            """
        )
        held.rollback()
        for word, run in runs.items():
            assert came_to(database, run) == WORDS[word].came_to._replace(journal=None, effects=0), word
        processes.worker(**SOON)

        until_through(database, runs)
        assert database.query("select distinct attempt from chaz.runs") == [{"attempt": 3}]


def test_the_worker_dies_after_the_call(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener(**SOON)
    first = processes.worker(**SOON)
    with Chaz(database.url) as chaz:
        runs = {
            word: chaz.session(word).direct(
                "guarded",
                script(
                    calls(call("record_effect", name=word)), calls(call("until_effect", name="go")), answer("{{0.0}}")
                ),
            )
            for word in ("approve", "approve_all")
        }
        # Its effect is there, and then it takes its time.
        lasting = chaz.session("lasting").direct("guarded", script(calls(call("until_told")), answer("{{0.0}}")))
        every = [*runs.values(), lasting]
        for word, request in zip([*runs, "approve"], until_asked(chaz, every), strict=True):
            give(word, request)
        eventually(
            lambda: database.value("select count(*) from chaz.calls where tool = 'until_effect'") == 2, within=BOUND
        )
        eventually(lambda: database.value("select count(*) from effects") == 3, within=BOUND)

        first.kill()
        processes.worker(**SOON)

        for word, run in runs.items():
            assert run.get(timeout=BOUND) == WORDS[word].told
            assert came_to(database, run) == WORDS[word].came_to
        assert lasting.get(timeout=BOUND) == MAY_HAVE_RUN.content
        assert came_to(database, lasting) == CameTo("approve", ["approve"], ("unknown", None), 1)
    assert database.value("select count(*) from effects") == 3


def test_words_that_contradict_each_other_from_two_hosts(processes: Processes, database: ScratchDatabase) -> None:
    for _ in range(2):
        processes.listener(**SOON)
        processes.worker(**SOON)
    with Chaz(database.url) as chaz, database.connect() as one, database.connect() as other:
        wanted = script(calls(call("record_effect", name="once")), answer("{{results}}"))
        runs = [chaz.session(f"s{n}").direct("guarded", wanted) for n in range(RACES)]
        requests = until_asked(chaz, runs)
        for request in requests:
            for connection, word in ((one, "approve"), (other, "deny")):
                sent = connection.execute(
                    "select chaz.decide(%(id)s, %(word)s, 'ada', 'both') as id", {"id": request.id, "word": word}
                ).fetchone()
                assert sent is not None
                assert sent["id"] is not None, "it was taken though another one is under way"
        start = threading.Barrier(2)

        def commit(connection: Any) -> None:
            start.wait(BOUND)
            connection.commit()

        threads = [threading.Thread(target=commit, args=(connection,)) for connection in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND)

        told = [run.get(timeout=BOUND) for run in runs]
        for run, text in zip(runs, told, strict=True):
            expected = {
                "recorded once": CameTo("approve", ["approve"], ("ok", None), 1),
                "denied by ada: both": CameTo("deny", ["deny"], ("error", "denied"), 0),
            }
            assert came_to(database, run) == expected[text or ""]
        # Both are in the log, and of the one that came second it is said.
        notes = "select count(*) from chaz.entries where type = 'note' and metadata->>'reason' = 'no-effect'"
        eventually(lambda: database.value(notes) == RACES, within=BOUND)
    assert database.value("select count(*) from chaz.entries where type = 'approval_decision'") == 2 * RACES


@pytest.mark.parametrize("journal_is", ["kept", "tampered with"])
def test_a_model_that_would_ask_for_something_else_now(
    journal_is: str, processes: Processes, database: ScratchDatabase
) -> None:
    processes.environment["CHAZ_AGENTS"] = "tests.waverers"
    processes.listener(**SOON)
    first = processes.worker(**SOON)
    with Chaz(database.url) as chaz:
        run = chaz.session("s").direct("waverer", "Go on.")
        (request,) = until_asked(chaz, [run])
        first.kill()
        if journal_is == "tampered with":
            database.query(
                """
                update chaz.steps set turn = replace(turn::text, %(asked)s, 'something else')::json
                """,
                asked=json.loads(request.shown)["name"],
            )
        request.approve(by="ada")
        processes.worker(**SOON)
        told = run.get(timeout=BOUND) or ""
    if journal_is == "kept":
        assert request.shown in [f'{{"name": "{row["name"]}"}}' for row in database.query("select name from effects")]
        assert came_to(database, run) == WORDS["approve"].came_to
    else:
        assert "this is not the call that was approved; it was not made" in told
        assert came_to(database, run) == CameTo("approve", ["approve"], ("error", "denied"), 0)


def test_a_run_that_is_given_up_after_the_approved_call(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener(**SOON)
    isolation = processes.start("isolation", [sys.executable, "-m", "chaz", "worker", "--isolation"], **SOON)
    isolation.until_says("chaz worker ready")
    eventually(lambda: database.query("select 1 from chaz.workers where isolation and expires_at > now()"), within=30)
    first = processes.worker(**SOON)
    with Chaz(database.url) as chaz:
        session = chaz.session("guilty")
        wanted = script(calls(call("record_effect", name="approve")), calls(call("kill_again")), answer("never"))
        run = session.direct("guarded", wanted)
        (request,) = until_asked(chaz, [run])
        request.approve(by="ada")
        first.exit_code(within=BOUND)
        processes.worker(**SOON)

        with pytest.raises(RunFailed, match="crashes"):
            run.get(timeout=BOUND)
        assert session.direct("guarded", script(answer("usable"))).get(timeout=BOUND) == "usable"
        assert chaz.approvals() == []
    assert came_to(database, run) == WORDS["approve"].came_to
    assert database.value("select count(*) from effects") == 1
