"""A worker of which only the heartbeat cannot reach PostgreSQL: it may do nothing more that another might do too."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chaz import Chaz
from chaz.result import AgentResult
from chaz.testing import eventually
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Process, Processes
from tests.fixtures.proxy import Proxy

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

SOON = {"lease": "2", "beat": "0.5", "sweep": "1"}
BOUND = 60.0
REFUSED = ("no longer this worker's", "is over:", "cannot renew its lease")

both_faults = pytest.mark.parametrize("fault", ["refuse", "freeze"])


WANTED = script(
    calls(call("record_effect", name="before")),
    calls(call("until_effect", name="go")),
    calls(call("record_effect", name="after")),
    answer("through"),
)


def begun(database: ScratchDatabase, chaz: Chaz) -> AgentResult:
    """A run in the midst of a call, which ends at :func:`go`."""
    result = chaz.session("talk").direct("solo", WANTED)
    eventually(lambda: database.query("select 1 from chaz.calls where tool = 'until_effect'"), within=30)
    return result


def go(database: ScratchDatabase) -> None:
    """Let the call end."""
    database.query("insert into effects (name) values ('go')")


def pids(database: ScratchDatabase) -> dict[str, list[int]]:
    """By effect, the processes that had it."""
    rows = database.query("select name, array_agg(pid) as pids from effects where name <> 'go' group by name")
    return {row["name"]: row["pids"] for row in rows}


def serves_again(database: ScratchDatabase, chaz: Chaz, worker: Process) -> None:
    """The worker, now alone, has its lease back and runs what is new."""
    result = chaz.session("later").direct("solo", script(calls(call("record_effect", name="new")), answer("served")))
    assert result.get(timeout=BOUND) == "served"
    assert pids(database)["new"] == [worker.pid]
    worker.stop()


@both_faults
def test_another_worker_takes_over_and_the_first_is_refused(
    processes: Processes, database: ScratchDatabase, proxy: Callable[..., Proxy], fault: str
) -> None:
    between = proxy(database.url, only="chaz-beat")
    processes.listener(**SOON)
    first = processes.worker(database_url=between.url, **SOON)
    with Chaz(database.url) as chaz:
        result = begun(database, chaz)
        second = processes.worker(**SOON)

        getattr(between, fault)()
        assert result.get(timeout=BOUND) == "through"
        go(database)
        eventually(lambda: any(said in first.said for said in REFUSED), within=30)

        assert pids(database) == {"before": [first.pid], "after": [second.pid]}
        assert database.value("select count(*) from chaz.entries where type = 'message'") == 1
        assert database.query("select state, attempt from chaz.runs") == [{"state": "succeeded", "attempt": 2}]
        second.stop()
        between.admit()
        between.thaw()
        serves_again(database, chaz, first)


@both_faults
def test_it_starts_no_further_call_while_nobody_has_noticed(
    processes: Processes, database: ScratchDatabase, proxy: Callable[..., Proxy], fault: str
) -> None:
    between = proxy(database.url, only="chaz-beat")
    listener = processes.listener(**SOON)
    first = processes.worker(database_url=between.url, **SOON)
    with Chaz(database.url) as chaz:
        result = begun(database, chaz)
        # Without a listener nobody takes the run away: its row still says that it is the first worker's.
        listener.kill()

        getattr(between, fault)()
        eventually(lambda: database.value("select bool_and(expires_at < now()) from chaz.workers"), within=30)
        go(database)
        # Its result may still be written, by whom the row says; then it would be the next call's turn.
        ended = "select 1 from chaz.calls where tool = 'until_effect' and outcome = 'ok'"
        eventually(lambda: database.query(ended), within=30)
        second = processes.worker(**SOON)

        assert database.query("select state, attempt from chaz.runs") == [{"state": "running", "attempt": 1}]
        assert pids(database) == {"before": [first.pid]}
        processes.listener(**SOON)
        assert result.get(timeout=BOUND) == "through"
        assert pids(database) == {"before": [first.pid], "after": [second.pid]}
        second.stop()
        between.admit()
        between.thaw()
        serves_again(database, chaz, first)
