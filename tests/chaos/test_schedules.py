"""Three listeners over the same due schedules, of which one is killed in the middle: each slot has one run."""

from __future__ import annotations

import pytest

from chaz.firing import run_id_of
from chaz.testing import eventually
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

SCHEDULES = 200


def test_each_slot_of_the_same_second_has_one_run(processes: Processes, database: ScratchDatabase) -> None:
    database.query(
        "insert into chaz.agents (name, queue, version, max_steps, timeout) values ('solo', 'solo', '1', 9, '1 h')"
    )
    listeners = [processes.listener() for _ in range(3)]
    # Held back at each firing, so that the kill comes in the middle of one.
    database.query(
        """
        create function hold() returns trigger language plpgsql as $$
        begin perform pg_sleep(0.02); return new; end $$;
        create trigger hold before insert on chaz.runs for each row execute function hold();
        """
    )
    database.query(
        """
        insert into chaz.schedules (key, agent, id, prompt, every, anchor, next_slot, next_at, created_by, changed_by)
        select chaz.derived_id('schedule', '', 'solo/s' || n), 'solo', 's' || n, 'Wake up.', '1 hour',
            now() - interval '1 hour', now(), now(), 'ada', 'ada'
        from generate_series(1, %(count)s) n
        """,
        count=SCHEDULES,
    )

    def fired() -> int:
        return database.value("select count(*) from chaz.firings")

    eventually(lambda: fired() > 20, within=60)
    killed = fired()
    listeners[0].kill()
    assert killed < SCHEDULES
    eventually(lambda: fired() == SCHEDULES, within=90)
    eventually(lambda: not database.value("select count(*) from chaz.schedules where next_at <= now()"), within=30)

    firings = database.query("select schedule, slot, run_id, skipped from chaz.firings")
    assert {row["skipped"] for row in firings} == {None}
    assert all(row["run_id"] == run_id_of(row["schedule"], row["slot"]) for row in firings)
    runs = database.query("select id, session_id, state from chaz.runs")
    assert {row["id"] for row in runs} == {row["run_id"] for row in firings}
    assert len(runs) == len({row["session_id"] for row in runs}) == SCHEDULES
    assert database.query("select fire_count, count(*) from chaz.schedules group by 1") == [
        {"fire_count": 1, "count": SCHEDULES}
    ]
