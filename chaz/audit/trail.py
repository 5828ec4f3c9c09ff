"""Is the audit trail complete and unaltered? What runs counted and hashed, against what consumers recorded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from chaz.database import Database, Transaction
from chaz.deliveries import AuditEvent, event_body
from chaz.journal import CALL, call_event, result_event


@dataclass(frozen=True)
class Settled:
    """What a look at ended runs found."""

    runs: int
    missing: list[AuditEvent]
    """To be told again."""


async def settle(database: Database, *, limit: int = 100) -> Settled:
    """Look at the runs whose time for it has come: mark those whose events are all recorded, find what others lack.

    A run is looked at again after as long as it has been over: a consumer that is away is not buried in repetitions.
    """

    async def work(tx: Transaction) -> Settled:
        cursor = await tx.execute(
            """
            with due as (
                select id, event_seq from chaz.runs where audit_after <= now()
                order by audit_after limit %(limit)s for update skip locked),
            counted as (
                select due.id, due.event_seq = count(e.id) as complete, array_agg(e.seq) as seqs
                from due left join chaz.entries e on e.run_id = due.id and e.seq > 0 group by due.id, due.event_seq)
            update chaz.runs r set audit_after = case when not complete
                then now() + greatest(now() - r.ended_at, interval '5 seconds') end
            from counted where counted.id = r.id returning r.id, complete, seqs
            """,
            {"limit": limit},
        )
        looked_at = await cursor.fetchall()
        recorded = {row["id"]: set(row["seqs"]) for row in looked_at if not row["complete"]}
        told = await _told(tx, list(recorded)) if recorded else []
        return Settled(len(looked_at), [event for event in told if event.seq not in recorded[event.run]])

    return await database.transact(work)


async def _told(tx: Transaction, runs: Sequence[UUID]) -> list[AuditEvent]:
    """All events that runs have told, from the journal, in order."""
    cursor = await tx.execute(f"select {CALL} where c.run_id = any(%(runs)s)", {"runs": list(runs)})
    events: list[AuditEvent] = []
    for row in await cursor.fetchall():
        events.append(call_event(row))
        if row["result_seq"] is not None:
            events.append(result_event(row))
    return sorted(events, key=lambda event: (event.run, event.seq))


async def missing(database: Database, root_run_id: UUID) -> dict[UUID, int]:
    """By run of the tree: how many of its events are not recorded. Complete runs are left out."""
    rows = await database.fetch(
        """
        select r.id, r.event_seq - count(e.id) as missing
        from chaz.runs r left join chaz.entries e on e.run_id = r.id and e.seq > 0
        where r.root_run_id = %(root)s
        group by r.id having r.event_seq <> count(e.id)
        """,
        {"root": root_run_id},
    )
    return {row["id"]: row["missing"] for row in rows}


@dataclass
class Verification:
    """What a verification found; runs that are still going are counted apart, since they may tell more."""

    runs: int = 0
    open_runs: int = 0
    expected: int = 0
    recorded: int = 0
    missing: int = 0
    altered: int = 0
    """Runs whose recorded events are complete and are not those that the run told."""
    bad_runs: list[UUID] | None = None

    @property
    def proven(self) -> bool:
        """Whether every ended run's events are recorded, and are the ones that it told."""
        return not self.missing and not self.altered


async def verify(database: Database, session_id: UUID | None = None, *, batch: int = 50) -> Verification:
    """Count and hash what is recorded of each ended run, against what the run counted and hashed itself."""
    found = Verification(bad_runs=[])
    after = UUID(int=0)
    while True:
        rows = await database.fetch(
            """
            select r.id, r.event_seq, r.digest, r.ended_at is not null as ended,
                coalesce(json_agg(json_build_object('seq', e.seq, 'kind', e.type, 'content', e.content,
                    'metadata', e.metadata) order by e.seq) filter (where e.id is not null), '[]') as events
            from (select * from chaz.runs where id > %(after)s and event_seq > 0
                and (%(session)s::uuid is null or session_id = %(session)s) order by id limit %(batch)s) r
            left join chaz.entries e on e.run_id = r.id and e.seq > 0
            group by r.id, r.event_seq, r.digest, r.ended_at order by r.id
            """,
            {"after": after, "session": session_id, "batch": batch},
        )
        for row in rows:
            _verify_run(found, row)
        if len(rows) < batch:
            return found
        after = rows[-1]["id"]


def _verify_run(found: Verification, row: dict[str, Any]) -> None:
    if not row["ended"]:
        found.open_runs += 1
        return
    events = row["events"]
    found.runs += 1
    found.expected += row["event_seq"]
    found.recorded += len(events)
    lacking = row["event_seq"] - len(events)
    altered = not lacking and _digest(row["id"], events) != row["digest"]
    found.missing += lacking
    found.altered += altered
    if (lacking or altered) and found.bad_runs is not None:
        found.bad_runs.append(row["id"])


def _digest(run: UUID, events: Sequence[dict[str, Any]]) -> bytes:
    """The chain of sha256 that a run keeps over its events."""
    digest = b""
    for event in events:
        facts = event["metadata"]
        body = event_body(
            kind=event["kind"],
            run=run,
            step=facts["step"],
            ordinal=facts["ordinal"],
            call_id=facts["call_id"],
            tool=facts["tool"],
            attempt=facts["attempt"],
            outcome=facts.get("outcome", ""),
            content=event["content"],
        )
        digest = hashlib.sha256(digest + body.encode()).digest()
    return digest
