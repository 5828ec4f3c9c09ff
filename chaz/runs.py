"""The store of runs: made, published, claimed, parked, given back. Their end is in ``completion.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Literal, LiteralString
from uuid import UUID

from chaz import budgets, limits
from chaz.channels import BELL
from chaz.database import Database, Row, Transaction
from chaz.deliveries import RunDelivery
from chaz.errors import StaleAttempt
from chaz.outcomes import FINAL_STATES

CRASH_LIMIT = 10
"""Workers lost under a run, in a row and without a new step, before it is given up."""
GIVEN_UP: LiteralString = "(r.lost_alone or r.crashes >= 10)"
"""That, as a condition on ``chaz.runs r``: a sweep closes such a run, and none publishes it.

A suspect run (a worker was lost during a call of it) gets one more try, alone, where there is an isolation worker.
"""

ISOLATED: LiteralString = """
    exists (select from chaz.workers i where i.isolation and i.expires_at > now() - interval '1 minute')
"""
"""Whether there is an isolation worker; its process may have just been taken down, and comes back."""

PAUSED: LiteralString = """
    exists (select from chaz.pauses p where p.kind = 'all' or (p.kind = 'agent' and p.name = r.agent)
        or (p.kind = 'session' and p.name = r.session_id::text))
"""
AT_CAP: LiteralString = """
    exists (select from chaz.agents a where a.name = r.agent and a.max_concurrent <= (
        select count(*) from chaz.runs o where o.state = 'running' and o.agent = a.name))
"""
"""Whether a run of ``chaz.runs r`` may not start now: it is paused, or its agent has as many running as it may."""

TAKEN_BACK: LiteralString = "exists (select from chaz.cancellations c where c.run_id = p.id)"
"""Whether a pending ``chaz.runs p`` is to be cancelled: no other run takes it along, and it interrupts none."""
INTERRUPTING: LiteralString = f"""
    p.state = 'pending' and p.interrupts is not null and not {TAKEN_BACK} and not exists (
        select from chaz.pauses where kind = 'all' or (kind = 'agent' and name = p.agent)
            or (kind = 'session' and name = p.session_id::text))
"""
"""Whether ``chaz.runs p`` is to take the place of the run that it names. What is paused ends nobody's work."""

LIMITED: LiteralString = f"({budgets.LIMITED} or exists (select from chaz.limits l where {limits.OF_THE_RUN}))"
"""Whether each turn of ``chaz.runs r`` has to be reserved: its tree has a budget, or there is a limit for it."""

DEFAULT_TIMEOUT = timedelta(hours=1)
"""A run's time where neither its producer nor its agent says."""


@dataclass(frozen=True)
class Attempt:
    """What a write of a run names: only the latest attempt of a running run may write."""

    run_id: UUID
    attempt: int


@dataclass(frozen=True)
class Claim(Attempt):
    """One attempt at a run, as its worker holds it."""

    session_id: UUID
    tenant: str
    agent: str
    cause: str
    prompt: str | None
    """What a schedule tells the run, which then answers no entry."""
    ack_position: int
    read_to: int
    parent_run_id: UUID | None
    root_run_id: UUID
    depth: int
    depth_left: int | None
    scope: list[list[str]] | None
    model: str | None
    max_steps: int | None
    limited: bool
    """Whether its tree has a budget, or there is a limit for it."""
    seconds_left: float
    """To the deadline, by the database's clock, at the moment of the claim."""

    @property
    def is_top(self) -> bool:
        """Whether it is its tree's root, or was requeued in its place: its agent's own budget is the tree's."""
        return self.depth == 0


@dataclass(frozen=True)
class Unclaimed:
    """Why a delivery came to nothing."""

    why: Literal["unknown", "other agent", "not queued", "not yet", "held", "cancelled"]
    state: str = ""

    @property
    def goes_on(self) -> bool:
        """Whether the run is known, and not over."""
        return self.why in {"not queued", "not yet", "held"} and self.state not in FINAL_STATES | {"superseded"}


@dataclass(frozen=True)
class Publication:
    """A run to be announced on its agent's queue."""

    delivery: RunDelivery
    queue: str
    priority: int


def publication(row: Row) -> Publication:
    """The publication of a run's row with its agent's ``queue``."""
    return Publication(
        RunDelivery(run=row["id"], agent=row["agent"], session=row["session_id"], parent=row["parent_run_id"]),
        row["queue"],
        row["priority"],
    )


