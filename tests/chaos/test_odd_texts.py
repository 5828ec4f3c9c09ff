"""Texts from outside that may hold anything: stored safe, cut with a mark where cut, and the run ends."""

from __future__ import annotations

import pytest

from chaz import Chaz
from chaz.audit import trail
from chaz.outcomes import MAX_RESULT
from chaz.testing import eventually
from tests.agents import ODD
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase, both_servers
from tests.fixtures.processes import Processes

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]


@both_servers
def test_whatever_a_tool_gives_back_the_run_ends(processes: Processes, database: ScratchDatabase) -> None:
    processes.stack()
    with Chaz(database.url) as chaz:
        wanted = script(calls(*(call("odd", kind=kind) for kind in ODD)), answer("through {{0.4}}"))
        result = chaz.session("talk").direct("solo", wanted)

        assert result.get(timeout=60) == "through " + "\N{GRINNING FACE}" * 2000
        results = {
            row["ordinal"]: row["result"] for row in database.query("select ordinal, result from chaz.calls order by 1")
        }
        assert results[0] == "a\N{REPLACEMENT CHARACTER}b"
        assert results[1] == "a\N{REPLACEMENT CHARACTER}b"
        assert len(results[2]) == MAX_RESULT
        assert results[2].endswith(f"… [cut: 20000000 characters, {MAX_RESULT} kept]")
        assert "returned, not raised" in results[3]
        eventually(lambda: database.value("select count(*) from chaz.entries where seq > 0") == 10, within=30)
        assert chaz.loop.run(trail.verify(chaz.inner.database)).proven


def test_a_long_message_is_answered(processes: Processes, database: ScratchDatabase) -> None:
    processes.stack()
    with Chaz(database.url) as chaz:
        text = "y" * 1_000_000
        assert (
            chaz.session("talk").say(text, recipient="solo", sender="ada").get(timeout=60) == f"You said: ada: {text}"
        )
