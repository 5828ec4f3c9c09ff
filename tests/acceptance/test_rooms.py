"""Rooms on the real path: agents that hand over to each other by a mention, and are stopped."""

from __future__ import annotations

from typing import Any

import pytest

from chaz import Chaz
from chaz.testing import StubServer, eventually
from tests.fixtures.model import answer, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes

pytestmark = pytest.mark.timeout(120)

BURST = 4


def system_of(request: dict[str, Any]) -> str:
    return next(message["content"] for message in request["messages"] if message["role"] == "system")


def test_agents_talk_in_a_room(processes: Processes, database: ScratchDatabase) -> None:
    with StubServer() as stub, Chaz(database.url) as chaz:
        processes.environment |= {
            "CHAZ_AGENTS": "tests.roommates",
            "OPENAI_BASE_URL": stub.base_url,
            "OPENAI_API_KEY": "sk-of-the-stub",
        }
        processes.listener()
        processes.worker(burst=str(BURST))

        def lines(session: str) -> list[tuple[str, str]]:
            """Who said what, the scripts left out."""
            return [
                (entry.sender, entry.content.partition("\n")[0])
                for entry in chaz.session(session).entries()
                if entry.type in ("message", "note", "error")
            ]

        def until_quiet(runs: int) -> None:
            """Wait until so many runs have ended, and none is left."""
            ended = "select count(*) from chaz.runs where ended_at is not null"
            eventually(lambda: database.value(ended) >= runs, within=60)
            assert database.value("select count(*) from chaz.runs where ended_at is null") == 0

        # A conversation across three, each told by the one before what to say.
        den = chaz.session("den")
        for agent in ("alpha", "beta", "gamma"):
            den.attach(agent)
        last = script(answer("It is 42."), text="What is it, @gamma?")
        then = script(answer(last), text="@beta, ask gamma.")
        first = den.say(script(answer(then), text="Hello."), sender="ada")
        assert (first.get(timeout=60) or "").startswith("@beta, ask gamma.")
        until_quiet(3)
        assert lines("den") == [
            ("ada", "Hello."),
            ("alpha", "@beta, ask gamma."),
            ("beta", "What is it, @gamma?"),
            ("gamma", "It is 42."),
        ]
        assert len(stub.requests) == 3
        assert "other agents: beta, gamma. You lead" in system_of(stub.requests[0])
        assert "other agents: alpha, gamma. alpha leads" in system_of(stub.requests[1])

        # Five that never stop by themselves.
        circle = ("alpha", "beta", "gamma", "delta", "epsilon")
        for agent in circle:
            chaz.session("circle").attach(agent)
        chaz.session("circle").say("Begin.")
        until_quiet(3 + BURST + 1)
        # Nothing is on its way any more: the last of them woke nobody, and says so.
        assert [sender for sender, _ in lines("circle")[1:]] == [*circle, "chaz"]
        assert "'alpha' was not woken, though 'epsilon' mentions it" in lines("circle")[-1][1]
        chaz.session("circle").say("Again.")
        until_quiet(3 + 2 * (BURST + 1))
        assert len(stub.requests) == 3 + 2 * (BURST + 1)
        # The same to the byte, so that the provider finds it in its cache.
        asked = [system_of(request) for request in stub.requests[3:]]
        assert asked[: BURST + 1] == asked[BURST + 1 :]
        assert len(set(asked)) == len(circle)
        # Who is alone is told of nobody.
        chaz.session("alone").direct("delta", "Hello.").get(timeout=60)
        assert "other agents" not in system_of(stub.requests[-1])
