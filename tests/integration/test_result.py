"""The handle: what it says of a run, how it waits, and that its waits survive what happens to their connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from uuid import UUID

import pytest

from chaz import (
    AgentResult,
    AsyncChaz,
    Chaz,
    ChazError,
    RunCancelled,
    RunFailed,
    UnknownRun,
    WaitTimeout,
    as_completed,
)
from chaz.errors import WaitInsideRun
from chaz.runtime.tools import CallContext, current_call
from chaz.testing import eventually_async
from chaz.waiter import waiting
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations, a_call

pytestmark = pytest.mark.anyio

NOWHERE = UUID("00000000-0000-4000-8000-000000000000")


@pytest.fixture
async def async_chaz(database: ScratchDatabase) -> AsyncIterator[AsyncChaz]:
    async with AsyncChaz(database.url) as made:
        yield made


async def answer(stations: Stations, run: UUID, text: str = "done", **outcome: str) -> None:
    """Be listener and worker for this run."""
    await stations.place()
    await stations.end(await stations.claim(run), text, **outcome)


async def until_it_waits(database: ScratchDatabase) -> None:
    """Wait until somebody is registered as waiting for ends."""

    async def check() -> bool:
        return database.value("select exists (select from chaz.waiters where expires_at > now())")

    await eventually_async(check)


async def until_all_wait(count: int) -> None:
    """Wait until so many waits go on in this process."""

    async def check() -> bool:
        return waiting() == count

    await eventually_async(check)


# What it says


async def test_a_handle_tells_the_state_in_chazs_words(stations: Stations, chaz: Chaz) -> None:
    handle = chaz.session("s").direct("solo", "go")
    following = chaz.session("s").direct("solo", "go on")
    assert (handle.state, handle.ready(), handle.result) == ("pending", False, None)
    await stations.place()
    assert (handle.state, following.state) == ("queued", "pending")
    claim = await stations.claim(handle.id)
    assert (handle.state, handle.ready(), handle.successful(), handle.failed()) == ("running", False, False, False)
    await stations.end(claim, "42")
    assert (handle.state, handle.ready(), handle.successful(), handle.failed()) == ("succeeded", True, True, False)
    assert handle.result == handle.get() == "42"
    handle.wait(timeout=1)
    assert repr(handle) == f"<AgentResult {handle.id}>"


async def test_a_parked_run_is_parked(stations: Stations, chaz: Chaz) -> None:
    claim, _ = await stations.spawning("s")
    await stations.park(claim)
    handle = chaz.result(claim.run_id)
    assert (handle.state, handle.ready()) == ("parked", False)


@pytest.mark.parametrize(("state", "error"), [("failed", RunFailed), ("cancelled", RunCancelled)])
async def test_a_bad_end_is_raised_unless_it_is_not_to_be(
    stations: Stations, chaz: Chaz, state: str, error: type[Exception]
) -> None:
    handle = chaz.session("s").direct("solo", "go")
    await answer(stations, handle.id, "too bad", state=state, reason="model")
    with pytest.raises(error) as raised:
        handle.get(timeout=5)
    assert raised.value.args == (handle.id, "model", "too bad")
    assert handle.get(timeout=5, propagate=False) == "too bad"
    assert (handle.state, handle.failed(), handle.successful()) == (state, state == "failed", False)
    handle.wait(timeout=5)


async def test_an_unknown_run_is_an_error_and_not_pending_for_ever(chaz: Chaz) -> None:
    handle = chaz.handle(NOWHERE)
    for ask in (lambda: handle.state, handle.ready, handle.get, handle.wait, lambda: list(handle.entries())):
        with pytest.raises(UnknownRun, match=str(NOWHERE)):
            ask()


async def test_a_wait_ends_in_time(chaz: Chaz) -> None:
    handle = chaz.session("s").direct("solo", "go")
    with pytest.raises(TimeoutError, match=rf"run {handle.id} is pending after 0\.1 s") as raised:
        handle.get(timeout=0.1)
    assert isinstance(raised.value, WaitTimeout)


async def test_a_wait_inside_a_tool_is_refused(chaz: Chaz) -> None:
    handle = chaz.session("s").direct("solo", "go")
    token = current_call.set(CallContext(NOWHERE, NOWHERE, "solo", 0, 0))
    try:
        for wait in (handle.get, handle.wait, lambda: next(as_completed([handle]))):
            with pytest.raises(WaitInsideRun, match="spawn_agent"):
                wait()
        with pytest.raises(WaitInsideRun):
            await handle
        assert handle.state == "pending"
    finally:
        current_call.reset(token)


# Whose it is


async def test_a_handle_knows_its_family(stations: Stations, chaz: Chaz, async_chaz: AsyncChaz) -> None:
    claim, spawned = await stations.spawning("s", children=2)
    handle = chaz.result(claim.run_id)
    assert [child.id for child in handle.children] == spawned
    assert (handle.parent, handle.root) == (None, handle)
    assert (handle.agent, handle.session_id, handle.date_done) == ("parent", claim.session_id, None)
    assert handle.usage.prompt == 1

    first = await stations.claim(spawned[0], "child")
    await stations.step(first, a_call("spawn_agent"))
    grandchild = await stations.spawn(first)
    (placed_by_nobody,) = handle.children[0].children
    assert (placed_by_nobody.id, placed_by_nobody.state) == (grandchild, "pending")
    await stations.place()
    (young,) = [child for child in handle.children[0].children if child.agent == "child"]
    assert (young.parent, young.root, young.children) == (handle.children[0], handle, [])
    assert young.session_id == first.session_id or young.session_id not in {None, claim.session_id}

    await stations.park(claim)
    await stations.end(first, "early")
    assert handle.children[0].get(timeout=5) == "early"
    assert handle.children[0].date_done == (await stations.run(spawned[0]))["ended_at"]

    same = await async_chaz.result(claim.run_id)
    assert [child.id for child in await same.children()] == spawned
    child = (await same.children())[0]
    parent = await child.parent()
    assert (parent, (await child.root()).id, await child.agent()) == (same, claim.run_id, "child")


async def test_a_handle_of_an_open_transaction_knows_nothing_yet(chaz: Chaz, database: ScratchDatabase) -> None:
    with database.connect() as connection:
        handle = chaz.session("s").direct("solo", "go", connection=connection)
        assert (handle.agent, handle.session_id, handle.date_done, handle.parent) == (None, None, None, None)
        assert (handle.root, handle.children, handle.usage.prompt) == (handle, [], 0)


# Waiting


async def test_get_waits_for_the_answer(stations: Stations, chaz: Chaz, database: ScratchDatabase) -> None:
    handle = chaz.session("s").direct("solo", "go")
    waiting = asyncio.create_task(asyncio.to_thread(handle.get, 10))
    await until_it_waits(database)
    await answer(stations, handle.id, "42")
    assert await waiting == "42"


async def test_a_sync_handle_can_be_awaited_on_any_loop(stations: Stations, chaz: Chaz) -> None:
    handle = chaz.session("s").direct("solo", "go")

    async def wait() -> str | None:
        return await handle

    waiting = asyncio.create_task(wait())
    await answer(stations, handle.id, "42")
    assert await asyncio.wait_for(waiting, 10) == "42"


async def test_an_async_handle(stations: Stations, async_chaz: AsyncChaz) -> None:
    handle = await async_chaz.session("s").direct("solo", "go")
    assert (await handle.state(), await handle.ready()) == ("pending", False)
    waiting = asyncio.gather(handle.get(timeout=10), handle.get(timeout=10))
    await answer(stations, handle.id, "42")
    assert await waiting == ["42", "42"]
    await handle.wait(timeout=1)
    assert await handle == "42"
    assert await (await async_chaz.result(str(handle.id))).result() == "42"


async def test_a_handle_follows_to_the_run_that_took_its_message(
    stations: Stations, chaz: Chaz, database: ScratchDatabase
) -> None:
    one, two = [chaz.session("s").say(text, recipient="solo") for text in ("one", "two")]
    waiting = asyncio.create_task(asyncio.to_thread(two.get, 10))
    await until_it_waits(database)
    await stations.place()
    claim = await stations.claim(one.id)
    assert (two.state, two.ready()) == ("running", False)
    await stations.end(claim, "both")
    assert await waiting == one.get(timeout=5) == "both"
    assert two.state == "succeeded"


async def test_as_completed_gives_the_first_to_end_first(stations: Stations, chaz: Chaz) -> None:
    handles = [chaz.session(f"s{number}").direct("solo", "go") for number in range(4)]
    await stations.place()
    claims = [await stations.claim(handle.id) for handle in handles]
    order = [2, 0, 3, 1]
    completed = as_completed([*handles, handles[0]], timeout=10)
    came: list[AgentResult] = []
    for number in order:
        await stations.end(claims[number])
        came.append(await asyncio.to_thread(next, completed))
    assert came == [handles[number] for number in order]
    assert list(completed) == []


async def test_as_completed_ends_in_time(stations: Stations, chaz: Chaz) -> None:
    done, open_ = [chaz.session(f"s{number}").direct("solo", "go") for number in range(2)]
    await answer(stations, done.id)
    completed = as_completed([open_, done], timeout=0.3)
    assert next(completed) == done
    with pytest.raises(WaitTimeout, match=str(open_.id)):
        next(completed)


async def test_a_thousand_waits_are_one_connection_and_one_end_reaches_them_all(
    stations: Stations, chaz: Chaz, async_chaz: AsyncChaz, database: ScratchDatabase
) -> None:
    run = chaz.session("s").direct("solo", "go").id
    with ThreadPoolExecutor(100) as threads, ExitStack() as stack:
        # Threads and tasks, producers and loops, each wait with a handle of its own.
        producers = [chaz, *(stack.enter_context(Chaz(database.url)) for _ in range(9))]
        futures = [threads.submit(producers[n % 10].handle(run).get, 60) for n in range(100)]
        waits = [asyncio.create_task(async_chaz.handle(run).get(timeout=60)) for _ in range(900)]
        await until_all_wait(1000)
        assert len(database.backends("chaz-wait")) == 1
        await answer(stations, run, "42")
        answers = await asyncio.gather(*waits, *map(asyncio.wrap_future, futures))
        assert len(database.backends("chaz-wait")) == 1
    assert answers == ["42"] * 1000


async def test_what_one_producer_closes_goes_on_for_another(
    stations: Stations, chaz: Chaz, database: ScratchDatabase
) -> None:
    async with AsyncChaz(database.url) as other:
        run = await other.session("s").direct("solo", "go")
        ended = asyncio.create_task(run.get())
        waiting = asyncio.wrap_future(chaz.handle(run.id).future())
        await until_all_wait(2)
    with pytest.raises(ChazError, match="closed during this wait; the run goes on"):
        await ended
    await answer(stations, run.id, "42")
    await asyncio.wait_for(waiting, 60)


async def test_two_hundred_waits_are_one_connection(
    stations: Stations, async_chaz: AsyncChaz, database: ScratchDatabase
) -> None:
    handles = [await async_chaz.session(f"s{number}").direct("solo", "go") for number in range(200)]
    waits = [asyncio.create_task(handle.get(timeout=60)) for handle in handles]
    await until_it_waits(database)
    await stations.place()
    for number, handle in enumerate(handles):
        await stations.end(await stations.claim(handle.id), str(number))
        if number == 100:
            assert len(database.backends("chaz-wait")) == 1
    assert await asyncio.gather(*waits) == [str(number) for number in range(200)]
    assert len(database.backends("chaz-wait")) == 1


# What happens to the wait


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is heard is heard by notification."""
    monkeypatch.setattr("chaz.waiter.FIRST_POLL", 60.0)
    monkeypatch.setattr("chaz.waiter.LAST_POLL", 60.0)


