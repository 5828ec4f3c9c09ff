"""Transactions that commit in another order than they wrote, or not at all: nothing is skipped, and nothing stalls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import psycopg
import pytest

from chaz import AsyncChaz, Entry
from chaz.testing import eventually_async
from tests.fixtures.listeners import A_MINUTE, Listeners
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.races import RACES, unruly
from tests.fixtures.stations import Stations

pytestmark = [pytest.mark.anyio, pytest.mark.chaos, pytest.mark.timeout(120)]

SESSIONS = ("s", "t")


@dataclass
class Program:
    """A transaction that is open, and what it wrote to which session."""

    connection: psycopg.Connection[Any]
    wrote: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def write(self, session: str, text: str) -> None:
        self.connection.execute("select chaz.send(%s, 'message', 'ada', %s, recipient => 'solo')", [session, text])
        self.wrote.append((session, text))


class Readers:
    """Whoever follows the sessions."""

    def __init__(self, chaz: AsyncChaz) -> None:
        self.read: dict[str, list[Entry]] = {session: [] for session in SESSIONS}
        self.tasks = [asyncio.create_task(self._follow(chaz, session)) for session in SESSIONS]

    async def _follow(self, chaz: AsyncChaz, session: str) -> None:
        async for entry in chaz.session(session).entries(follow=True):
            self.read[session].append(entry)

    @property
    def texts(self) -> set[tuple[str, str]]:
        return {(session, entry.content) for session, entries in self.read.items() for entry in entries}

    async def until_read(self, wanted: set[tuple[str, str]]) -> None:
        async def check() -> bool:
            assert not any(task.done() for task in self.tasks)
            return wanted <= self.texts

        await eventually_async(check, within=5)


@pytest.fixture
async def readers(stations: Stations, database: ScratchDatabase) -> AsyncIterator[Readers]:
    # Reading an unknown name is an error, so that both are made first.
    for session in SESSIONS:
        await stations.say(session, "the first", recipient="solo")
    await stations.place()
    async with AsyncChaz(database.url) as chaz:
        made = Readers(chaz)
        yield made
        for task in made.tasks:
            task.cancel()
        await asyncio.wait(made.tasks)


async def test_whoever_commits_when_all_is_read_once_and_in_order(
    listeners: Listeners, stations: Stations, readers: Readers, database: ScratchDatabase
) -> None:
    await listeners.start(sweep=A_MINUTE)
    committed = {(session, "the first") for session in SESSIONS}
    done: list[Program] = []
    texts = count()
    with ExitStack() as stack:
        connections = [stack.enter_context(database.connect()) for _ in range(4)]
        for number in range(RACES):
            chance = random.Random(number)
            programs = [Program(connection) for connection in connections]
            for _ in range(8):
                chance.choice(programs).write(chance.choice(SESSIONS), str(next(texts)))
            chance.shuffle(programs)
            *others, last = programs
            for program in others:
                if chance.random() < 0.3:
                    program.connection.rollback()
                else:
                    await asyncio.to_thread(program.connection.commit)
                    committed |= set(program.wrote)
                    done.append(program)
                for _ in range(chance.randrange(30)):
                    await asyncio.sleep(0)
            # The last one still holds its transaction open, and nobody waits for it.
            await readers.until_read(committed)
            await asyncio.to_thread(last.connection.commit)
            committed |= set(last.wrote)
            done.append(last)
    await readers.until_read(committed)

    assert readers.texts == committed
    for session, entries in readers.read.items():
        assert [entry.position for entry in entries] == [*range(1, len(entries) + 1)]
        place = {entry.content: entry.position for entry in entries}
        assert len(place) == len(entries)
        for program in done:
            # What one transaction wrote to a session keeps its order.
            places = [place[text] for to, text in program.wrote if to == session]
            assert places == sorted(filter(None, places))
    (left,) = await stations.fetch("select count(*) from chaz.entries where position is null")
    assert left["count"] == 0
    assert unruly(database) == []
