"""What a child may do, from model to model: the tools that are left to it, the tree's budget, and answers for later."""

from __future__ import annotations

import pytest

from bench.waiting import Slots, family
from chaz import Budget, Chaz, RunFailed
from chaz.testing import eventually
from tests.fixtures.broker import both_brokers
from tests.fixtures.model import answer, call, calls, script, spawn
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes

SEARCH = call("web__search", query="it")
COUNT = call("word_count", text="a b")
FAMILIES = 90


def test_a_child_has_no_tool_that_its_parents_had_not_left(processes: Processes, database: ScratchDatabase) -> None:
    processes.stack()
    deepest = script(calls(SEARCH, COUNT), answer("{{results}}"))
    # The one between has spawn_agent and agent_result too; it gives back all that it can, and nothing else.
    between = script(calls(spawn("child", deepest, tools=["*"]), COUNT), answer("{{results}}"))
    wanted = script(calls(spawn("parent", between, tools=["web.*", "spawn_agent"])), answer("{{results}}"))
    with Chaz(database.url) as chaz:
        result = chaz.session("family").direct("parent", wanted)
        assert result.get(timeout=60) == (
            "found it; not_allowed: you were spawned without the tool 'word_count'; your tools are: web__search; "
            "not_allowed: you were spawned without the tool 'word_count'; your tools are: web__search, spawn_agent"
        )
        # The audit trail has the tools' own names.
        eventually(
            lambda: (
                database.value(
                    "select count(*) from chaz.entries where type = 'tool_result' and metadata->>'tool' = 'web.search'"
                )
                == 1
            )
        )

        # Whoever else has it work in that session finds the same.
        (session,) = database.query("select session_id from chaz.runs where agent = 'child'")
        again = chaz.session(id=session["session_id"]).direct("child", deepest)
        assert "without the tool 'word_count'" in (again.get(timeout=60) or "")


def test_a_child_is_run_with_the_model_that_was_asked_for(processes: Processes, database: ScratchDatabase) -> None:
    processes.stack()
    wanted = calls(
        spawn("child", "Hi", model="scripted:other"),
        spawn("child", "Hi", model="scripted:dear"),
        spawn("child", "Hi", max_steps=999),
    )
    with Chaz(database.url) as chaz:
        result = chaz.session("family").direct("parent", script(wanted, answer("{{results}}")))
        assert result.get(timeout=60) == (
            "You said: Hi; not_allowed: 'child' is not run with the model 'scripted:dear'; "
            "it may be: scripted, scripted:other; not_allowed: max_steps is 999; 'child' takes 30 steps at most"
        )
        asked = "select turn->>'model' from chaz.steps s join chaz.runs r on r.id = s.run_id where r.agent = 'child'"
        assert database.value(asked) == "scripted:other"

        # An agent that was not known when it was spawned is held to its own limits when it runs.
        (row,) = database.query("update chaz.sessions set model = 'scripted:dear' where depth = 1 returning id")
        late = chaz.session(id=row["id"]).direct("child", "Hi")
        with pytest.raises(RunFailed, match="scripted:dear: 'child' may not be run with it"):
            late.get(timeout=60)


@both_brokers
def test_answers_may_be_fetched_later(processes: Processes, database: ScratchDatabase) -> None:
    processes.stack()
    slow = script(calls(call("slow", seconds=2)), answer("slow"))
    wanted = script(
        calls(spawn("child", slow, wait=False), spawn("child", "quick", wait=False)),
        calls(COUNT),
        calls(
            call("agent_result", id="{{0.0}}"), call("agent_result", id="{{0.1}}"), call("agent_result", id="{{0.0}}")
        ),
        answer("{{results}}"),
    )
    with Chaz(database.url) as chaz:
        result = chaz.session("family").direct("parent", wanted)
        assert result.get(timeout=60) == "slow; You said: quick; slow"
    assert database.value("select attempt from chaz.runs where id = %(id)s", id=result.id) == 2


def test_a_budget_is_the_whole_tree_s(processes: Processes, database: ScratchDatabase) -> None:
    processes.stack()
    busy = script(*[calls(COUNT)] * 9, answer("done"))
    wanted = script(calls(spawn("child", busy)), answer("{{results}}"))
    with Chaz(database.url) as chaz:
        enough = chaz.session("rich").direct("parent", wanted, budget=Budget(steps=12))
        steps = chaz.session("poor").direct("parent", wanted, budget=Budget(steps=5))
        tokens = chaz.session("terse").direct("parent", wanted, budget=Budget(tokens=300))
        alone = chaz.session("alone").direct("parent", wanted, budget=Budget(steps=2))

        assert enough.get(timeout=60) == "done"
        # The child's last step is the tree's: it answers with what it has, and nothing is left for its parent.
        for result in (steps, tokens):
            with pytest.raises(RunFailed, match="budget"):
                result.get(timeout=60)
        # One that could spawn, but then not answer, is told so, and answers.
        assert "over_budget: one step is left" in (alone.get(timeout=60) or "")
    used = {row["max_steps"] or row["max_tokens"]: row for row in database.query("select * from chaz.tree_budgets")}
    assert {limit: row["steps"] for limit, row in used.items() if limit != 300} == {12: 12, 5: 5, 2: 2}
    assert used[300]["tokens"] >= 300
    assert {row["reserved_steps"] for row in used.values()} == {0}
    counted = "select count(*) from chaz.steps s join chaz.runs r on r.id = s.run_id where r.root_run_id = %(id)s"
    assert database.value(counted, id=steps.id) == 5


def test_two_slots_serve_any_number_of_waiting_parents(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener()
    processes.audit()
    processes.worker("--concurrency", "2")
    with Chaz(database.url) as chaz, Slots(processes.environment, database.url) as slots:
        results = [chaz.session(f"family {n}").direct("parent", family(n)) for n in range(FAMILIES)]
        while not all(result.ready() for result in results):
            slots.look()
        assert [result.get(timeout=1) for result in results] == [f"{n}, over, over" for n in range(FAMILIES)]
    assert slots.looks > 3
    assert slots.most_active <= 2
    assert slots.most_parked > 2
    assert slots.held == []
