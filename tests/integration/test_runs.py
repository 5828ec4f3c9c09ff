"""A run in the hands of workers: claimed once, written by its latest attempt only, parked, given back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest

from chaz import Chaz, completion, journal, publishing, runs, sessionlog
from chaz.database import Database, Transaction
from chaz.errors import StaleAttempt
from chaz.outcomes import CallOutcome, RunOutcome
from chaz.placing import place
from chaz.runs import Claim, Unclaimed
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations, a_call

pytestmark = pytest.mark.anyio

NOBODYS = UUID("00000000-0000-4000-8000-000000000000")


# Claiming


async def test_a_claim_makes_the_run_the_workers_and_acks(stations: Stations) -> None:
    run = await stations.send("s")
    await stations.place()
    claim = await stations.claim(run)

    row = await stations.run(run)
    assert (row["state"], row["attempt"], row["worker_id"]) == ("running", 1, stations.worker)
    assert (claim.attempt, claim.ack_position, claim.read_to) == (1, 2, 1)
    assert 3590 < claim.seconds_left <= 3600
    ack = (await stations.log("s"))[1]
    assert (ack.type, ack.sender, ack.author, ack.run_id, ack.metadata) == ("ack", "solo", "agent", run, {"attempt": 1})


async def test_of_many_claims_at_once_one_wins(stations: Stations) -> None:
    run = await stations.send("s")
    await stations.place()
    claims = await asyncio.gather(*(stations.try_to_claim(run, worker=uuid4()) for _ in range(8)))
    assert sum(isinstance(claim, Claim) for claim in claims) == 1
    assert [claim for claim in claims if isinstance(claim, Unclaimed)] == [Unclaimed("not queued", "running")] * 7
    assert [entry.type for entry in await stations.log("s")] == ["directive", "ack"]


async def test_a_delivery_that_comes_to_nothing_says_why(stations: Stations) -> None:
    assert await stations.try_to_claim(NOBODYS) == Unclaimed("unknown")

    active = await stations.send("s")
    waiting = await stations.send("s")
    later = await stations.send("t", countdown=timedelta(hours=1))
    await stations.place()
    assert await stations.try_to_claim(active, agent="child") == Unclaimed("other agent", "solo")
    assert await stations.try_to_claim(waiting) == Unclaimed("not queued", "pending")
    assert await stations.try_to_claim(later) == Unclaimed("not queued", "pending")
    await stations.end(await stations.claim(active))
    assert await stations.try_to_claim(active) == Unclaimed("not queued", "succeeded")


async def why_unclaimed(stations: Stations, run: UUID, worker: UUID | None = None) -> str:
    claim = await stations.try_to_claim(run, worker=worker)
    assert isinstance(claim, Unclaimed)
    return claim.why


async def test_a_worker_whose_lease_has_run_out_claims_nothing(stations: Stations) -> None:
    run = await stations.send("s")
    await stations.place()
    lapsed = uuid4()
    stations.beat(timedelta(seconds=-1), lapsed)
    assert (await why_unclaimed(stations, run, lapsed)) == "not yet"
    stations.beat(timedelta(minutes=1), lapsed)
    await stations.claim(run, worker=lapsed)


async def test_a_second_claim_is_a_new_attempt_that_sees_the_same(stations: Stations) -> None:
    first = await stations.claimed("s")
    await stations.say("s", "meanwhile", recipient="solo")
    await stations.place()
    await stations.give_back(first)
    second = await stations.claim(first.run_id)
    assert (second.attempt, second.read_to) == (2, first.read_to)
    assert second.ack_position > first.ack_position


async def test_a_claim_that_waited_for_its_session_sees_what_came_meanwhile(
    stations: Stations, database: ScratchDatabase
) -> None:
    first = await stations.say("s", "one", recipient="solo")
    await stations.place()
    second = await stations.say("s", "two", recipient="solo")

    async def place_slowly(tx: Transaction) -> None:
        await place(tx, default_agent="", first_wait=5.0)
        claiming.append(asyncio.create_task(stations.claim(first)))
        await asyncio.to_thread(database.until_blocked)

    claiming: list[asyncio.Task[Claim]] = []
    await stations.transact(place_slowly)
    claim = await claiming[0]
    assert (claim.ack_position, claim.read_to) == (3, 2)
    assert await stations.state(second) == "superseded"
    (head,) = await stations.fetch("select next_position from chaz.heads")
    # After the ack, the note of what it took.
    assert head["next_position"] == 5


# Coalescing


async def test_the_first_claim_takes_the_messages_that_wait_for_the_same_agent(stations: Stations, chaz: Chaz) -> None:
    first = await stations.say("s", "one", recipient="solo")
    same = [await stations.say("s", text, recipient="solo") for text in ("two", "three")]
    directive = await stations.send("s", "an order")
    other = await stations.send("s", "another's", recipient="child")
    await stations.place()
    unplaced = await stations.say("s", "too late", recipient="solo")
    claim = await stations.claim(first)
    await stations.place()

    assert [await stations.state(run) for run in same] == ["superseded", "superseded"]
    assert [await stations.state(run) for run in (directive, other, unplaced)] == ["pending", "pending", "pending"]
    context, own = await stations.transact(
        lambda tx: sessionlog.context_entries(
            tx, session_id=claim.session_id, run_id=claim.run_id, read_to=claim.read_to
        )
    )
    assert context == []
    assert [entry.content for entry in own] == ["one", "two", "three"]

    await stations.end(claim, "to all three")
    for run in (first, *same):
        assert chaz.result(run).get(timeout=5) == "to all three"
    assert await stations.state(directive) == "queued"


async def test_a_claim_notes_once_what_it_takes_over(stations: Stations) -> None:
    first, *taken = [await stations.say("s", text, recipient="solo") for text in ("one", "two", "three")]
    await stations.place()
    worker, claim_id = stations.worker, uuid4()
    stations.beat(timedelta(hours=1))
    # The second time as after a commit in doubt.
    for _ in range(2):
        await stations.transact(partial(runs.claim, run_id=first, agent="solo", worker_id=worker, claim_id=claim_id))

    *_, ack, note = log = await stations.log("s")
    assert [entry.position for entry in log] == [1, 2, 3, 4, 5]
    assert (ack.type, note.type, note.sender, note.author) == ("ack", "note", "chaz", "system")
    assert note.content == "'solo' answers 2 messages besides its own"
    assert note.metadata == {"entries": [str(run) for run in taken], "reason": "coalesced", "run": str(first)}
    late = await stations.say("s", "four", recipient="solo")
    await stations.place()
    assert [entry.position for entry in await stations.log("s") if entry.id == late] == [6]


async def test_a_claim_that_takes_nothing_over_notes_nothing(stations: Stations) -> None:
    await stations.claimed("s")
    assert [entry.type for entry in await stations.log("s")] == ["directive", "ack"]


async def test_a_message_whose_time_has_not_come_is_not_taken_over(stations: Stations) -> None:
    first = await stations.say("s", "one", recipient="solo")
    later = await stations.say("s", "later", recipient="solo", countdown=timedelta(hours=1))
    await stations.place()
    await stations.claim(first)
    assert await stations.state(later) == "pending"


async def test_a_directive_takes_nothing_over(stations: Stations) -> None:
    directive = await stations.send("s", "an order")
    message = await stations.say("s", "a word", recipient="solo")
    await stations.place()
    await stations.claim(directive)
    assert await stations.state(message) == "pending"


async def test_a_session_may_ask_for_an_answer_to_each(stations: Stations, database: ScratchDatabase) -> None:
    first, second = [await stations.say("s", text, recipient="solo") for text in ("one", "two")]
    await stations.place()
    database.query("update chaz.sessions set on_message = 'each'")
    await stations.claim(first)
    assert await stations.state(second) == "pending"


async def test_a_later_attempt_takes_nothing_over(stations: Stations) -> None:
    first = await stations.say("s", "one", recipient="solo")
    await stations.place()
    claim = await stations.claim(first)
    later = await stations.say("s", "two", recipient="solo")
    await stations.place()
    await stations.give_back(claim)
    await stations.claim(first)
    assert await stations.state(later) == "pending"


async def test_the_context_has_no_trigger_that_is_unanswered(stations: Stations) -> None:
    first = await stations.claimed("s", "one")
    second = await stations.send("s", "to another", recipient="child")
    await stations.send("s", "two")
    await stations.place()
    await stations.end(first, "answer to one")
    claim = await stations.claim(second, "child")
    context, own = await stations.transact(
        lambda tx: sessionlog.context_entries(
            tx, session_id=claim.session_id, run_id=claim.run_id, read_to=claim.read_to
        )
    )
    assert [entry.content for entry in context] == ["one", "answer to one"]
    assert [entry.content for entry in own] == ["to another"]


# Fencing

Write = Callable[[Stations, Claim], Awaitable[object]]
WRITES: dict[str, Write] = {
    "store_step": lambda s, claim: s.step(claim, step=1),
    "start_call": lambda s, claim: s.start_call(claim, ordinal=1),
    "finish_call": lambda s, claim: s.finish_call(claim),
    "refuse_call": lambda s, claim: s.refuse_call(claim, ordinal=1),
    "start_spawn": lambda s, claim: s.spawn(claim, ordinal=1),
    "park": lambda s, claim: s.park(claim),
    "give_back": lambda s, claim: s.give_back(claim),
    "end": lambda s, claim: s.end(claim),
}


async def everything(stations: Stations) -> dict[str, Any]:
    return {
        table: await stations.fetch(f"select * from chaz.{table} order by 1, 2, 3")  # pyright: ignore[reportArgumentType]
        for table in ("runs", "steps", "calls", "waits", "sessions", "entries", "heads")
    }


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
@pytest.mark.parametrize("how", ["claimed again", "queued again", "ended"])
async def test_a_stale_attempt_writes_nothing(stations: Stations, write: Write, how: str) -> None:
    stale = await stations.claimed("s")
    await stations.step(stale, a_call("word_count"), a_call("word_count"))
    await stations.start_call(stale)
    if how == "ended":
        await stations.close(stale.run_id, "running")
    else:
        await stations.give_back(stale)
    if how == "claimed again":
        await stations.claim(stale.run_id)
    before = await everything(stations)

    with pytest.raises(StaleAttempt, match=f"attempt 1 of run {stale.run_id}"):
        await write(stations, stale)

    assert await everything(stations) == before


async def test_a_write_waits_for_the_claim_that_makes_it_stale(stations: Stations, database: ScratchDatabase) -> None:
    stale = await stations.claimed("s")
    with database.connect() as other:
        other.execute(
            "update chaz.runs set state = 'queued', worker_id = null, claim = null where id = %s", [stale.run_id]
        )
        writing = asyncio.create_task(stations.step(stale))
        await asyncio.to_thread(database.until_blocked)
        other.commit()
    with pytest.raises(StaleAttempt):
        await writing
    assert await stations.fetch("select 1 from chaz.steps") == []


async def test_a_refusal_is_one_write_and_two_events(stations: Stations) -> None:
    claim = await stations.claimed("s")
    await stations.step(claim, a_call("halve"))
    events = await stations.refuse_call(claim)
    assert [(event.kind, event.seq, event.outcome) for event in events] == [
        ("tool_call", 1, ""),
        ("tool_result", 2, "error"),
    ]
    _, (call,) = await stations.transact(lambda tx: journal.load(tx, claim.run_id))
    assert call.outcome is not None
    assert (call.outcome.error, call.outcome.content) == ("unknown_tool", events[1].content)
    # A commit in doubt is looked up, and tells the same again.
    place: dict[str, Any] = {"step": 0, "ordinal": 0, "call": a_call("halve")}
    assert await stations.transact(lambda tx: journal.told_refusal(tx, claim, **place)) == events
    await stations.give_back(claim)
    again = await stations.claim(claim.run_id)
    assert await stations.transact(lambda tx: journal.told_refusal(tx, again, **place)) is None


# Parking


async def test_parked_a_run_is_nobodys_until_its_last_answer(stations: Stations) -> None:
    claim, (one, two) = await stations.spawning("s", children=2)
    assert await stations.park(claim)
    row = await stations.run(claim.run_id)
    assert (row["state"], row["worker_id"], row["waits_for"]) == ("parked", None, "child")

    await stations.end(await stations.claim(one, "child"), "first")
    assert await stations.state(claim.run_id) == "parked"
    await stations.end(await stations.claim(two, "child"), "second")
    assert await stations.state(claim.run_id) == "queued"

    again = await stations.claim(claim.run_id, "parent")
    _, calls = await stations.transact(lambda tx: journal.load(tx, again.run_id))
    assert [call.answer for call in calls] == [
        CallOutcome(kind="ok", content="first"),
        CallOutcome(kind="ok", content="second"),
    ]


async def test_an_answer_before_the_parking_is_not_lost(stations: Stations) -> None:
    claim, (child,) = await stations.spawning("s")
    await stations.end(await stations.claim(child, "child"), "quick")
    assert not await stations.park(claim)
    assert await stations.state(claim.run_id) == "running"


async def test_an_answer_during_the_parking_waits_for_it(stations: Stations, database: ScratchDatabase) -> None:
    claim, (child,) = await stations.spawning("s")
    child_claim = await stations.claim(child, "child")
    with ThreadPoolExecutor(1) as pool:

        async def park_slowly(tx: Transaction) -> bool:
            parked = await runs.park(tx, claim, waits_for="child")
            ending.append(pool.submit(asyncio.run, end_elsewhere(database, child_claim)))
            await asyncio.to_thread(database.until_blocked)
            return parked

        ending: list[Any] = []
        assert await stations.transact(park_slowly)
        await asyncio.to_thread(ending[0].result, 10)
    assert await stations.state(claim.run_id) == "queued"


async def end_elsewhere(database: ScratchDatabase, claim: Claim) -> None:
    """End a run on another loop and another connection."""
    other = Database(database.url)
    try:
        await Stations(other, database).end(claim, "just then")
    finally:
        await other.close()


async def test_a_parking_during_the_answer_sees_it(stations: Stations, database: ScratchDatabase) -> None:
    claim, (child,) = await stations.spawning("s")
    child_claim = await stations.claim(child, "child")
    parking: list[asyncio.Task[bool]] = []

    async def end_slowly(tx: Transaction) -> None:
        await completion.end_run(tx, child_claim, RunOutcome(state="succeeded", text="just then"))
        parking.append(asyncio.create_task(stations.park(claim)))
        await asyncio.to_thread(database.until_blocked)

    await stations.transact(end_slowly)
    assert not await parking[0]
    assert await stations.state(claim.run_id) == "running"


# Giving back, publishing again


async def test_given_back_it_is_queued_for_anybody(stations: Stations) -> None:
    claim = await stations.claimed("s")
    await stations.give_back(claim)
    row = await stations.run(claim.run_id)
    assert (row["state"], row["worker_id"], row["crashes"]) == ("queued", None, 0)
    assert row["waits_for"] == "the test says so"
    assert (await stations.claim(claim.run_id, worker=uuid4())).attempt == 2


async def test_given_back_for_a_time_it_is_not_claimed_before(stations: Stations) -> None:
    claim = await stations.claimed("s")
    await stations.give_back(claim, wait=3600)
    assert (await why_unclaimed(stations, claim.run_id)) == "not yet"
    assert await publishable(stations) == []


async def publishable(stations: Stations) -> list[UUID]:
    published = await stations.transact(lambda tx: publishing.publishable(tx, first_wait=5.0))
    return [publication.delivery.run for publication in published]


async def test_the_wait_before_the_next_bell_doubles(stations: Stations, database: ScratchDatabase) -> None:
    run = await stations.send("s")
    await stations.place()
    assert await publishable(stations) == []  # published at its placing, and due again after the first wait
    for wait in (10, 20, 40, 80):
        database.query("update chaz.runs set publish_after = now()")
        assert await publishable(stations) == [run]
        assert await publishable(stations) == []
        ahead = database.value("select extract(epoch from publish_after - now())::float8 from chaz.runs")
        assert wait - 2 < ahead <= wait
    database.query("update chaz.runs set publish_after = now(), publishes = 1000")
    assert await publishable(stations) == [run]
    assert database.value("select publish_after - now() <= interval '1 hour' from chaz.runs")


async def test_listeners_share_what_is_to_be_published(stations: Stations, database: ScratchDatabase) -> None:
    for number in range(6):
        await stations.send(f"s{number}", priority=number)
    await stations.place()
    database.query("update chaz.runs set publish_after = now()")
    with database.connect() as other:
        other.execute("select from chaz.runs order by id limit 3 for update")
        assert len(await publishable(stations)) == 3
    assert len(await publishable(stations)) == 3


async def test_the_more_urgent_is_published_first(stations: Stations, database: ScratchDatabase) -> None:
    ids = [await stations.send(f"s{number}", priority=priority) for number, priority in enumerate((0, 5, -5))]
    await stations.place()
    database.query("update chaz.runs set publish_after = now()")
    assert await publishable(stations) == [ids[1], ids[0], ids[2]]


async def test_what_nobody_serves_is_not_published(stations: Stations, database: ScratchDatabase) -> None:
    await stations.send("s", recipient="ghost")
    await stations.place()
    database.query("update chaz.runs set publish_after = now()")
    assert await publishable(stations) == []
    await stations.register("ghost")
    assert len(await publishable(stations)) == 1
