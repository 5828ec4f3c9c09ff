"""A transaction that holds rows of chaz for long: what does not need them goes on, and then what does."""

from __future__ import annotations

from typing import LiteralString

import psycopg
import pytest

from chaz import Chaz
from chaz.testing import eventually
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

SOON = {"lease": "2", "beat": "0.5", "sweep": "1"}
BOUND = 60.0
BEATS = 16
"""How often each worker renews its lease meanwhile: four leases long."""

ROWS: dict[str, LiteralString] = {
    "a run": "select from chaz.runs where agent = 'child' for update",
    "a session": "select from chaz.sessions s join chaz.runs r on r.session_id = s.id where r.agent = 'child' "
    "for update of s",
    "a head": "select from chaz.heads h join chaz.runs r using (session_id) where r.agent = 'child' for update of h",
    # An entry, and with it its place in the order of arrival, that is not committed yet.
    "the log's end": "select chaz.send(s, 'directive', 'ada', E'```script\n[{\"text\": \"late\"}]\n```', "
    "recipient => 'child') from unnest(array['held', 'other']) as s",
    "the doorbell": "select from chaz.doorbell for update",
}


def wanted(seconds: float) -> str:
    return script(
        calls(call("record_effect", name="before")),
        calls(call("slow", seconds=seconds)),
        calls(call("record_effect", name="after")),
        answer("through"),
    )


class Beats:
    """Counts the renewals of each worker's lease that it sees."""

    def __init__(self, database: ScratchDatabase) -> None:
        self._database = database
        self._seen: dict[str, set[object]] = {}

    def enough(self) -> bool:
        for row in self._database.query("select id, beat_at from chaz.workers"):
            self._seen.setdefault(str(row["id"]), set()).add(row["beat_at"])
        return len(self._seen) == 2 and all(len(times) > BEATS for times in self._seen.values())


@pytest.mark.parametrize("row", ROWS)
def test_a_row_that_is_held_costs_nobody_his_lease(processes: Processes, database: ScratchDatabase, row: str) -> None:
    listener = processes.listener(**SOON)
    workers = [processes.worker(**SOON), processes.worker(**SOON)]
    with Chaz(database.url) as chaz, psycopg.connect(database.url) as holder:
        held = chaz.session("held").direct("child", wanted(1))
        running = [chaz.session(f"running {n}").direct("solo", wanted(3)) for n in range(4)]
        eventually(lambda: database.value("select count(*) from chaz.calls where tool = 'slow'") == 5, within=30)

        holder.execute(ROWS[row])
        beats = Beats(database)
        # For the session that is held, and first in the way of the others.
        behind = chaz.session("held").direct("solo", script(answer("behind")))
        later = [chaz.session(f"later {n}").direct("solo", wanted(0.1)) for n in range(4)]
        assert [result.get(timeout=BOUND) for result in running + later] == ["through"] * 8
        eventually(beats.enough, within=BOUND)
        # The longest hold yet stops no new run either.
        assert chaz.session("last").direct("solo", wanted(0)).get(timeout=BOUND) == "through"
        if row in ("a run", "a head"):
            assert held.state == "running"
        holder.commit()

        assert held.get(timeout=BOUND) == "through"
        assert behind.get(timeout=BOUND) == "behind"
    # What the holder sent has come last, and is perhaps not placed yet.
    eventually(
        lambda: (
            not database.query(
                "select 1 from chaz.entries where position is null union all "
                "select 1 from chaz.runs where state <> 'succeeded'"
            )
        ),
        within=BOUND,
    )
    assert database.query("select attempt, crashes from chaz.runs where attempt <> 1 or crashes <> 0") == []
    assert database.query("select name, count(*) from effects group by name order by name") == [
        {"name": "after", "count": 10},
        {"name": "before", "count": 10},
    ]
    assert database.query("select distinct outcome from chaz.calls") == [{"outcome": "ok"}]
    assert "was lost" not in listener.said
    for worker in workers:
        worker.stop()
