"""Agents that speak to each other: an answer that mentions another agent wakes it, so many times in a row."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import partial
from uuid import UUID

import pytest

from chaz import Chaz, cancelling, interrupts, requeueing, sessionlog, steering
from chaz.aside import Aside
from chaz.completion import end_run
from chaz.entries import OnMessage, session_id
from chaz.errors import StaleAttempt
from chaz.outcomes import RunOutcome
from chaz.routing import BURST
from chaz.runs import Claim, Unclaimed
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.races import unruly
from tests.fixtures.stations import Stations

pytestmark = pytest.mark.anyio

ROOM = ("solo", "parent", "child")


@pytest.fixture
def room(stations: Stations, chaz: Chaz) -> Stations:
    """The stations, with a session ``s`` of three agents, ``solo`` the lead."""
    for agent in ROOM:
        chaz.session("s").attach(agent)
    return stations


async def asked(stations: Stations, text: str = "hello", **fields: object) -> Claim:
    """A person's message in ``s``, and the run at work on it."""
    message = await stations.say("s", text, **fields)
    await stations.place()
    return await stations.claim(message, (await stations.run(message))["agent"])


async def woken(stations: Stations) -> list[tuple[UUID, str, str]]:
    """The runs that wait or are at work in ``s``: id, agent and state."""
    rows = await stations.fetch(
        """
        select id, agent, state from chaz.runs where session_id = %(session)s
            and state in ('pending', 'queued', 'running', 'parked') order by trigger_position
        """,
        session=session_id("s"),
    )
    return [(row["id"], row["agent"], row["state"]) for row in rows]


async def said(stations: Stations, type: str) -> list[str]:
    return [entry.content for entry in await stations.log("s") if entry.type == type]


async def until_quiet(stations: Stations, text: str) -> Counter[str]:
    """Have each run of ``s`` answer with ``text``, until none is left; how many runs each agent had."""
    runs = Counter[str]()
    while found := await woken(stations):
        ((id, agent, _),) = found
        await stations.end(await stations.claim(id, agent), text.format(agent=agent))
        runs[agent] += 1
        assert runs.total() < 50, "they never stop"
    return runs


# Who is woken


async def test_a_mention_wakes_in_the_transaction_that_ends_the_run(room: Stations, chaz: Chaz) -> None:
    handle = chaz.session("s").say("hello")
    await room.place()
    claim = await room.claim(handle.id)
    await room.end(claim, "@Parent, what do you think? And @child?")
    answer = (await room.log("s"))[-1]
    assert (answer.sender, answer.author, answer.run_id) == ("solo", "agent", claim.run_id)
    run = await room.run(answer.id)
    assert (run["agent"], run["state"], run["cause"]) == ("parent", "queued", "message")
    assert (run["trigger_position"], run["parent_run_id"], run["root_run_id"]) == (answer.position, None, answer.id)
    assert (run["depth"], run["interrupts"], run["tenant"]) == (0, None, "")
    # Who asked first has its answer, whatever the others go on to say.
    assert (handle.state, handle.result) == ("succeeded", answer.content)

    second = await room.claim(answer.id, "parent")
    read = partial(
        sessionlog.context_entries, session_id=claim.session_id, run_id=second.run_id, read_to=second.read_to
    )
    conversation, triggers = await room.transact(read)
    assert [entry.content for entry in conversation] == ["hello"]
    assert [entry.id for entry in triggers] == [answer.id]
    await room.end(second, "Nothing.")
    assert await woken(room) == []


@pytest.mark.parametrize(
    "text", ["Done.", "@solo has done it", "@nobody", "mail child@child.example", "`@child`", "```\n@child\n```"]
)
async def test_what_mentions_no_other_agent_wakes_nobody(room: Stations, text: str) -> None:
    await room.end(await asked(room), text)
    assert await woken(room) == []
    assert await said(room, "note") == []


async def test_who_was_detached_is_a_stranger(room: Stations, chaz: Chaz) -> None:
    claim = await asked(room)
    chaz.session("s").detach("child")
    await room.end(claim, "@child, then @parent")
    assert [agent for _, agent, _ in await woken(room)] == ["parent"]


@pytest.mark.parametrize("blank", ["", " \n\t\N{NO-BREAK SPACE}"])
async def test_silence_is_an_answer(room: Stations, blank: str) -> None:
    claim = await asked(room)
    await room.step(claim, text=blank)
    await room.end(claim, blank)
    run = await room.run(claim.run_id)
    assert (run["state"], run["result"]) == ("succeeded", "")
    booked = await room.fetch("select prompt_tokens from chaz.model_calls where run_id = %(run)s", run=run["id"])
    assert booked == [{"prompt_tokens": 1}]
    assert await said(room, "message") == ["hello"]
    assert await woken(room) == []