async def claim(tx: Transaction, run_id: UUID, *, agent: str, worker_id: UUID, claim_id: UUID) -> Claim | Unclaimed:
    """Make the run this worker's, under its session's head, with an ``ack`` entry.

    The first claim freezes what the run sees (``read_to``) and supersedes the pending message runs of the same agent
    up to there, which one ``note`` names: coalescing is decided here and nowhere else. A worker whose lease has run
    out claims nothing, and a suspect run is the isolation worker's only: brokers redeliver to anybody what a dead
    worker had not acknowledged. What is paused or beyond its agent's cap stays queued, and is due to be published as
    soon as it may start. What is to be cancelled is not claimed any more.
    With the ``claim_id`` of a claim whose commit was in doubt, that claim, if it came through.
    """
    async with tx.pipeline():
        # Two claims of a capped agent count one after the other, each in a snapshot younger than this lock.
        await tx.execute(
            """
            select from chaz.heads h join chaz.agents a on a.name = %(agent)s and a.max_concurrent is not null
            where h.session_id = (select session_id from chaz.runs where id = %(run)s) for update of h, a
            """,
            {"run": run_id, "agent": agent},
        )
        claimed = await tx.execute(
            f"""
            with head as (
                select session_id, next_position as position from chaz.heads
                where session_id = (select session_id from chaz.runs where id = %(run)s) for update),
            claimed as (
                update chaz.runs r set state = 'running', attempt = attempt + 1, worker_id = %(worker)s,
                    claim = %(claim)s, ack_position = position, read_to = coalesce(read_to, position - 1),
                    waits_for = null, started_at = coalesce(started_at, clock_timestamp())
                from head
                where id = %(run)s and agent = %(agent)s and state = 'queued'
                    and exists (
                        select from chaz.workers w where w.id = %(worker)s and w.expires_at > clock_timestamp()
                            and (w.isolation or not (r.suspect and {ISOLATED})))
                    and (not_before is null or not_before <= clock_timestamp())
                    and not {PAUSED} and not {AT_CAP}
                    and not exists (select from chaz.cancellations c where c.run_id = r.id)
                returning r.*),
            acked as (
                insert into chaz.entries (tenant, session_id, position, type, sender, author, content, metadata, run_id)
                select tenant, session_id, ack_position, 'ack', agent, 'agent', '',
                    jsonb_build_object('attempt', attempt), id
                from claimed),
            moved as (
                update chaz.heads set next_position = next_position + 1
                where session_id = (select session_id from claimed))
            select *, {LIMITED} as limited, extract(epoch from deadline - clock_timestamp())::float8 as seconds_left
            from claimed r
            """,
            {"run": run_id, "agent": agent, "worker": worker_id, "claim": claim_id},
        )
        # A statement of its own: its snapshot must not be older than the head's lock.
        await tx.execute(
            f"""
            with taken as (
                update chaz.runs p set state = 'superseded', superseded_by = r.id
                from chaz.runs r join chaz.sessions s on s.id = r.session_id
                where r.id = %(run)s and r.claim = %(claim)s and r.attempt = 1 and r.cause = 'message'
                    and s.on_message <> 'each'
                    and p.session_id = r.session_id and p.state = 'pending' and p.cause = 'message'
                    and p.agent = r.agent and p.trigger_position <= r.read_to
                    and (p.not_before is null or p.not_before <= clock_timestamp())
                    and not {TAKEN_BACK}
                returning p.id, p.trigger_position, r.session_id, r.tenant, r.agent),
            told as (
                select session_id, tenant, agent, count(*) as messages,
                    jsonb_agg(id order by trigger_position) as entries
                from taken group by session_id, tenant, agent),
            moved as (
                update chaz.heads h set next_position = h.next_position + 1
                from told where h.session_id = told.session_id returning h.next_position - 1 as position)
            insert into chaz.entries (tenant, session_id, position, type, sender, author, content, metadata)
            select tenant, session_id, position, 'note', 'chaz', 'system',
                format('%%L answers %%s besides its own', agent,
                    case messages when 1 then 'a message' else messages || ' messages' end),
                jsonb_build_object('entries', entries, 'reason', 'coalesced', 'run', %(run)s::uuid)
            from told cross join moved
            """,
            {"run": run_id, "claim": claim_id},
        )
    row = await claimed.fetchone() or await _claimed_before(tx, run_id, claim_id)
    if row is None:
        return await _why_unclaimed(tx, run_id, agent, worker_id)
    names = Claim.__dataclass_fields__.keys() - {"run_id"}
    return Claim(run_id=row["id"], **{name: row[name] for name in names})


async def _claimed_before(tx: Transaction, run_id: UUID, claim_id: UUID) -> Row | None:
    cursor = await tx.execute(
        f"""
        select *, {LIMITED} as limited, extract(epoch from deadline - clock_timestamp())::float8 as seconds_left
        from chaz.runs r where id = %(run)s and claim = %(claim)s
        """,
        {"run": run_id, "claim": claim_id},
    )
    return await cursor.fetchone()


