"""Reading a log as it grows, and using a handle after a fork."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from chaz import AsyncChaz, Chaz, Entry, InvalidEntry
from chaz.audit import recorder
from chaz.database import connect_blocking
from chaz.deliveries import AuditEvent
from chaz.testing import eventually_async
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import ROOT
from tests.fixtures.stations import Stations, a_call

pytestmark = pytest.mark.anyio


@pytest.fixture
async def async_chaz(database: ScratchDatabase) -> AsyncIterator[AsyncChaz]:
    async with AsyncChaz(database.url) as made:
        yield made


def record(database: ScratchDatabase, *events: AuditEvent) -> None:
    """Be the audit consumer."""
    with connect_blocking(database.url, "test") as connection:
        assert recorder.record(connection, events) == set()


class Reader:
    """Reads in the background."""

    def __init__(self, entries: AsyncIterator[Entry]) -> None:
        self.read: list[Entry] = []
        self.task = asyncio.create_task(self._run(entries))

    async def _run(self, entries: AsyncIterator[Entry]) -> None:
        async for entry in entries:
            self.read.append(entry)

    @property
    def lines(self) -> list[tuple[int | None, int, str]]:
        return [(entry.position, entry.seq, entry.type) for entry in self.read]

    async def until(self, type: str, times: int = 1) -> None:
        async def check() -> bool:
            return sum(entry.type == type for entry in self.read) >= times

        await eventually_async(check)

    async def to_the_end(self, within: float = 15) -> None:
        await asyncio.wait_for(self.task, within)


async def test_a_reader_that_follows_gets_every_entry_once_and_late_audit_too(
    stations: Stations, async_chaz: AsyncChaz, database: ScratchDatabase
) -> None:
    await async_chaz.session("s").say("of another time", recipient="solo")
    await stations.place()
    handle = await async_chaz.session("s").direct("solo", "go")
    (earlier,) = await stations.fetch("select id from chaz.runs")
    await stations.end(await stations.claim(earlier["id"]), "answered")
    reader = Reader(handle.entries(follow=True))
    await stations.place()
    await reader.until("directive")

    claim = await stations.claim(handle.id)
    await reader.until("ack")
    await stations.step(claim, *[a_call("word_count")] * 2)
    events = [await stations.start_call(claim), await stations.finish_call(claim)]
    events += [await stations.start_call(claim, ordinal=1), await stations.finish_call(claim, ordinal=1)]
    record(database, events[0], events[2])
    await reader.until("tool_call")
    await stations.end(claim, "done")
    await reader.until("message")
    assert not reader.task.done()
    record(database, events[3])
    record(database, events[1])
    await reader.to_the_end()

    ack = claim.ack_position
    assert reader.lines == [
        (ack - 1, 0, "directive"),
        (ack, 0, "ack"),
        (ack, 1, "tool_call"),
        (ack + 1, 0, "message"),
        (ack, 2, "tool_result"),
        (ack, 3, "tool_call"),
        (ack, 4, "tool_result"),
    ]
    entries = [(entry.position, entry.seq, entry.type) async for entry in handle.entries()]
    assert entries == sorted(reader.lines, key=lambda line: line[:2])


def lines_of(entries: list[Entry]) -> list[tuple[int | None, int, str]]:
    return [(entry.position, entry.seq, entry.type) for entry in entries]


async def test_a_reader_may_come_back_at_any_entry_and_misses_nothing(
    stations: Stations, async_chaz: AsyncChaz, database: ScratchDatabase
) -> None:
    session = async_chaz.session("s")
    handle = await session.direct("solo", "go")
    reader = Reader(session.entries(follow=True))
    await stations.place()
    claim = await stations.claim(handle.id)
    await stations.step(claim, *[a_call("word_count")] * 2)
    early = [await stations.start_call(claim), await stations.finish_call(claim)]
    await stations.give_back(claim)
    claim = await stations.claim(handle.id)
    late = [await stations.start_call(claim, ordinal=1), await stations.finish_call(claim, ordinal=1)]
    record(database, early[0])
    await reader.until("tool_call")
    await stations.end(claim, "done")
    await reader.until("message")
    # Out of order, and after the end: what stands before it in the log is read behind it.
    record(database, late[1], early[1])
    await reader.until("tool_result")
    record(database, late[0])
    await reader.until("tool_result", times=2)
    await stations.end(await stations.claimed("s", "next"), "and done")
    await reader.until("message", times=2)
    whole = reader.read
    assert len(whole) == len({entry.id for entry in whole}) == 11

    for number, entry in enumerate(whole, 1):
        again = [later async for later in session.entries(after=entry)]
        assert sorted(lines_of(again), key=str) == sorted(lines_of(whole[number:]), key=str), entry
        follower = Reader(session.entries(follow=True, after=entry.bookmark or ""))
        if number < len(whole):
            last = again[-1]

            async def has_read_it(follower: Reader = follower, last: Entry = last) -> bool:
                return last.id in {entry.id for entry in follower.read}

            await eventually_async(has_read_it)
        follower.task.cancel()
        assert {entry.id for entry in follower.read} == {entry.id for entry in whole[number:]}
    assert whole[-1].bookmark == "7", "a log that has been read to its end is a position"
    reader.task.cancel()

    rest = [entry async for entry in handle.entries(follow=True, after=whole[3])]
    assert {entry.id for entry in rest} == {entry.id for entry in whole[4:]}


async def test_what_comes_before_a_gap_in_the_trail_is_not_missed(
    stations: Stations, async_chaz: AsyncChaz, database: ScratchDatabase
) -> None:
    session = async_chaz.session("s")
    claim = await stations.claimed("s")
    await stations.step(claim, a_call("word_count"))
    events = [await stations.start_call(claim), await stations.finish_call(claim)]
    record(database, events[1])
    read = [entry async for entry in session.entries()]
    assert lines_of(read) == [(1, 0, "directive"), (2, 0, "ack"), (2, 2, "tool_result")]
    record(database, events[0])
    again = [entry async for entry in session.entries(after=read[-1])]
    assert lines_of(again) == [(2, 1, "tool_call"), (2, 2, "tool_result")]
    assert [entry async for entry in session.entries(after=again[-1])] == []


async def test_a_place_that_is_none_is_refused(stations: Stations, async_chaz: AsyncChaz) -> None:
    handle = await async_chaz.session("s").direct("solo", "go")
    for entries in (async_chaz.session("s").entries(after="yesterday"), handle.entries(after="1,2:3")):
        with pytest.raises(InvalidEntry, match="is no place in a log"):
            await anext(entries)


async def test_a_trail_that_never_comes_holds_no_reader_for_ever(
    stations: Stations, async_chaz: AsyncChaz, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chaz.result.SETTLE", 0.3)
    handle = await async_chaz.session("s").direct("solo", "go")
    await stations.place()
    claim = await stations.claim(handle.id)
    await stations.step(claim, a_call("word_count"))
    await stations.start_call(claim)
    await stations.end(claim)
    reader = Reader(handle.entries(follow=True))
    await reader.to_the_end()
    assert [type for _, _, type in reader.lines] == ["directive", "ack", "message"]


async def test_a_session_is_followed_past_a_position(stations: Stations, async_chaz: AsyncChaz) -> None:
    for text in ("one", "two", "three"):
        await stations.send("s", text)
    await stations.place()
    reader = Reader(async_chaz.session("s").entries(follow=True, after=2))
    await reader.until("directive")
    await stations.send("s", "four")
    await stations.place()
    await reader.until("directive", times=2)
    reader.task.cancel()
    assert [entry.content for entry in reader.read] == ["three", "four"]


async def test_what_is_not_placed_comes_last_and_as_sent(stations: Stations, chaz: Chaz) -> None:
    await stations.claimed("s", "one")
    handles = [chaz.session("s").say(text, recipient="solo") for text in ("two", "three")]
    assert [entry.content for entry in chaz.session("s").entries()] == ["one", "", "two", "three"]
    assert [entry.content for entry in handles[0].entries()] == ["two", "three"]


AFTER_A_FORK = """
import os, sys
from chaz import Chaz