async def test_a_failure_wakes_nobody(room: Stations) -> None:
    await room.end(await asked(room), "@child broke", state="failed", reason="model")
    assert await woken(room) == []


@pytest.mark.parametrize("says", ["summary", "note"])
async def test_what_is_no_message_wakes_nobody(room: Stations, says: str) -> None:
    await room.end(await asked(room), "@child was told so", says=says)
    assert await woken(room) == []
    assert await room.fetch("select agents_said from chaz.heads") == [{"agents_said": 0}]


async def test_the_last_words_of_an_interrupted_run_wake_nobody(room: Stations, chaz: Chaz) -> None:
    chaz.session("s").configure(on_message="interrupt")
    claim = await asked(room)
    await room.step(claim, text="@child, help")
    newer = await room.say("s", "stop")
    await room.place()
    ((ended, by, _),) = await interrupts.interrupt(room.database, aside=Aside())
    assert (ended, by) == (claim.run_id, newer)
    assert "@child, help" in (await said(room, "message"))[-1]
    assert [id for id, _, _ in await woken(room)] == [newer]
    # Nor do they count.
    assert await said(room, "note") == ["interrupted 'solo' for a newer message"]
    assert await room.fetch("select agents_said from chaz.heads") == [{"agents_said": 0}]


async def test_a_person_named_like_an_agent_is_a_person(room: Stations) -> None:
    claim = await asked(room, "@child and @solo", sender="child")
    assert claim.agent == "child"
    await room.end(claim, "Hm.")
    claim = await asked(room, "@child", sender="child", author="program")
    assert claim.agent == "child"


async def test_a_mention_of_nobody_attached_is_text(room: Stations) -> None:
    claim = await asked(room, "@ada said so")
    assert claim.agent == "solo"
    assert await said(room, "note") == []
    await room.end(claim)
    claim = await asked(room, "you said so", recipient="ada")
    assert claim.agent == "solo"
    assert await said(room, "note") == ["'ada' is not attached to this session; 'solo' answers instead"]


# What a woken run is like


async def test_it_takes_its_turn(room: Stations) -> None:
    claim = await asked(room)
    first = await room.send("s", "before", recipient="solo")
    await room.place()
    await room.end(claim, "@child")
    urgent = await room.send("s", "at once", recipient="solo", priority=5)
    await room.place()
    (_, _, second), (id, agent, third), (_, _, last) = await woken(room)
    assert (second, agent, third, last) == ("queued", "child", "pending", "pending")
    await room.end(await room.claim(first))
    assert await room.state(urgent) == "queued"
    await room.end(await room.claim(urgent))
    assert await room.state(id) == "queued"


async def test_it_coalesces_as_messages_do(room: Stations) -> None:
    claim = await asked(room)
    person = await room.say("s", "@child, look", sender="bob")
    await room.place()
    await room.end(claim, "@child, look")
    mention = (await room.log("s"))[-1].id
    taken = await room.claim(person, "child")
    assert (await room.run(mention))["superseded_by"] == person
    assert await said(room, "note") == ["'child' answers a message besides its own"]
    await room.end(taken)
    assert await woken(room) == []


async def test_whoever_comes_first_sees_what_was_said(room: Stations) -> None:
    claim = await asked(room)
    directive = await room.send("s", "work", recipient="solo")
    await room.place()
    await room.end(claim, "It is 42. @child, is it?")
    busy = await room.claim(directive)
    read = partial(sessionlog.context_entries, session_id=busy.session_id, run_id=busy.run_id, read_to=busy.read_to)
    conversation, triggers = await room.transact(read)
    assert [entry.content for entry in conversation] == ["hello", "It is 42. @child, is it?"]
    assert [entry.content for entry in triggers] == ["work"]


async def test_a_cancelled_run_gives_back_what_an_agent_had_said(room: Stations, chaz: Chaz) -> None:
    claim = await asked(room)
    person = await room.say("s", "@child, look", sender="bob")
    await room.place()
    await room.end(claim, "@child, look")
    mention = (await room.log("s"))[-1].id
    await room.claim(person, "child")
    chaz.cancel(person)
    await cancelling.walk(room.database, aside=Aside())
    assert await room.state(person) == "cancelled"
    await room.end(await room.claim(mention, "child"))
    assert await woken(room) == []


