"""PostgreSQL out of everybody's reach for several times the lease: runs go on when it is back, and nothing is lost.

``CHAZ_TEST_AWAY=60`` makes it a minute, with the default lease.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import pytest

from chaz import Chaz
from chaz.testing import eventually
from tests.fixtures.model import answer, call, calls, script, spawn
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes
from tests.fixtures.proxy import Proxy

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

AWAY = float(os.environ.get("CHAZ_TEST_AWAY", "8"))
SOON = {"lease": "2", "beat": "0.5", "sweep": "1"} if AWAY < 30 else {}
BOUND = 60.0 + AWAY


def wanted(name: str, seconds: float) -> str:
    return script(
        calls(call("record_effect", name=f"{name} before")),
        calls(call("slow", seconds=seconds)),
        calls(call("record_effect", name=f"{name} after")),
        answer(name),
    )


@pytest.mark.parametrize("fault", ["refuse", "freeze"])
def test_runs_survive_an_outage_longer_than_the_lease(
    processes: Processes, database: ScratchDatabase, proxy: Callable[..., Proxy], fault: str
) -> None:
    between = proxy(database.url)
    through = {**SOON, "database_url": between.url}
    kept = [processes.listener(**through), processes.audit(**through)]
    kept += [processes.worker(**through), processes.worker(**through)]
    with Chaz(database.url) as chaz:
        # Their calls end while it is away, and after.
        lasting = {"short": AWAY / 3, "middle": AWAY / 2, "long": min(AWAY * 1.3, 55.0)}
        results = [chaz.session(name).direct("solo", wanted(name, seconds)) for name, seconds in lasting.items()]
        family = script(
            calls(*(spawn("child", wanted(f"child {n}", AWAY / 2)) for n in range(2))), answer("{{results}}")
        )
        results.append(chaz.session("family").direct("parent", family))
        eventually(lambda: database.value("select count(*) from chaz.calls where tool = 'slow'") == 5, within=30)
        eventually(lambda: database.query("select 1 from chaz.runs where state = 'parked'"), within=30)

        getattr(between, fault)()
        ends = time.monotonic() + AWAY
        eventually(lambda: time.monotonic() > ends, within=AWAY + 5)
        # Sent while nobody can hear of it.
        results.append(chaz.session("new").direct("solo", wanted("new", 0)))
        between.admit()
        between.thaw()

        answers = [result.get(timeout=BOUND) for result in results]
    assert answers == ["short", "middle", "long", "child 0; child 1", "new"]
    names = [*lasting, "child 0", "child 1", "new"]
    assert database.query("select name, count(*) from effects group by name order by name") == [
        {"name": name, "count": 1}
        for name in sorted(f"{name} {when}" for name in names for when in ("before", "after"))
    ]
    assert database.query("select 1 from chaz.runs where state <> 'succeeded'") == []
    told = database.value("select sum(event_seq) from chaz.runs")
    eventually(lambda: database.value("select count(*) from chaz.entries where seq > 0") == told, within=BOUND)
    verified = processes.start("verify", [sys.executable, "-m", "chaz", "audit", "verify"])
    assert verified.exit_code() == 0, verified.said
    for process in kept:
        process.stop()
