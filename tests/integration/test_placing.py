"""Placing: every entry gets the next position, once, in order of arrival, whoever wrote it and whoever places it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from uuid import uuid4

import pytest

from chaz.entries import session_id
from tests.fixtures.postgres import ScratchDatabase, both_servers
from tests.fixtures.stations import Stations

pytestmark = [pytest.mark.anyio, both_servers]

SEND = "select chaz.send(%s, 'message', 'ada', %s)"


async def contents(stations: Stations, session: str) -> list[str]:
    return [entry.content for entry in await stations.log(session) if entry.type in {"message", "directive"}]


async def positions_are_gapless(stations: Stations) -> int:
    """How many entries there are, all placed from 1 on without a gap."""
    rows = await stations.fetch("select session_id, position from chaz.entries order by 1, 2")
    for _, group in groupby(rows, lambda row: row["session_id"]):
        positions = [row["position"] for row in group]
        assert positions == list(range(1, len(positions) + 1))
    heads = await stations.fetch(
        """
        select h.session_id from chaz.heads h
        where next_position <> 1 + (select count(*) from chaz.entries e where e.session_id = h.session_id)
        """
    )
    assert heads == []
    return len(rows)


async def test_entries_are_placed_in_order_of_arrival(stations: Stations) -> None:
    for text in ("one", "two", "three"):
        await stations.say("s", text, recipient="solo")
    assert [entry.position for entry in await stations.log("s")] == [None, None, None]

    placed = await stations.place()

    assert placed.entries == 3
    assert await stations.lines("s") == [(1, "message", "one"), (2, "message", "two"), (3, "message", "three")]
    assert (await stations.place()).entries == 0


async def test_a_round_that_is_full_says_that_there_is_more(stations: Stations) -> None:
    for session in ("s", "t"):
        for text in ("one", "two", "three"):
            await stations.send(session, text)
    placed = await stations.place(per_session=2)
    assert (placed.entries, placed.more) == (4, True)
    placed = await stations.place(sessions=1)
    assert (placed.entries, placed.more) == (1, True)
    await stations.place()
    assert await contents(stations, "s") == await contents(stations, "t") == ["one", "two", "three"]
    assert await positions_are_gapless(stations) == 6


async def test_two_listeners_place_each_entry_once(stations: Stations) -> None:
    producing = True

    async def produce(number: int) -> None:
        for turn in range(40):
            await stations.send(f"s{(number + turn) % 5}", f"{number}:{turn}")

    async def listen() -> int:
        count = 0
        while producing or (await stations.fetch("select 1 from chaz.entries where position is null limit 1")):
            count += (await stations.place()).entries
        return count

    listeners = [asyncio.create_task(listen()) for _ in range(3)]
    await asyncio.gather(*(produce(number) for number in range(5)))
    producing = False
    assert sum(await asyncio.gather(*listeners)) == 200

    assert await positions_are_gapless(stations) == 200
    for session in range(5):
        rows = await stations.fetch(
            "select arrival from chaz.entries where session_id = %(s)s order by position", s=session_id(f"s{session}")
        )
        for number in range(5):
            mine = [text for text in await contents(stations, f"s{session}") if text.startswith(f"{number}:")]
            assert mine == sorted(mine, key=lambda text: int(text.split(":")[1]))
        assert len(rows) == 40
    (active,) = await stations.fetch("select count(*) from chaz.runs where state = 'queued'")
    assert active["count"] == 5


async def test_a_head_that_is_taken_is_left_to_its_owner(stations: Stations, database: ScratchDatabase) -> None:
    await stations.claimed("s", "first")
    await stations.send("s", "second")
    await stations.send("t", "elsewhere")
    with database.connect() as other:
        other.execute("select from chaz.heads where session_id = %s for update", [session_id("s")])
        placed = await stations.place()
        assert placed.entries == 1
        assert (await stations.log("t"))[0].position == 1
    await stations.place()
    assert await contents(stations, "s") == ["first", "second"]


async def test_crossing_transactions_wait_for_nobody(stations: Stations, database: ScratchDatabase) -> None:
    with database.connect() as one, database.connect() as two:
        one.execute(SEND, ["a", "one"])
        two.execute(SEND, ["b", "two"])
        one.execute(SEND, ["b", "one"])
        two.execute(SEND, ["a", "two"])
        two.commit()
        await stations.place()
        one.commit()
        await stations.place()
    # Committed first, placed first: a transaction held open never stops a session.
    assert await contents(stations, "a") == ["two", "one"]
    assert await contents(stations, "b") == ["two", "one"]
    assert await positions_are_gapless(stations) == 4 + await notes(stations)


async def notes(stations: Stations) -> int:
    (row,) = await stations.fetch("select count(*) from chaz.entries where type = 'note'")
    return row["count"]


async def test_a_transaction_held_open_does_not_stop_its_session(stations: Stations, database: ScratchDatabase) -> None:
    with database.connect() as web:
        web.execute(SEND, ["s", "held open"])
        claim = await stations.claimed("s", "at once")
        await stations.end(claim, "answered")
        web.commit()
    await stations.place()
    assert await contents(stations, "s") == ["at once", "answered", "held open"]
    assert await positions_are_gapless(stations) == await count(stations)


async def count(stations: Stations) -> int:
    (row,) = await stations.fetch("select count(*) from chaz.entries")
    return row["count"]


@pytest.mark.parametrize("isolation", ["REPEATABLE_READ", "SERIALIZABLE"])
async def test_strict_isolation_fails_nobody(stations: Stations, database: ScratchDatabase, isolation: str) -> None:
    def produce(number: int) -> None:
        with database.connect(isolation=isolation) as mine:
            mine.execute("select 1")
            for text in ("first", "second"):
                mine.execute(SEND, ["s", f"{number} {text}"])

    with ThreadPoolExecutor(8) as pool:
        produced = [pool.submit(produce, number) for number in range(8)]
        while not all(future.done() for future in produced):
            await stations.place()
    for future in produced:
        future.result()
    await stations.place()
    texts = await contents(stations, "s")
    assert len(texts) == 16
    for number in range(8):
        assert texts.index(f"{number} first") < texts.index(f"{number} second")


async def test_copy_and_bulk_inserts_are_placed(stations: Stations, database: ScratchDatabase) -> None:
    with database.connect() as mine:
        with mine.cursor().copy("copy chaz.entries (session_id, type, sender, recipient, content) from stdin") as rows:
            for number in range(100):
                rows.write_row((str(session_id("copied")), "message", "etl", "solo", str(number)))
        mine.commit()
        mine.execute(
            """
            insert into chaz.entries (session_id, type, sender, recipient, content)
            select chaz.session_id('bulk'), 'message', 'etl', 'solo', i::text
            from generate_series(0, 15999) i order by i + 0
            """
        )
    rounds = 0
    while (await stations.place()).more:
        rounds += 1

    assert rounds == 16_000 / 500
    assert await contents(stations, "copied") == [str(number) for number in range(100)]
    assert await contents(stations, "bulk") == [str(number) for number in range(16_000)]
    assert await positions_are_gapless(stations) == 16_100


async def test_a_savepoint_that_is_rolled_back_leaves_no_gap(stations: Stations, database: ScratchDatabase) -> None:
    with database.connect() as mine:
        mine.execute(SEND, ["s", "before"])
        with mine.transaction(force_rollback=True):
            mine.execute(SEND, ["s", "gone"])
        mine.execute(SEND, ["s", "after"])
    await stations.place(default_agent="solo")
    assert await stations.lines("s") == [(1, "message", "before"), (2, "message", "after")]


# What names a session


async def test_a_name_is_believed_only_with_its_id(stations: Stations, database: ScratchDatabase) -> None:
    stolen, named = uuid4(), session_id("mine")
    for id in (stolen, named):
        database.query(
            """
            insert into chaz.entries (session_id, type, sender, content, metadata)
            values (%(id)s, 'message', 'eve', 'hi', '{"session": "mine"}')
            """,
            id=id,
        )
    await stations.place()
    rows = await stations.fetch("select id, name from chaz.sessions")
    assert {row["id"]: row["name"] for row in rows} == {stolen: None, named: "mine"}


async def test_an_entry_of_another_tenant_wakes_nobody(stations: Stations, database: ScratchDatabase) -> None:
    await stations.claimed("s", "ours")
    database.query(
        """
        insert into chaz.entries (tenant, session_id, type, sender, recipient, content)
        values ('acme', %(id)s, 'directive', 'eve', 'solo', 'theirs')
        """,
        id=session_id("s"),
    )
    await stations.send("s", "ours too")
    await stations.place()
    errors = [entry for entry in await stations.log("s") if entry.type == "error"]
    assert len(errors) == 1
    assert "tenant is 'acme'" in errors[0].content
    (runs,) = await stations.fetch("select count(*) from chaz.runs")
    assert runs["count"] == 2


async def test_a_name_of_another_tenant_is_another_session(stations: Stations) -> None:
    await stations.send("s", "ours")
    await stations.send("s", "theirs", tenant="acme")
    await stations.place()
    rows = await stations.fetch("select tenant, name from chaz.sessions order by tenant")
    assert [(row["tenant"], row["name"]) for row in rows] == [("", "s"), ("acme", "s")]


@pytest.mark.parametrize("at", ["infinity", "-infinity", "20000-01-01"])
async def test_an_entry_is_placed_whatever_it_says_of_its_time(stations: Stations, at: str) -> None:
    stations.scratch.query(
        """
        insert into chaz.entries (session_id, type, sender, recipient, content, created_at)
        values (gen_random_uuid(), 'directive', 'ada', 'solo', 'hello', %(at)s)
        """,
        at=at,
    )
    assert (await stations.place()).entries == 1