async def _why_unclaimed(tx: Transaction, run_id: UUID, agent: str, worker_id: UUID) -> Unclaimed:
    cursor = await tx.execute(
        f"""
        select r.state, r.agent, c.run_id is not null as to_be_cancelled,
            case when r.not_before > clock_timestamp() then 'its time has not come'
                when w.id is null then 'the lease of this worker has run out'
                when r.suspect and not w.isolation and {ISOLATED} then 'it is to run alone' end as not_yet,
            case when {PAUSED} then 'paused'
                when a.max_concurrent is not null then 'its agent is at its cap' end as held
        from chaz.runs r left join chaz.agents a on a.name = r.agent left join chaz.cancellations c on c.run_id = r.id
            left join chaz.workers w on w.id = %(worker)s and w.expires_at > clock_timestamp()
        where r.id = %(run)s
        """,
        {"run": run_id, "worker": worker_id},
    )
    row = await cursor.fetchone()
    if row is None:
        return Unclaimed("unknown")
    if row["agent"] != agent:
        return Unclaimed("other agent", row["agent"])
    if row["state"] == "cancelled" or (row["state"] == "queued" and row["to_be_cancelled"]):
        return Unclaimed("cancelled")
    if row["state"] != "queued":
        return Unclaimed("not queued", row["state"])
    if row["not_yet"] is None and row["held"]:
        # This delivery is spent. Nothing is published while it is held, and then this at once.
        await ring_again(tx, run_id)
        return Unclaimed("held", row["held"])
    return Unclaimed("not yet", row["not_yet"] or "what stood in its way has just gone")


@dataclass(frozen=True)
class Number:
    """The place of an audit event in its run, and when it was counted, on the database's clock."""

    seq: int
    at: datetime


async def fence(tx: Transaction, attempt: Attempt, *, event_body: str | None = None) -> Number:
    """The one statement that guards each write of a run, in the transaction that does the work.

    Refuses a stale attempt (StaleAttempt), and numbers an audit event and extends the digest by it. Returns the
    number. It locks the run's row, so that the writes of one run are in one order.
    """
    row = await (
        await tx.execute(
            """
            update chaz.runs set
                event_seq = event_seq + case when %(body)s::text is null then 0 else 1 end,
                digest = case when %(body)s::text is null then digest
                    else sha256(digest || convert_to(%(body)s, 'UTF8')) end
            where id = %(run)s and attempt = %(attempt)s and state = 'running'
            returning event_seq, clock_timestamp() as at
            """,
            {"run": attempt.run_id, "attempt": attempt.attempt, "body": event_body},
        )
    ).fetchone()
    if row is None:
        raise StaleAttempt(attempt.run_id, attempt.attempt)
    return Number(row["event_seq"], row["at"])


async def park(tx: Transaction, attempt: Attempt, *, waits_for: str) -> bool:
    """Let go of the run until what it waits for is answered; False if all of it has been answered already.

    An answer locks the same row, so none falls between the look and the parking.
    """
    await fence(tx, attempt)
    row = await (
        await tx.execute(
            """
            update chaz.runs set state = 'parked', worker_id = null, claim = null, waits_for = %(waits_for)s
            where id = %(run)s and exists (select from chaz.waits where run_id = %(run)s and answer is null)
            returning id
            """,
            {"run": attempt.run_id, "waits_for": waits_for},
        )
    ).fetchone()
    return row is not None


async def go_on(tx: Transaction, ids: Sequence[UUID]) -> None:
    """Queue each of these runs that is parked and has no wait left open. Their rows are locked."""
    await tx.execute(
        """
        update chaz.runs r set state = 'queued', queued_at = clock_timestamp(), publishes = 0,
            publish_after = clock_timestamp(), waits_for = null, not_before = null
        where id = any(%(ids)s) and state = 'parked'
            and not exists (select from chaz.waits w where w.run_id = r.id and w.answer is null)
        """,
        {"ids": list(ids)},
    )


async def has_left(tx: Transaction, attempt: Attempt) -> bool | None:
    """True if this attempt has parked, given back or ended the run already, else None. Raises StaleAttempt."""
    cursor = await tx.execute(
        "select attempt, state from chaz.runs where id = %(run)s for update", {"run": attempt.run_id}
    )
    row = await cursor.fetchone()
    if row is None or row["attempt"] != attempt.attempt:
        raise StaleAttempt(attempt.run_id, attempt.attempt)
    return True if row["state"] != "running" else None