@pytest.mark.parametrize("policy", ["coalesce", "each", "reject", "interrupt", "steer"])
async def test_no_policy_refuses_it_or_has_it_interrupt(room: Stations, chaz: Chaz, policy: OnMessage) -> None:
    chaz.session("s").configure(on_message=policy)
    claim = await asked(room)
    directive = await room.send("s", "work", recipient="child")
    await room.place()
    await room.end(claim, "@child")
    busy = await room.claim(directive, "child")
    assert await interrupts.interrupt(room.database, aside=Aside()) == []
    assert await room.transact(partial(steering.hear, claim=busy, step=1, after=busy.read_to)) == []
    mention = (await room.fetch("select id from chaz.entries where content = '@child'"))[0]["id"]
    assert await room.state(mention) == "pending"
    await room.end(busy)
    assert await room.state(mention) == "queued"


async def test_what_is_paused_is_not_begun(room: Stations, chaz: Chaz) -> None:
    chaz.pause("agent:child")
    await room.end(await asked(room), "@child")
    ((id, _, _),) = await woken(room)
    assert await room.try_to_claim(id, "child") == Unclaimed("held", "paused")
    chaz.resume("agent:child")
    await room.claim(id, "child")


async def test_in_a_child_session_it_has_what_the_session_hands_on(stations: Stations, chaz: Chaz) -> None:
    claim = await stations.claimed("s", recipient="parent")
    await stations.step(claim)
    spawned = await stations.spawn(claim, scope=[["word_*"]], model="scripted:other", max_steps=7, depth_left=3)
    await stations.place()
    child = await stations.claim(spawned, "child")
    chaz.session(id=child.session_id).attach("solo")
    await stations.end(child, "@solo, too")
    (row,) = await stations.fetch("select * from chaz.runs where agent = 'solo'")
    assert (row["parent_run_id"], row["root_run_id"], row["depth"]) == (claim.run_id, claim.run_id, 1)
    inherited = ("scope", "model", "max_steps", "depth_left")
    assert [row[name] for name in inherited] == [[["word_*"]], "scripted:other", 7, 3]
    # Its parent has its answer, and is told once.
    assert [wait["answer"]["content"] for wait in await stations.fetch("select answer from chaz.waits")] == [
        "@solo, too"
    ]


async def test_it_is_requeued_like_any_other(room: Stations) -> None:
    await room.end(await asked(room), "@child, look")
    ((id, _, _),) = await woken(room)
    await room.end(await room.claim(id, "child"), state="failed", reason="model")
    again = await room.claim(await room.transact(partial(requeueing.requeue, run_id=id)), "child")
    read = partial(sessionlog.context_entries, session_id=again.session_id, run_id=again.run_id, read_to=again.read_to)
    _, triggers = await room.transact(read)
    assert [entry.content for entry in triggers] == ["@child, look"]


# The burst


async def test_agents_that_always_mention_each_other_stop(stations: Stations, chaz: Chaz) -> None:
    circle = ["a", "b", "c", "d", "e"]
    await stations.register(*circle)
    for agent in circle:
        chaz.session("s").attach(agent)
    await stations.say("s")
    await stations.place()
    # Of all of them the first that is not the speaker: "a" and "b" in turn.
    everybody = " ".join(f"@{agent}" for agent in circle)
    assert await until_quiet(stations, everybody) == {"a": 4, "b": 3}
    (note,) = await said(stations, "note")
    assert note == (
        "'b' was not woken, though 'a' mentions it: agents have said more than 6 messages since a person or a "
        "directive spoke (the burst is 6)"
    )
    note = (await stations.log("s"))[-1]
    answer = (await stations.log("s"))[-2]
    assert note.metadata == {"entry": str(answer.id), "reason": "burst", "agent": "b"}
    # Until somebody speaks.
    await stations.say("s", "Go on.")
    await stations.place()
    assert (await until_quiet(stations, everybody)).total() == BURST + 1


@pytest.mark.parametrize("burst", [0, 1, 3])
async def test_a_session_says_how_many(room: Stations, chaz: Chaz, burst: int) -> None:
    chaz.session("s").configure(burst=burst)
    chaz.session("s").configure(on_message="each")
    await room.say("s")
    await room.place()
    assert (await until_quiet(room, "@solo @child")).total() == burst + 1
    (note,) = await said(room, "note")
    assert ("the burst is 0" in note) == (burst == 0)


async def test_the_deployment_says_how_many_where_the_session_does_not(room: Stations, chaz: Chaz) -> None:
    none = partial(end_run, outcome=RunOutcome(state="succeeded", text="@child"), burst=0)
    claim = await asked(room)
    await room.transact(partial(none, claim=claim))
    assert await woken(room) == []
    chaz.session("s").configure(burst=5)
    claim = await asked(room)
    await room.transact(partial(none, claim=claim))
    assert len(await woken(room)) == 1


