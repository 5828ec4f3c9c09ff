"""What is held back, with real processes: by a pause, by an agent's cap, by the turns of tenants."""

from __future__ import annotations

import subprocess
import sys

import pytest

from chaz import Chaz
from chaz.testing import eventually
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes

pytestmark = pytest.mark.timeout(180)

BOUND = 60.0


def command(processes: Processes, *arguments: str) -> str:
    """What the command line says."""
    done = subprocess.run(
        [sys.executable, "-m", "chaz", *arguments],
        env=processes.environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.strip()


def test_what_is_paused_waits_and_what_runs_goes_on(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener()
    processes.worker()
    with Chaz(database.url) as chaz:
        at_work = chaz.session("at work").direct("solo", script(calls(call("until_effect", name="go")), answer("done")))
        eventually(lambda: at_work.state == "running", within=BOUND)
        assert command(processes, "paused") == "nothing is paused"
        assert command(processes, "pause", "agent:solo", "--reason", "too dear") == "agent:solo is paused"
        held = chaz.session("held").direct("solo", script(answer("late")))
        other = chaz.session("other").direct("child", script(answer("as ever")))
        assert other.get(timeout=BOUND) == "as ever"
        database.query("insert into effects (name) values ('go')")
        assert at_work.get(timeout=BOUND) == "done"
        assert held.state == "queued"
        assert "too dear" in command(processes, "pause", "--list")

        assert command(processes, "resume", "agent:solo") == "agent:solo goes on"
        assert held.get(timeout=BOUND) == "late"


def test_a_cap_holds_over_all_workers(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener()
    processes.listener()
    processes.worker()
    processes.worker()
    with Chaz(database.url) as chaz:
        wanted = script(calls(call("slow", seconds=0.2)), answer("done"))
        handles = [chaz.session(f"s{n}").direct("capped", wanted) for n in range(12)]
        assert [handle.get(timeout=BOUND) for handle in handles] == ["done"] * 12
    at_once = database.value(
        """
        select max(n) from (
            select count(*) as n from chaz.calls a join chaz.calls b
                on b.started_at <= a.started_at and a.started_at < b.ended_at
            group by a.run_id) counted
        """
    )
    assert at_once == 2


def registered(database: ScratchDatabase, agent: str) -> None:
    """As by a version of the agent without a cap, whose workers are gone."""
    database.query(
        """
        insert into chaz.agents (name, queue, version, max_steps, timeout)
        values (%(name)s, %(name)s, 'v1', 30, '1 hour')
        """,
        name=agent,
    )


def test_what_comes_beyond_the_cap_starts_as_soon_as_there_is_room(
    processes: Processes, database: ScratchDatabase
) -> None:
    registered(database, "capped")
    # No look at the clock finds anything while this test lasts: what starts was rung for.
    processes.listener(sweep="600", long_poll="600")
    with Chaz(database.url) as chaz:
        wanted = script(calls(call("until_effect", name="go")), answer("done"))
        handles = [chaz.session(f"s{n}").direct("capped", wanted) for n in range(5)]
        announced = "select count(*) from chaz.runs where state = 'queued' and publishes = 1"
        eventually(lambda: database.value(announced) == 5, within=BOUND)
        worker = processes.worker("-c", "8", long_poll="600", sweep="600")
        worker.until_says("held its agent is at its cap", times=3)
        assert sorted(handle.state for handle in handles) == ["queued"] * 3 + ["running"] * 2
        database.query("insert into effects (name) values ('go')")
        assert [handle.get(timeout=BOUND) for handle in handles] == ["done"] * 5


def test_a_delivery_that_comes_too_soon_is_not_taken_for_a_lost_one(
    processes: Processes, database: ScratchDatabase
) -> None:
    registered(database, "solo")
    # A delivery that is taken for lost comes again after a sweep.
    processes.listener(sweep="600")
    with Chaz(database.url) as chaz:
        run = chaz.session("s").direct("solo", script(answer("alone")))
        eventually(lambda: database.value("select count(*) from chaz.runs where publishes = 1") == 1, within=BOUND)
        # It stands in its agent's queue, and is then to run where there is an isolation worker.
        database.query("update chaz.runs set suspect = true")
        isolation = processes.start("isolation", [sys.executable, "-m", "chaz", "worker", "--isolation"])
        isolation.until_says("chaz worker ready")
        eventually(
            lambda: database.value("select count(*) from chaz.workers where isolation and expires_at > now()") == 1,
            within=BOUND,
        )
        worker = processes.worker(beat="1")
        worker.until_says("not yet it is to run alone")
        assert run.get(timeout=BOUND) == "alone"


def test_a_tenant_with_little_does_not_wait_for_one_with_much(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener()
    processes.worker("-c", "4")
    send = """
        select count(chaz.send(
            %(tenant)s || n, 'directive', 'ada', %(text)s, recipient => 'solo', tenant => %(tenant)s))
        from generate_series(1, %(runs)s) n
    """
    database.query(send, tenant="much", text=script(answer("done")), runs=1000)
    eventually(lambda: database.value("select count(*) from chaz.runs where state = 'succeeded'") > 20, within=BOUND)
    database.query(send, tenant="little", text=script(answer("done")), runs=10)
    eventually(
        lambda: database.value("select count(*) from chaz.runs where state = 'succeeded' and tenant = 'little'") == 10,
        within=BOUND,
    )
    left = database.value(
        """
        select count(*) from chaz.runs where tenant = 'much' and (ended_at is null or ended_at > (
            select max(ended_at) from chaz.runs where tenant = 'little'))
        """
    )
    # In the order of arrival it would be a handful.
    assert left > 500
