"""The hot statements of the stores use their indexes: each is explained as it is run, on tables with some history."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, TypeVar, cast
from uuid import UUID, uuid4

import pytest

from chaz import (
    Budget,
    cancelling,
    children,
    compactions,
    deciding,
    firing,
    interrupts,
    journal,
    listings,
    outbox,
    publishing,
    runs,
    schedules,
    sessionlog,
    steering,
    sweeps,
    usage,
)
from chaz.aside import Aside
from chaz.completion import end_run
from chaz.database import Database, Transaction
from chaz.entries import Bookmark, session_id
from chaz.lineage import Spawn
from chaz.outcomes import RunOutcome, Turn
from chaz.placing import place
from tests.fixtures.postgres import ScratchDatabase, both_servers
from tests.fixtures.schedules import SOLO, Calendar
from tests.fixtures.stations import Stations, a_call

pytestmark = [pytest.mark.anyio, both_servers]

T = TypeVar("T")
WATCHED = {
    *("approvals", "entries", "runs", "waits", "calls", "model_calls", "steps", "workers", "cancellations"),
    *("callbacks", "roster_changes", "schedules", "firings"),
}
TINY: set[str] = {"workers"}
"""Tables that hold a few rows for ever."""
PARTIAL = {
    "approvals_open",
    "approvals_expiry",
    "waits_open",
    "entries_inbox",
    "cancellations_open",
    "runs_to_publish",
    "callbacks_to_tell",
    "runs_of_worker",
    "runs_deadline",
    "runs_expiry",
    "runs_one_active",
    "runs_pending",
    "runs_interrupting",
    "runs_announced",
    "runs_running",
    "schedules_due",
}
"""Indexes that hold only what is to be done, so that reading all of one is fine."""


class Explained:
    """A connection that explains each statement before it runs it."""

    def __init__(self, connection: Transaction, plans: list[dict[str, Any]]) -> None:
        self._connection = connection
        self._plans = plans

    async def execute(self, query: str, parameters: Any = None) -> Any:
        if query.strip().startswith(("select", "with", "update", "insert", "(select")):
            cursor = await self._connection.execute(cast("Any", f"explain (format json) {query}"), parameters)
            (row,) = await cursor.fetchall()
            self._plans.append(row["QUERY PLAN"][0]["Plan"])
        return await self._connection.execute(cast("Any", query), parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class ExplainingDatabase(Database):
    """A database whose transactions are explained."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.plans: list[dict[str, Any]] = []

    @asynccontextmanager
    async def connection(self) -> AsyncGenerator[Transaction]:
        async with super().connection() as connection:
            yield cast("Transaction", Explained(connection, self.plans))

    async def plans_of(self, work: Callable[[Database], Awaitable[object]]) -> str:
        """The plans of what ``work`` runs, none of which reads a whole big table."""
        self.plans.clear()
        await work(self)
        assert self.plans
        for plan in self.plans:
            assert not (read := set(whole_tables(plan))), f"reads all of {read}: {json.dumps(plan, indent=1)}"
        return json.dumps(self.plans)


def whole_tables(plan: dict[str, Any]) -> list[str]:
    """The watched tables that the plan reads from end to end."""
    mine = [plan["Relation Name"]] if plan["Node Type"] == "Seq Scan" and "Filter" in plan else []
    if plan["Node Type"].endswith("Index Scan") and not ("Index Cond" in plan or PARTIAL & {plan.get("Index Name")}):
        mine.append(f"{plan.get('Relation Name')} by {plan['Index Name']}")
    below = [name for child in plan.get("Plans", []) for name in whole_tables(child)]
    return [name for name in mine + below if name.split()[0] in WATCHED - TINY]