@pytest.mark.parametrize(
    ("fields", "begins_anew"),
    [
        ({}, True),
        ({"author": "program"}, False),
        ({"type": "directive", "recipient": "solo", "author": "program"}, True),
    ],
)
async def test_who_begins_a_burst_anew(room: Stations, chaz: Chaz, fields: dict[str, str], begins_anew: bool) -> None:
    chaz.session("s").configure(burst=1)
    await room.say("s")
    await room.place()
    await until_quiet(room, "@solo @child")
    await room.end(await asked(room, "and now?", **fields), "@child")
    assert [agent for _, agent, _ in await woken(room)] == (["child"] if begins_anew else [])


async def test_silence_errors_and_stale_workers_do_not_count(room: Stations, chaz: Chaz) -> None:
    chaz.session("s").configure(burst=1)
    program = partial(asked, room, author="program")
    await room.end(await program(), " ")
    await room.end(await program(), "@child", state="failed", reason="model")
    claim = await program()
    await room.give_back(claim)
    latest = await room.claim(claim.run_id)
    with pytest.raises(StaleAttempt):
        await room.end(claim, "@child")
    await room.end(latest, "@child")
    assert [agent for _, agent, _ in await woken(room)] == ["child"]
    await until_quiet(room, "@solo")
    assert len(await said(room, "note")) == 1


@pytest.mark.parametrize("policy", ["reject", "steer", "coalesce"])
async def test_a_person_who_speaks_to_a_busy_room_counts_at_once(room: Stations, chaz: Chaz, policy: OnMessage) -> None:
    chaz.session("s").configure(burst=1, on_message=policy)
    await room.end(await asked(room), "@child")
    ((id, _, _),) = await woken(room)
    claim = await room.claim(id, "child")
    await room.say("s", "@child, mind the step")
    await room.place()
    await room.transact(partial(steering.hear, claim=claim, step=1, after=claim.read_to))
    await room.end(claim, "@parent")
    assert "parent" in [agent for _, agent, _ in await woken(room)]


# At the same time


@pytest.mark.parametrize("seed", range(5))
async def test_each_is_answered_once_by_whom_it_is_for(
    room: Stations, chaz: Chaz, database: ScratchDatabase, seed: int
) -> None:
    order = random.Random(seed)
    messages: dict[UUID, str] = {}
    directives: dict[UUID, str] = {}
    chaz.session("s").configure(burst=2)

    async def produce(sender: str) -> None:
        for _ in range(12):
            agent = order.choice(ROOM)
            if order.random() < 0.25:
                directives[await room.send("s", "work", recipient=agent, sender=sender)] = agent
            else:
                messages[await room.say("s", f"@{agent}, please", sender=sender)] = agent
            for _ in range(order.randrange(4)):
                await asyncio.sleep(0)

    async def listen() -> None:
        await room.place()

    async def work() -> None:
        for id, agent, state in await woken(room):
            if state == "queued" and isinstance(claim := await room.try_to_claim(id, agent), Claim):
                await room.end(claim, order.choice(["Done.", " ", *(f"@{other}?" for other in ROOM)]))

    async def until(producing: asyncio.Future[tuple[None, None]]) -> None:
        while not producing.done() or await room.fetch("select from chaz.entries where position is null"):
            await asyncio.gather(listen(), work(), listen())
        while await woken(room):
            await work()

    producing = asyncio.gather(produce("ada"), produce("bob"))
    await until(producing)
    await producing

    assert unruly(database) == []
    rows = await room.fetch("select id, agent, state, superseded_by, cause from chaz.runs")
    runs = {row["id"]: row for row in rows}
    for id, agent in directives.items():
        assert (runs[id]["agent"], runs[id]["state"]) == (agent, "succeeded")
        assert not [row for row in rows if row["superseded_by"] and row["id"] == id]
    for id, agent in messages.items():
        by = runs[runs[id]["superseded_by"] or id]
        assert (by["agent"], by["state"], by["cause"]) == (agent, "succeeded", "message")
    # What agents said to each other is answered once, too, or was suppressed with a note.
    mentions = await room.fetch(
        "select id, sender, content from chaz.entries where author = 'agent' and type = 'message' and content ^@ '@'"
    )
    noted = {entry.metadata["entry"] for entry in await room.log("s") if entry.metadata.get("reason") == "burst"}
    for mention in mentions:
        to_itself = mention["content"] == f"@{mention['sender']}?"
        assert [mention["id"] in runs, str(mention["id"]) in noted, to_itself].count(True) == 1