@pytest.mark.usefixtures("no_polling")
async def test_an_end_is_heard_by_notification(
    stations: Stations, async_chaz: AsyncChaz, database: ScratchDatabase
) -> None:
    handle = await async_chaz.session("s").direct("solo", "go")
    waiting = asyncio.create_task(handle.get(timeout=60))
    await until_it_waits(database)
    await until_listening(database)
    await answer(stations, handle.id, "42")
    assert await asyncio.wait_for(waiting, 5) == "42"


async def until_listening(database: ScratchDatabase) -> None:
    """Wait until the waiter's connection has said LISTEN and is idle."""

    async def check() -> bool:
        return database.value(
            """
            select exists (select from pg_stat_activity where application_name = 'chaz-wait' and state = 'idle'
                and starts_with(query, 'listen') and datname = current_database())
            """
        )

    await eventually_async(check)


async def test_a_wait_survives_the_loss_of_its_connection(
    stations: Stations, async_chaz: AsyncChaz, database: ScratchDatabase
) -> None:
    handle = await async_chaz.session("s").direct("solo", "go")
    waiting = asyncio.create_task(handle.get(timeout=30))
    await until_it_waits(database)
    await until_listening(database)
    (pid,) = database.backends("chaz-wait")
    database.query("select pg_terminate_backend(%(pid)s)", pid=pid)
    await answer(stations, handle.id, "42")
    assert await waiting == "42"


