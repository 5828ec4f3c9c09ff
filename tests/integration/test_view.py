"""What a run sees of its session: all that it answers, however much was said since."""

from __future__ import annotations

from functools import partial

import pytest

from chaz import sessionlog
from chaz.runs import Claim
from tests.fixtures.stations import Stations

pytestmark = pytest.mark.anyio


async def view(stations: Stations, claim: Claim, limit: int = 500) -> tuple[list[str], list[str]]:
    """Texts of the conversation so far, and of what the run answers."""
    conversation, triggers = await stations.transact(
        partial(
            sessionlog.context_entries,
            session_id=claim.session_id,
            run_id=claim.run_id,
            read_to=claim.read_to,
            limit=limit,
        )
    )
    return [entry.content for entry in conversation], [entry.content for entry in triggers]


async def test_the_newest_of_the_conversation_comes_before_what_is_answered(stations: Stations) -> None:
    for n in range(4):
        await stations.end(await stations.claimed("s", f"question {n}"), text=f"answer {n}")
    claim = await stations.claimed("s", "now")

    assert await view(stations, claim, limit=3) == (["answer 2", "question 3", "answer 3"], ["now"])


async def test_its_own_trigger_is_never_the_one_that_is_cut(stations: Stations) -> None:
    busy = await stations.claimed("s", "first")
    own = await stations.send("s", "the instruction", priority=-5)
    others = [await stations.send("s", f"later {n}") for n in range(5)]
    await stations.place()
    await stations.end(busy)
    for other in others:
        await stations.end(await stations.claim(other))
    claim = await stations.claim(own)

    _, triggers = await view(stations, claim, limit=2)

    assert triggers == ["the instruction"]


async def test_all_coalesced_messages_are_shown(stations: Stations) -> None:
    await stations.end(await stations.claimed("s", "hello"))
    busy = await stations.claimed("s", "busy")
    messages = [await stations.say("s", f"message {n}") for n in range(8)]
    await stations.place()
    await stations.end(busy)
    claim = await stations.claim(messages[0])

    conversation, triggers = await view(stations, claim, limit=2)

    assert triggers == [f"message {n}" for n in range(8)]
    assert len(conversation) == 2


async def test_what_waits_for_another_run_is_out_of_view(stations: Stations) -> None:
    claim = await stations.claimed("s", "mine")
    await stations.send("s", "somebody else's")
    await stations.place()

    assert await view(stations, claim) == ([], ["mine"])
