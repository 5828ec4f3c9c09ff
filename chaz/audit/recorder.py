"""The store of audit entries: events become ``tool_call`` and ``tool_result`` entries, each once, whoever told them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import DictRow

from chaz.deliveries import AuditEvent
from chaz.entries import derived_id

# What no run has told: its run is unknown, another's, has not counted that far, or was never acked there.
_RECORD = """
    with told as (
        select *, exists (
            select from chaz.runs r
            join chaz.entries a on a.run_id = r.id and a.type = 'ack' and a.position = t.position
            where r.id = t.run and r.session_id = t.session and r.tenant = t.tenant and r.agent = t.agent
                and t.seq between 1 and r.event_seq) as known
        from json_to_recordset(%(events)s::json) as t(
            number int, id uuid, tenant text, session uuid, position bigint, seq int, kind text, agent text, run uuid,
            content text, metadata jsonb, at timestamptz)),
    recorded as (
        insert into chaz.entries
            (id, tenant, session_id, position, seq, type, sender, author, content, metadata, run_id, created_at)
        select id, tenant, session, position, seq, kind, agent, 'agent', content, metadata, run, at
        from told where known
        on conflict do nothing)
    select number from told where not known
"""


def entry_id(event: AuditEvent) -> UUID:
    """The id of the event's entry: the same whoever tells it, however often."""
    return derived_id("audit", str(event.run), str(event.seq))


def record(connection: psycopg.Connection[DictRow], events: Sequence[AuditEvent]) -> set[int]:
    """Record events with one statement and commit; what is there already is skipped.

    Returns which of them no run told, by their index: their run is unknown, of another session, tenant or agent, or
    has not counted that far. A true event may have the entry id of a forged one. Raises psycopg's errors.
    """
    rows: list[dict[str, Any]] = [
        {
            "number": number,
            "id": str(entry_id(event)),
            "tenant": event.tenant,
            "session": str(event.session),
            "position": event.position,
            "seq": event.seq,
            "kind": event.kind,
            "agent": event.agent,
            "run": str(event.run),
            "at": event.at.isoformat(),
            "content": event.content,
            "metadata": {
                "tool": event.tool,
                "step": event.step,
                "ordinal": event.ordinal,
                "call_id": event.call_id,
                "attempt": event.attempt,
                **({"outcome": event.outcome} if event.outcome else {}),
            },
        }
        for number, event in enumerate(events)
    ]
    with connection.transaction():
        refused = connection.execute(_RECORD, {"events": json.dumps(rows)}).fetchall()
    return {row["number"] for row in refused}
