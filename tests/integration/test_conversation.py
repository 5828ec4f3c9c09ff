"""A conversation with a session, without a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import pytest

from chaz import AsyncChaz
from chaz.cli.conversation import Conversation, look_again
from chaz.testing import eventually_async
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.proxy import Proxy
from tests.fixtures.stations import Stations

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def open_in(chaz: AsyncChaz, shown: list[str]) -> AsyncGenerator[Conversation]:
    """A conversation in the session ``s`` that follows it, and appends what it shows."""
    conversation = Conversation(chaz, chaz.session("s"), sender="ada", show=shown.append, colour=False)
    await conversation.open(history=20)
    tasks = [asyncio.create_task(conversation.follow()), asyncio.create_task(look_again(conversation, 0.01))]
    try:
        yield conversation
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_it_goes_on_when_the_database_is_back(
    stations: Stations, database: ScratchDatabase, proxy: Callable[..., Proxy]
) -> None:
    way = proxy(database.url)
    shown: list[str] = []

    async def says(text: str) -> None:
        await stations.say("s", text, sender="bob")
        await stations.place()

    async def has_shown(text: str) -> bool:
        return f"bob: {text}" in shown

    async with AsyncChaz(way.url) as chaz, open_in(chaz, shown) as conversation:

        async def is_up(what: str) -> bool:
            return what in conversation.status()[0]

        await says("before")
        await eventually_async(lambda: has_shown("before"))
        way.refuse()
        way.cut()
        await says("meanwhile")
        await eventually_async(lambda: is_up("not available"), within=30)
        way.admit()
        await eventually_async(lambda: has_shown("meanwhile"), within=30)
        await eventually_async(lambda: is_up("idle"), within=30)
        await says("after")
        await eventually_async(lambda: has_shown("after"))
    assert [line for line in shown if line.startswith("bob: ")] == ["bob: before", "bob: meanwhile", "bob: after"]


async def test_a_compaction_is_what_was_sent_last(database: ScratchDatabase) -> None:
    async with AsyncChaz(database.url) as chaz, open_in(chaz, []) as conversation:
        await conversation.enter("/compact")
        # From a pipe, its answer is waited for.
        assert conversation.last is not None
        entry = await anext(chaz.session("s").entries())
        assert (entry.id, entry.type) == (conversation.last.id, "compaction_request")


async def test_no_other_request_is_allowed_than_the_one_that_is_named(
    stations: Stations, database: ScratchDatabase
) -> None:
    _, (first, second) = await stations.asking("s", calls=2)
    shown: list[str] = []

    async def decided() -> list[str]:
        rows = await stations.fetch(
            "select metadata->>'request' as request from chaz.entries where type = 'approval_decision' order by arrival"
        )
        return [row["request"] for row in rows]

    async with AsyncChaz(database.url) as chaz, open_in(chaz, shown) as conversation:
        await conversation.look()
        stranger = next(f"{digit * 4}" for digit in "0123456789abcdef" if digit not in {str(first)[0], str(second)[0]})
        for word in (stranger, str(first)[:3] + "x", "please"):
            await conversation.enter(f"/approve {word}")
            assert f"no request here begins with {word!r}; /approvals lists them" in shown[-1]
        assert await decided() == []
        await conversation.enter(f"/approve {str(second).upper()}")
        await conversation.enter("/deny too risky")
        assert await decided() == [str(second), str(first)]


async def test_a_word_is_for_what_was_asked_when_it_was_begun(stations: Stations, database: ScratchDatabase) -> None:
    async with AsyncChaz(database.url) as chaz, open_in(chaz, []) as conversation:
        assert conversation.question(typing=False) == "> "
        _, (first, second) = await stations.asking("s", calls=2)
        await conversation.look()
        # It came up while a message was being typed.
        assert conversation.question(typing=True) == "> "
        await conversation.enter("no problem")
        assert [entry.content async for entry in chaz.session("s").entries() if entry.type == "message"] == [
            "no problem"
        ]
        assert conversation.question(typing=False).startswith("allow delete_file?")
        # Meanwhile it is decided elsewhere; what is asked next has not been seen.
        assert await stations.decide(first, "approve")
        await conversation.look()
        assert [asked.id for asked in conversation.asked] == [second]
        assert conversation.question(typing=True).startswith("allow delete_file?")
        await conversation.enter("y")
        await stations.place()
        assert await stations.fetch("select decision from chaz.approvals where id = %(id)s", id=second) == [
            {"decision": None}
        ]