async def give_back(
    tx: Transaction, attempt: Attempt, *, wait: float = 0, reason: str = "", cleared: bool = False
) -> None:
    """Queue the run again for any worker, not before ``wait`` seconds from now; ``cleared`` of its suspicion, if so."""
    await fence(tx, attempt)
    await budgets.release(tx, attempt.run_id)
    await tx.execute(
        """
        update chaz.runs set state = 'queued', worker_id = null, claim = null, waits_for = %(reason)s,
            not_before = clock_timestamp() + %(wait)s, publish_after = clock_timestamp() + %(wait)s,
            publishes = 0, queued_at = clock_timestamp(), suspect = suspect and not %(cleared)s
        where id = %(run)s
        """,
        {"run": attempt.run_id, "wait": timedelta(seconds=wait), "reason": reason or None, "cleared": cleared},
    )


async def ring_again(tx: Transaction, run_id: UUID, *, wait: float = 0) -> None:
    """Have a queued run published again in ``wait`` seconds: its delivery came, and could not be taken.

    It was not lost, so it is no reason to wait longer with the next.
    """
    await tx.execute(
        """
        update chaz.runs set publishes = 0, publish_after = greatest(clock_timestamp() + %(wait)s, not_before)
        where id = %(run)s and state = 'queued'
        """,
        {"run": run_id, "wait": timedelta(seconds=wait)},
    )
    if not wait:
        # Who made room for it may have rung while it still counted as announced.
        await tx.execute("select pg_notify(%(bell)s, '')", {"bell": BELL})


@dataclass(frozen=True)
class Served:
    """An agent as its workers say it is."""

    name: str
    queue: str
    version: str
    max_steps: int
    timeout: timedelta
    tools: Sequence[str] | None = None
    """The names of all its tools; None, as of ``models``: not said, and nothing is checked against it."""
    models: Sequence[str] | None = None
    """Globs of the models that it may be run with."""
    max_concurrent: int | None = None
    """So many of its runs are running at once; None: any number."""


async def register_agents(tx: Transaction, agents: Sequence[Served]) -> None:
    """Say that this process serves these agents."""
    for agent in sorted(agents, key=lambda agent: agent.name):
        facts = asdict(agent)
        # psycopg makes arrays of lists only.
        facts |= {name: list(facts[name]) for name in ("tools", "models") if facts[name] is not None}
        await tx.execute(
            """
            insert into chaz.agents (name, queue, version, max_steps, timeout, tools, models, max_concurrent)
            values (%(name)s, %(queue)s, %(version)s, %(max_steps)s, %(timeout)s, %(tools)s::text[], %(models)s::text[],
                %(max_concurrent)s)
            on conflict (name) do update set queue = excluded.queue, version = excluded.version,
                max_steps = excluded.max_steps, timeout = excluded.timeout, tools = excluded.tools,
                models = excluded.models, max_concurrent = excluded.max_concurrent, seen_at = clock_timestamp()
            """,
            facts,
        )


async def status(database: Database, ids: Sequence[UUID]) -> dict[UUID, Row]:
    """State and outcome of runs, by the ids asked for; a superseded run answers with the run that took it.

    An id whose entry is placed and woke nobody has the state ``nobody``, one not yet placed ``pending``; an unknown
    id is missing.
    """
    rows = await database.fetch(
        """
        with recursive asked as (
            select unnest(%(ids)s::uuid[]) as id
        ), followed as (
            select asked.id as asked, r.id, r.state, r.superseded_by from asked join chaz.runs r on r.id = asked.id
            union all
            select f.asked, r.id, r.state, r.superseded_by from followed f join chaz.runs r on r.id = f.superseded_by
        )
        select f.asked, r.id, r.session_id, r.agent, r.state, r.result, r.reason, r.attempt, r.parent_run_id,
            r.root_run_id, r.created_at, r.started_at, r.ended_at, r.waits_for
        from followed f join chaz.runs r on r.id = f.id where f.superseded_by is null
        union all
        select e.id, e.id, e.session_id, e.recipient, case when e.position is null then 'pending' else 'nobody' end,
            null, null, 0, null, null, e.created_at, null, null, null
        from asked join chaz.entries e on e.id = asked.id
        where not exists (select from chaz.runs r where r.id = asked.id)
        """,
        {"ids": list(ids)},
    )
    return {row["asked"]: row for row in rows}


async def children(database: Database, run_id: UUID) -> list[UUID]:
    """The runs that a run has spawned, oldest first; also those whose directive no listener has placed yet."""
    rows = await database.fetch(
        """
        select id, min(created_at) as at from (
            select id, created_at from chaz.runs where parent_run_id = %(run)s
            union all
            select id, created_at from chaz.entries where run_id = %(run)s and type = 'directive' and author = 'agent'
        ) as spawned group by id order by at, id
        """,
        {"run": run_id},
    )
    return [row["id"] for row in rows]
