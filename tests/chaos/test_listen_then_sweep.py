"""A listener that was cut off LISTENs, then looks, then waits: in whatever moment something comes, it is found.

No long poll and no sweep comes within the test, so that it is found by the bell or by the look after the LISTEN.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from chaz.testing import eventually_async
from tests.fixtures.listeners import A_MINUTE, Listeners, Watched
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.races import RACES, unruly
from tests.fixtures.stations import Stations

pytestmark = [pytest.mark.anyio, pytest.mark.chaos, pytest.mark.timeout(120)]


async def nothing() -> None:
    """At this moment nothing happens."""


class CutOff(Watched):
    """A listener that tells what it does after it was cut off, and lets things happen meanwhile."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.before: Callable[[], Awaitable[None]] = nothing
        self.between: Callable[[], Awaitable[None]] = nothing
        self.did: list[str] = []
        self._listen_really = self._ear.listen
        self._ear.listen = self._listen

    async def _listen(self) -> None:
        await self.before()
        await self._listen_really()
        self.did.append("listen")
        await self.between()

    async def _round(self, **options: Any) -> bool:
        self.did.append("look")
        return await super()._round(**options)

    @staticmethod
    async def _pause(stopped: asyncio.Task[bool], seconds: float) -> None:
        """Come back at once."""


async def cut(listener: CutOff, database: ScratchDatabase) -> None:
    """Cut it off, and wait until it is back."""
    await listener.until_asleep()
    listener.did.clear()
    database.query(
        """
        select pg_terminate_backend(pid) from pg_stat_activity
        where datname = current_database() and application_name = 'chaz-listen'
        """
    )

    async def is_back() -> bool:
        listened = listener.did.index("listen") if "listen" in listener.did else len(listener.did)
        return "look" in listener.did[listened:] and listener.asleep

    await eventually_async(is_back, every=0.002)


async def until_sent(sent: list[Any], count: int) -> None:
    async def check() -> bool:
        return len(sent) == count

    await eventually_async(check)


@pytest.mark.parametrize("moment", ["while it is away", "just as it comes", "before its first look", "once it is back"])
async def test_what_comes_when_it_was_cut_off_is_found(
    listeners: Listeners, stations: Stations, database: ScratchDatabase, moment: str
) -> None:
    listener = await listeners.start(CutOff, sweep=A_MINUTE)
    sent: list[Any] = []
    coming: list[asyncio.Task[None]] = []

    async def send() -> None:
        sent.append(await stations.send(f"s{len(sent)}"))

    async def begin_to_send() -> None:
        coming.append(asyncio.create_task(send()))

    match moment:
        case "while it is away":
            listener.before = send
        case "just as it comes":
            listener.before = begin_to_send
        case "before its first look":
            listener.between = send
        case _:
            pass
    for number in range(RACES):
        await cut(listener, database)
        if moment == "once it is back":
            await send()
        await asyncio.gather(*coming)
        # It looks while it listens again: what is sent between the two may be on its way still.
        await until_sent(sent, number + 1)
        await listener.until_published(sent[-1])

    assert Counter(listener.published) == Counter(sent)
    runs = await stations.fetch("select id, publishes from chaz.runs")
    assert {row["id"]: row["publishes"] for row in runs} == dict.fromkeys(sent, 1)
    assert unruly(database) == []