with Chaz(sys.argv[1]) as chaz:
    mine = chaz.session("parent").say("to nobody")
    assert mine.state in ("pending", "nobody")
    pid = os.fork()
    if pid == 0:
        theirs = chaz.session("child").say("to nobody either")
        assert theirs.get(timeout=20) is None
        assert mine.get(timeout=20) is None
        assert len(list(chaz.session("child").entries())) == 2
        chaz.close()
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert mine.get(timeout=20) is None
    assert len(list(chaz.session("parent").entries())) == 2
sys.exit(os.waitstatus_to_exitcode(status))
"""


async def test_a_producer_and_its_handles_may_be_used_on_both_sides_of_a_fork(
    stations: Stations, database: ScratchDatabase, tmp_path: Path
) -> None:
    script, errors = tmp_path / "forking.py", tmp_path / "errors"
    script.write_text(AFTER_A_FORK)
    with open(errors, "w") as stderr:
        forking = subprocess.Popen(
            [sys.executable, "-W", "error", str(script), database.url],
            stderr=stderr,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    try:

        async def has_ended() -> bool:
            await stations.place()
            return forking.poll() is not None

        await eventually_async(has_ended, within=15)
        assert (forking.returncode, errors.read_text()) == (0, "")
    finally:
        if forking.poll() is None:
            os.killpg(forking.pid, signal.SIGKILL)
            forking.wait()