def nodes(plans: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """All nodes of the plans."""
    for plan in plans:
        yield plan
        yield from nodes(plan.get("Plans", []))


@pytest.fixture
async def history(stations: Stations) -> None:
    """100 sessions with 60 placed entries and 20 ended runs each; in one of them, work waits."""
    stations.scratch.query(
        """
        with s as (
            insert into chaz.sessions (id, name)
            select chaz.session_id('s' || n), 's' || n from generate_series(1, 100) n returning id),
        h as (
            insert into chaz.heads (session_id, next_position) select id, 61 from s),
        e as (
            insert into chaz.entries (session_id, position, seq, type, sender, author, recipient, content, run_id)
            select id, n, 0, case when n % 30 = 0 then 'summary' else 'directive' end, 'ada', 'program', 'solo', 'x',
                case when n % 3 = 0 then gen_random_uuid() end
            from s, generate_series(1, 60) n)
        insert into chaz.runs (id, session_id, agent, state, cause, root_run_id, deadline, ended_at, started_at)
        select gen_random_uuid(), id, 'solo', 'succeeded', 'directive', gen_random_uuid(), now(), now(), now()
        from s, generate_series(1, 20)
        """
    )
    stations.scratch.query(
        """
        insert into chaz.roster_changes (session_id, agent, change)
        select id, 'agent ' || n, case when n < 5 then 'attach' else 'lead' end
        from chaz.sessions, generate_series(1, 5) n
        """
    )
    stations.scratch.query(
        """
        with stored as (
            insert into chaz.steps (run_id, step, attempt, version, read_to, turn)
            select id, 0, 1, 'v1', 1, '{}' from chaz.runs),
        booked as (
            insert into chaz.model_calls (run_id, step, attempt, try, tenant, session_id, root_run_id, agent, model,
                prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens, cost, created_at)
            select id, step, 1, 0, '', session_id, root_run_id, agent, 'scripted', 1, 1, 0, 0, 0,
                now() - random() * interval '100 days'
            from chaz.runs, generate_series(0, 2) step),
        called as (
            insert into chaz.calls (run_id, step, ordinal, call_id, tool, arguments, attempt, state, outcome, result,
                call_position, call_seq, result_position, result_seq)
            select id, 0, 0, 'c', 't', '{}', 1, 'done', 'ok', '', 1, 1, 1, 2 from chaz.runs)
        insert into chaz.waits (run_id, step, ordinal, kind, child_run_id, answer, answered_at)
        select id, 0, 0, 'child', gen_random_uuid(), '{}', now() from chaz.runs
        """
    )
    stations.scratch.query(
        """
        insert into chaz.cancellations (run_id, cancelled_by, done_at) select id, 'ada', now() from chaz.runs
        """
    )
    stations.scratch.query(
        """
        insert into chaz.callbacks (run_id, target) select id, '{"kind": "webhook", "url": "http://x/"}' from chaz.runs
        """
    )
    stations.scratch.query(
        """
        insert into chaz.approvals (id, kind, run_id, step, ordinal, tenant, session_id, agent, tool, risk, shown,
            digest, approvers, expires_at, decision, decided_by, decided_at)
        select gen_random_uuid(), 'approval', id, 0, n, '', session_id, 'solo', 't', 'low', '', '', '{}', now(),
            'approve', 'ada', now()
        from chaz.runs, generate_series(1, 5) n
        """
    )
    stations.scratch.query(
        """
        with s as (
            insert into chaz.schedules (key, agent, id, prompt, every, next_slot, next_at, created_by, changed_by)
            select gen_random_uuid(), 'a' || n % 100, n::text, 'x', '1 hour', now() + n * interval '1 minute',
                now() + n * interval '1 minute', 'ada', 'ada'
            from generate_series(1, 1000) n returning key)
        insert into chaz.firings (schedule, slot, run_id) select key, now() + n * interval '1 hour', gen_random_uuid()
        from s, generate_series(1, 10) n
        """
    )
    for text in ("one", "two", "three"):
        await stations.send("s7", text)
    await stations.place()
    await stations.send("s8", "unplaced")
    stations.scratch.query("analyze")


@pytest.fixture
async def explaining(history: None, database: ScratchDatabase) -> AsyncGenerator[ExplainingDatabase]:
    opened = ExplainingDatabase(database.url)
    await opened.open()
    yield opened
    await opened.close()


async def first_run(stations: Stations) -> UUID:
    (row,) = await stations.fetch("select id from chaz.runs where state = 'queued'")
    return row["id"]


async def test_looking_for_work(explaining: ExplainingDatabase) -> None:
    plans = await explaining.plans_of(sweeps.due)
    assert "entries_inbox" in plans
    assert "runs_to_publish" in plans


async def test_placing(explaining: ExplainingDatabase) -> None:
    plans = await explaining.plans_of(
        lambda database: database.transact(lambda tx: place(tx, default_agent="", first_wait=5))
    )
    assert "entries_inbox" in plans


async def test_publishing(explaining: ExplainingDatabase) -> None:
    plans = await explaining.plans_of(
        lambda database: database.transact(lambda tx: publishing.publishable(tx, first_wait=5))
    )
    assert "runs_to_publish" in plans


async def test_publishing_from_a_long_queue(explaining: ExplainingDatabase, stations: Stations) -> None:
    stations.scratch.query(
        """
        insert into chaz.runs
            (id, session_id, tenant, agent, state, cause, root_run_id, deadline, publish_after, publishes)
        select gen_random_uuid(), gen_random_uuid(), 't' || n % 3, 'solo', 'queued', 'directive', gen_random_uuid(),
            now() + interval '1 hour', now() - n * interval '1 second', n % 2
        from generate_series(1, 300) n
        """
    )
    stations.scratch.query("analyze chaz.runs")

    async def place_and_publish(tx: Transaction) -> None:
        await publishing.room_at_once(tx, ["", "t1"])
        assert len(await publishing.publishable(tx, first_wait=5)) == 200

    await explaining.plans_of(sweeps.due)
    await explaining.plans_of(lambda database: database.transact(place_and_publish))


async def test_interrupting_and_hearing(explaining: ExplainingDatabase, stations: Stations) -> None:
    claims = {policy: await stations.claimed(policy) for policy in ("interrupt", "steer")}
    for policy in claims:
        stations.scratch.query("update chaz.sessions set on_message = name where name = %(name)s", name=policy)
        await stations.say(policy)
    await stations.place()
    steered = claims["steer"]

    async def hear(database: Database) -> None:
        assert await database.transact(lambda tx: steering.is_spoken_to(tx, steered, after=steered.read_to))
        await database.transact(lambda tx: steering.hear(tx, steered, step=1, after=steered.read_to))

    await explaining.plans_of(hear)
    await explaining.plans_of(lambda database: interrupts.interrupt(database, aside=Aside()))
    assert await stations.state(claims["interrupt"].run_id) == "cancelled"


async def test_compacting(explaining: ExplainingDatabase, stations: Stations) -> None:
    claim = await stations.claim(await first_run(stations))
    await stations.step(claim, a_call("compact"))

    async def ask_read_and_end(database: Database) -> None:
        place: dict[str, Any] = {"step": 0, "ordinal": 0, "call": a_call("compact")}
        await database.transact(lambda tx: compactions.request(tx, claim, **place))
        await database.transact(lambda tx: compactions.uncovered(tx, claim))
        outcome = RunOutcome(state="succeeded", text="done", says="summary", metadata={"covers": claim.read_to})
        await database.transact(lambda tx: compactions.end_run(tx, claim, outcome, full_from=1))

    plans = await explaining.plans_of(ask_read_and_end)
    for index in ("entries_inbox", "entries_said", "entries_marks", "runs_one_active", "runs_pending"):
        assert index in plans


async def test_claiming_reading_and_ending(explaining: ExplainingDatabase, stations: Stations) -> None:
    run, worker = await first_run(stations), uuid4()
    stations.beat(timedelta(hours=1), worker)

    async def claim_read_and_end(database: Database) -> None:
        claim = await database.transact(
            lambda tx: runs.claim(tx, run, agent="solo", worker_id=worker, claim_id=uuid4())
        )
        assert isinstance(claim, runs.Claim)
        await database.transact(
            lambda tx: sessionlog.context_entries(tx, session_id=claim.session_id, run_id=run, read_to=claim.read_to)
        )
        await database.transact(lambda tx: end_run(tx, claim, RunOutcome(state="succeeded", text="done, @child")))

    stations.scratch.query("select chaz.attach(session_id::text, 'child') from chaz.runs where id = %(run)s", run=run)
    plans = await explaining.plans_of(claim_read_and_end)
    assert "runs_pending" in plans
    assert "entries_said" in plans
    assert "entries_marks" in plans
    assert await stations.state(run) == "succeeded"


async def test_reading_a_conversation_walks_over_nothing_else(
    explaining: ExplainingDatabase, stations: Stations
) -> None:
    stations.scratch.query(
        """
        insert into chaz.entries (session_id, position, seq, type, sender, author, content)
        select chaz.session_id('s7'), 10 + n, 0, 'ack', 'solo', 'agent', '' from generate_series(100, 10000) n
        """
    )
    stations.scratch.query("update chaz.heads set next_position = 20000 where session_id = chaz.session_id('s7')")
    stations.scratch.query("analyze chaz.entries")
    claim = await stations.claim(await first_run(stations))

    plans = await explaining.plans_of(
        lambda database: database.transact(
            partial(sessionlog.context_entries, session_id=claim.session_id, run_id=claim.run_id, read_to=claim.read_to)
        )
    )

    assert "entries_said" in plans
    assert "entries_marks" in plans
    by_place = [plan for plan in nodes(explaining.plans) if plan.get("Index Name") == "entries_place"]
    assert all('"position" =' in plan["Index Cond"] for plan in by_place), plans


async def test_reserving_spawning_and_asking(explaining: ExplainingDatabase, stations: Stations) -> None:
    claim = await stations.claim(await first_run(stations))
    call = a_call("spawn_agent")

    async def spawn_and_ask(database: Database) -> None:
        await database.transact(
            lambda tx: journal.reserve(
                tx, claim, step=0, tokens=1, cost=Decimal(1), budget=Budget(steps=9), model="scripted"
            )
        )
        await database.transact(
            lambda tx: journal.store_step(tx, claim, step=0, turn=Turn(), version="v1", model="scripted", cost=None)
        )
        await database.transact(
            lambda tx: children.start_spawn(tx, claim, step=0, ordinal=0, call=call, spawn=Spawn("child", "do it"))
        )
        child = children.child_id(claim.run_id, 0, 0)
        await database.transact(lambda tx: children.ask_for(tx, claim, step=0, ordinal=1, call=call, child=child))

    await explaining.plans_of(spawn_and_ask)
    assert len(await stations.fetch("select from chaz.waits where answer is null")) == 2


async def test_reading_a_log_past_a_position(explaining: ExplainingDatabase) -> None:
    plans = await explaining.plans_of(lambda database: sessionlog.entries(database, session_id("s9"), Bookmark(50)))
    assert "entries_place" in plans


async def test_following_a_log(explaining: ExplainingDatabase) -> None:
    follower = sessionlog.Follower(explaining, session_id("s9"), after=Bookmark(50))
    plans = await explaining.plans_of(lambda _: follower.next())
    assert "entries_place" in plans


async def test_asking_for_a_run(explaining: ExplainingDatabase, stations: Stations) -> None:
    run = await first_run(stations)
    await explaining.plans_of(lambda database: runs.status(database, [run]))


async def test_going_on_from_a_bookmark(explaining: ExplainingDatabase, stations: Stations) -> None:
    mark = Bookmark(50, {await first_run(stations): 1})
    await explaining.plans_of(lambda database: sessionlog.entries(database, session_id("s9"), mark))


async def test_asking_for_children(explaining: ExplainingDatabase, stations: Stations) -> None:
    run = await first_run(stations)
    plans = await explaining.plans_of(lambda database: runs.children(database, run))
    assert "runs_children" in plans


async def test_asking_for_usage(explaining: ExplainingDatabase, stations: Stations) -> None:
    run = await first_run(stations)
    since = datetime.now(UTC) - timedelta(days=1)
    for wanted, index in [
        (usage.UsageFilter(since=since), "model_calls_created"),
        (usage.UsageFilter(session_id=session_id("s9")), "model_calls_session"),
        (usage.UsageFilter(root_run_id=run), "model_calls_tree"),
    ]:
        plans = await explaining.plans_of(
            lambda database, wanted=wanted: usage.by(database, ["agent", "session", "day"], wanted)
        )
        assert index in plans
    plans = await explaining.plans_of(lambda database: usage.of_runs(database, [run]))
    assert "model_calls_" in plans


async def test_taking_what_is_to_be_told(explaining: ExplainingDatabase, stations: Stations) -> None:
    plans = await explaining.plans_of(outbox.take)
    assert "callbacks_to_tell" in plans


async def test_drawing_a_tree(explaining: ExplainingDatabase, stations: Stations) -> None:
    run = await first_run(stations)
    plans = await explaining.plans_of(lambda database: listings.tree_of(database, run))
    assert "runs_tree" in plans


async def test_sweeping(explaining: ExplainingDatabase) -> None:
    await explaining.plans_of(sweeps.rescue_lost)
    plans = await explaining.plans_of(lambda database: sweeps.close_late(database, grace=10, lease=15, aside=Aside()))
    assert "runs_deadline" in plans


async def test_cancelling(explaining: ExplainingDatabase, stations: Stations) -> None:
    run = await first_run(stations)
    stations.scratch.query(
        """
        insert into chaz.sessions (id, parent_run_id) select gen_random_uuid(), gen_random_uuid()
        from generate_series(1, 3000)
        """
    )
    stations.scratch.query("analyze chaz.sessions")

    async def ask_and_walk(database: Database) -> None:
        await database.transact(lambda tx: cancelling.request(tx, run))
        assert (await cancelling.walk(database, aside=Aside())).settled == 1

    plans = await explaining.plans_of(ask_and_walk)
    assert "cancellations_open" in plans
    assert "sessions_children" in plans
    assert await stations.state(run) == "cancelled"


async def test_asking_people_and_their_words(explaining: ExplainingDatabase, stations: Stations) -> None:
    _, first = await stations.asking("asking", calls=3)
    claim, second = await stations.asking("asking too")
    requests = first + second
    stations.scratch.query(
        "update chaz.approvals set expires_at = now() - interval '1 s' where id = %(id)s", id=requests[-1]
    )

    def send(id: UUID, word: deciding.Word, by: str | None, reason: str) -> None:
        raise AssertionError

    plans = await explaining.plans_of(sweeps.due)
    assert "approvals_expiry" in plans
    await explaining.plans_of(lambda database: sweeps.time_out_requests(database, aside=Aside()))
    await explaining.plans_of(lambda database: deciding.waiting(database, send, tenant=""))
    await explaining.plans_of(lambda database: deciding.waiting(database, send, tenant="", session_id=claim.session_id))
    sent = await stations.transact(lambda tx: deciding.decide(tx, requests[0], "deny", "ada"))
    assert sent is not None
    await stations.transact(lambda tx: deciding.decide(tx, requests[1], "approve_all", "ada"))
    await explaining.plans_of(lambda database: deciding.no_effect(database, sent))
    await explaining.plans_of(lambda database: database.transact(lambda tx: place(tx, default_agent="", first_wait=5)))
    await explaining.plans_of(lambda database: database.transact(lambda tx: journal.load(tx, claim.run_id)))
    await explaining.plans_of(lambda database: deciding.request(database, requests[0], send))
    decided = await stations.fetch("select from chaz.approvals where decision <> 'approve' or reason is not null")
    assert len(decided) == len(requests)


async def test_schedules(explaining: ExplainingDatabase, calendar: Calendar) -> None:
    stations = calendar.stations
    await stations.end(await stations.claimed("pinned"))
    await calendar.add(session="pinned", max_failures=1)
    calendar.come_due()
    plans = await explaining.plans_of(sweeps.due)
    assert "schedules_due" in plans
    plans = await explaining.plans_of(lambda database: firing.fire_due(database, grace=60, aside=Aside()))
    assert "schedules_due" in plans
    (fired,) = await calendar.history()
    claim = await stations.claim(fired["run_id"])
    failed = RunOutcome(state="failed", reason="model", text="no answer")
    plans = await explaining.plans_of(lambda database: database.transact(lambda tx: end_run(tx, claim, failed)))
    assert "firings_run" in plans
    assert not (await calendar.row())["enabled"]
    await explaining.plans_of(lambda database: schedules.history(database, SOLO, "daily", tenant=""))
    await explaining.plans_of(lambda database: schedules.listed(database, tenant="", agent=SOLO))
