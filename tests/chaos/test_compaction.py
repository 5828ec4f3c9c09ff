"""A worker that is killed while a summary is being written: another writes it, and once."""

from __future__ import annotations

import pytest

from chaz import Chaz
from chaz.testing import eventually
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

SOON = {"lease": "2", "beat": "0.5", "sweep": "1", "agents": "tests.clerks"}
BOUND = 60.0


def test_a_killed_compaction_is_finished_once(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener(**SOON)
    first = processes.worker(**SOON)
    with Chaz(database.url) as chaz:
        session = chaz.session("long")
        for text in ("one", "two"):
            assert session.direct("clerk", text).get(timeout=BOUND) == "noted"
        summary = session.compact()
        eventually(lambda: database.query("select 1 from effects where name = 'asked'"), within=BOUND)

        first.kill()
        later = session.say("three")
        processes.worker(**SOON)
        eventually(lambda: len(database.query("select 1 from effects where name = 'asked'")) == 2, within=BOUND)
        assert not database.query("select 1 from chaz.entries where type = 'summary'")
        database.query("insert into effects (name) values ('go')")

        assert summary.get(timeout=BOUND) == "all was noted"
        assert later.get(timeout=BOUND) == "noted"
    (entry,) = database.query("select metadata from chaz.entries where type = 'summary'")
    assert entry["metadata"]["entries"] == 4
    (run,) = database.query("select id, attempt, steps from chaz.runs where cause = 'compaction'")
    assert (run["attempt"], run["steps"]) == (2, 1)
    booked = database.query("select prompt_tokens from chaz.model_calls where run_id = %(run)s", run=run["id"])
    assert booked == [{"prompt_tokens": 20}]
