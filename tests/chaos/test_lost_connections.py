"""Connections to PostgreSQL that are cut in mid-run, again and again."""

from __future__ import annotations

import pytest

from chaz import Chaz
from chaz.testing import eventually
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase, both_servers
from tests.fixtures.processes import Processes

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

STEPS = 25


@both_servers
def test_no_turn_and_no_result_is_lost_with_a_connection(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener(sweep="1")
    processes.audit()
    processes.worker(beat="0.5")
    wanted = script(*(calls(call("record_effect", name=f"step {n}")) for n in range(STEPS)), answer("through"))
    with Chaz(database.url) as chaz:
        result = chaz.session("talk").direct("solo", wanted)
        for n in range(0, STEPS, 2):
            eventually(
                lambda n=n: database.value("select coalesce(max(steps), 0) from chaz.runs") > n or result.ready(),
                within=30,
            )
            database.query(
                """
                select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()
                    and application_name in ('chaz-worker', 'chaz-listener', 'chaz-listen', 'chaz-beat', 'chaz-audit')
                """
            )

        assert result.get(timeout=60) == "through"
    assert database.query("select name, count(*) from effects group by 1 having count(*) <> 1") == []
    assert database.value("select count(distinct name) from effects") == STEPS
    assert database.query("select outcome from chaz.calls where outcome <> 'ok'") == []
    (run,) = database.query("select event_seq from chaz.runs")
    assert run["event_seq"] == 2 * STEPS

    def recorded() -> list[int]:
        return [row["seq"] for row in database.query("select seq from chaz.entries where seq > 0 order by seq")]

    def all_are_recorded() -> None:
        assert recorded() == list(range(1, 2 * STEPS + 1))

    eventually(lambda: all_are_recorded() or True, within=30)
