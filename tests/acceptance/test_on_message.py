"""The policies for messages to a busy session, with real listeners and workers, two of each."""

from __future__ import annotations

import random
import threading
from uuid import UUID

import pytest

from chaz import AgentResult, Chaz, RunCancelled, RunFailed
from chaz.testing import eventually
from tests.fixtures.model import answer, call, calls, script, spawn
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Process, Processes
from tests.fixtures.races import answered_once

pytestmark = pytest.mark.timeout(180)

POLICIES = ["coalesce", "each", "reject", "interrupt", "steer"]
SOON = {"beat": "0.5"}
BOUND = 60.0


@pytest.fixture
def workers(processes: Processes) -> list[Process]:
    """Two hosts."""
    processes.listener(**SOON)
    processes.listener(**SOON)
    processes.audit()
    return [processes.worker(**SOON), processes.worker(**SOON)]


def test_what_each_policy_does(workers: list[Process], database: ScratchDatabase) -> None:
    with Chaz(database.url) as chaz:
        at_work: dict[str, AgentResult] = {}
        for policy in POLICIES:
            session = chaz.session(policy)
            session.configure(on_message=policy)  # pyright: ignore[reportArgumentType]
            at_work[policy] = session.direct(
                "solo", script(calls(call("until_effect", name=policy)), answer(f"{policy}: done"))
            )
        eventually(
            lambda: database.value("select count(*) from chaz.calls where tool = 'until_effect'") == len(POLICIES),
            within=BOUND,
        )

        # One and then, placed, another.
        later: dict[str, list[AgentResult]] = {policy: [] for policy in POLICIES}
        for text in ("one", "two"):
            for policy in POLICIES:
                later[policy].append(chaz.session(policy).say(script(answer(f"{policy}: {text}"), text="Hi.")))
            eventually(lambda: database.value("select count(*) from chaz.entries where position is null") == 0)

        with pytest.raises(RunCancelled, match=r"interrupted.*calls made: until_effect"):
            at_work["interrupt"].get(timeout=BOUND)
        for refused in later["reject"]:
            with pytest.raises(RunFailed, match="busy"):
                refused.get(timeout=BOUND)
        # It was interrupted though nobody lets its tool go on, and the worker has noticed.
        assert later["interrupt"][1].get(timeout=BOUND) == "interrupt: two"
        eventually(lambda: any("was ended from outside" in worker.said for worker in workers), within=BOUND)

        database.query("insert into effects (name) select unnest(%(names)s::text[])", names=POLICIES)
        answers = {
            policy: [result.get(timeout=BOUND, propagate=False) for result in (at_work[policy], *later[policy])]
            for policy in POLICIES
        }
    assert answers["coalesce"] == ["coalesce: done", "coalesce: two", "coalesce: two"]
    assert answers["each"] == ["each: done", "each: one", "each: two"]
    assert answers["reject"][0] == "reject: done"
    assert answers["steer"] == ["steer: two"] * 3
    noted = database.query("select metadata->>'reason' as reason from chaz.entries where type = 'note'")
    assert {row["reason"] for row in noted} == {"coalesced", "interrupted", "steered"}


def test_a_replay_on_another_host_hears_a_message_where_the_first_did(
    processes: Processes, database: ScratchDatabase
) -> None:
    settings = {"lease": "2", "beat": "0.5", "sweep": "1"}
    processes.listener(**settings)
    first = processes.worker(**settings)
    calls_made = "select count(*) from chaz.calls where tool = 'until_effect'"
    with Chaz(database.url) as chaz:
        session = chaz.session("steered")
        session.configure(on_message="steer")
        result = session.direct("solo", script(calls(call("until_effect", name="one")), answer("unheard")))
        eventually(lambda: database.value(calls_made) == 1, within=BOUND)
        # What it hears tells it to make a second call; had the replay put it after that, it would make a third.
        said = session.say(script(calls(call("until_effect", name="two")), answer("heard"), text="Hi."))
        eventually(lambda: said.state == "pending", within=BOUND)
        database.query("insert into effects (name) values ('one')")
        eventually(lambda: database.value(calls_made) == 2, within=BOUND)
        first.kill()
        processes.worker(**settings)
        assert [result.get(timeout=BOUND), said.get(timeout=BOUND)] == ["heard", "heard"]
    assert database.value(calls_made) == 2
    assert database.query("select attempt, steps from chaz.runs where state = 'succeeded'") == [
        {"attempt": 2, "steps": 3}
    ]


def test_a_childs_answer_and_messages_arrive_together(workers: list[Process], database: ScratchDatabase) -> None:
    order = random.Random(0)
    sent: list[UUID] = []
    with Chaz(database.url) as chaz:
        for number in range(4):
            for policy in POLICIES:
                session = chaz.session(f"{policy} {number}")
                session.configure(on_message=policy)  # pyright: ignore[reportArgumentType]
                child = script(calls(call("slow", seconds=order.uniform(0.5, 1.5))), answer("the child's"))
                session.direct("parent", script(calls(spawn("child", child)), answer("{{results}}")))

        def host(sender: str) -> None:
            pauses = random.Random(sender)
            sessions = [f"{policy} {number}" for number in range(4) for policy in POLICIES]
            pauses.shuffle(sessions)
            for name in sessions:
                threading.Event().wait(pauses.uniform(0, 0.15))
                sent.append(chaz.session(name).say(script(answer(f"to {sender}"), text="Hi."), sender=sender).id)

        hosts = [threading.Thread(target=host, args=[sender]) for sender in ("ada", "bob")]
        for each in hosts:
            each.start()
        for each in hosts:
            each.join()
        for id in sent:
            chaz.result(id).wait(timeout=BOUND)
        eventually(
            lambda: (
                database.value(
                    "select count(*) from chaz.runs where state in ('pending', 'queued', 'running', 'parked')"
                )
                == 0
            ),
            within=BOUND,
        )
    answered_once(database, sent)