async def test_a_wait_survives_a_payload_that_is_no_id(
    stations: Stations, async_chaz: AsyncChaz, database: ScratchDatabase
) -> None:
    handle = await async_chaz.session("s").direct("solo", "go")
    waiting = asyncio.create_task(handle.get(timeout=10))
    await until_it_waits(database)
    await until_listening(database)
    database.query("notify chaz_done, 'nonsense'")
    await answer(stations, handle.id, "42")
    assert await waiting == "42"


async def test_a_wait_that_begins_while_the_waiter_lets_go_is_answered(
    stations: Stations, async_chaz: AsyncChaz, database: ScratchDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chaz.waiter.IDLE_FOR", 0.0)
    handle = await async_chaz.session("s").direct("solo", "go")
    with database.connect() as other:
        first = asyncio.create_task(handle.get(timeout=1))
        await until_it_waits(database)
        # With nobody left to wait for it takes its registration back, and is held up in that.
        other.execute("select from chaz.waiters for update")
        with pytest.raises(WaitTimeout):
            await first
        await asyncio.to_thread(database.until_blocked)
        second = asyncio.create_task(handle.get(timeout=10))
        for _ in range(5):
            assert not await handle.ready()
        other.rollback()
    await answer(stations, handle.id, "42")
    assert await second == "42"


async def test_closing_ends_the_waits(database: ScratchDatabase) -> None:
    async with AsyncChaz(database.url) as chaz:
        handle = await chaz.session("s").direct("solo", "go")
        waiting = asyncio.create_task(handle.get())
        await until_it_waits(database)
    with pytest.raises((ChazError, asyncio.CancelledError)):
        await asyncio.wait_for(waiting, 5)


async def test_nobody_is_registered_once_the_waiter_has_closed(stations: Stations, database: ScratchDatabase) -> None:
    async with AsyncChaz(database.url) as chaz:
        handle = await chaz.session("s").direct("solo", "go")
        with pytest.raises(WaitTimeout):
            await handle.get(timeout=0.3)
        await until_it_waits(database)
    assert not database.value("select exists (select from chaz.waiters where expires_at > now())")
    assert database.backends("chaz-wait") == []
