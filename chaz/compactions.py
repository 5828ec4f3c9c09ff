"""The store of compactions: who asks for one, what it is to cover, and the summary written as its run ends.

A compaction run is a run like any other, of one step without tools. It covers what was placed before its claim, and
nothing that still waits for an answer; what comes while it works is beyond what it covers, and stays in view. The
summary is written in the transaction of the run's end, or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import LiteralString
from uuid import UUID

from chaz import completion, sessionlog
from chaz.children import Asked
from chaz.database import Row, Transaction
from chaz.deliveries import AuditEvent
from chaz.entries import ENTRY_SIZE, Author, Entry, derived_id
from chaz.journal import finish_call, start_call
from chaz.outcomes import CallOutcome, RunOutcome, ToolCall, Turn
from chaz.routing import BURST
from chaz.runs import Claim
from chaz.runtime.compaction import LEAST
from chaz.runtime.tokens import BYTES_OF_A_TOKEN
from chaz.sessionlog import NEWEST_SUMMARY, ROOM, SAID

AT_ONCE = 1000
"""Entries that one compaction covers at most."""
_NOW = 2**62
"""A position past all that is placed."""
WORTH = 8
"""Such a part of a full window was said since the last summary, before the next is asked for by itself."""

# What waits to be tried again answers all that the tries before it did.
_FIRST_WAITING: LiteralString = """
    (with recursive waiting as (
        select trigger_position, retry_of from chaz.runs
        where session_id = %(session)s and state = 'pending' and cause <> 'compaction'
    ), tries(run) as (
        select retry_of from waiting where retry_of is not null
        union
        select r.retry_of from tries join chaz.runs r on r.id = tries.run
    )
    select coalesce(min(trigger_position), 9223372036854775807) from (
        select trigger_position from waiting
        union all
        select trigger_position from chaz.runs where superseded_by = any(array(select run from tries))) unanswered)
"""
"""Where the first entry stands that still waits for an answer: a summary covers what comes before it."""


@dataclass(frozen=True)
class Uncovered:
    """What a compaction run has to work on."""

    so_far: str | None
    """The newest summary that it sees."""
    entries: Sequence[Entry]
    """The oldest messages and directives that no summary covers, in order, up to the first that is still unanswered."""


async def uncovered(tx: Transaction, claim: Claim, *, room: int = ROOM) -> Uncovered:
    """What the compaction run has to work on, of what was placed before its first claim.

    Of more than fits into ``room`` bytes it is the oldest part, and :data:`LEAST` entries at least.
    """
    newest = await _newest_summary(tx, claim.session_id, claim.read_to)
    rows = await tx.execute(
        f"""
        select {SAID} from (
            select *, row_number() over placed as nth, sum(octet_length(content)) over placed as total
            from (
                select * from chaz.entries
                where session_id = %(session)s and seq = 0 and type in ('message', 'directive')
                    and position > %(covers)s and position <= %(read_to)s
                    and position < {_FIRST_WAITING}
                order by position limit %(limit)s) oldest
            window placed as (order by position)) counted
        where nth <= %(least)s or total <= %(room)s order by position
        """,
        {
            "session": claim.session_id,
            "read_to": claim.read_to,
            "covers": newest["covers"] if newest else 0,
            "limit": AT_ONCE,
            "least": LEAST,
            "room": room,
        },
    )
    entries = [Entry.model_validate(row) for row in await rows.fetchall()]
    return Uncovered(newest["content"] if newest else None, entries)


async def _newest_summary(tx: Transaction, session_id: UUID, read_to: int = _NOW) -> Row | None:
    cursor = await tx.execute(NEWEST_SUMMARY, {"session": session_id, "read_to": read_to})
    return await cursor.fetchone()


async def end_run(
    tx: Transaction, claim: Claim, outcome: RunOutcome, *, full_from: int | None = None, burst: int = BURST
) -> list[AuditEvent]:
    """End the run, as :func:`chaz.completion.end_run` does; of a compaction run, with its summary.

    The summary's ``metadata`` has the position up to which it ``covers``, and is given the number of ``entries`` that
    it takes the place of. If a newer summary has come than the run had read, none is written, and the run says so.
    ``full_from`` are the tokens of the run's last prompt from which on a compaction is asked for.
    """
    if outcome.says == "summary":
        await sessionlog.lock_head(tx, claim.session_id)
        outcome = await _unless_superseded(tx, claim, outcome)
    events = await completion.end_run(tx, claim, outcome, burst=burst)
    if full_from is not None and claim.cause != "compaction":
        await _request_if_full(tx, claim, full_from)
    return events


async def _unless_superseded(tx: Transaction, claim: Claim, outcome: RunOutcome) -> RunOutcome:
    newest = await _newest_summary(tx, claim.session_id)
    if newest is not None and newest["position"] > claim.read_to:
        why = f"superseded by a newer summary, at position {newest['position']}; nothing was written"
        return RunOutcome(state="succeeded", reason="superseded", text=why, says="note")
    counted = await tx.execute(
        """
        select count(*) as entries from chaz.entries
        where session_id = %(session)s and seq = 0 and type in ('message', 'directive')
            and position > %(after)s and position <= %(covers)s
        """,
        {
            "session": claim.session_id,
            "after": newest["covers"] if newest else 0,
            "covers": outcome.metadata["covers"],
        },
    )
    row = await counted.fetchone()
    assert row is not None
    return outcome.model_copy(update={"metadata": outcome.metadata | {"entries": row["entries"]}})


async def request(tx: Transaction, claim: Claim, *, step: int, ordinal: int, call: ToolCall) -> Asked:
    """Store an agent's call that asks for a compaction, the request (unless one is open already), and its result.

    The request's id comes from run, step and ordinal, so that a call never asks twice.
    """
    event = await start_call(tx, claim, step=step, ordinal=ordinal, call=call)
    id = derived_id("compaction", str(claim.run_id), f"{step}.{ordinal}")
    asked = await _request(tx, claim, id=id, author="agent", sender=claim.agent, content="")
    word = "asked for" if asked else "asked for already"
    outcome = CallOutcome(
        kind="ok", content=f"a summary of this session is {word}; it is written after you have answered"
    )
    return Asked([event, await finish_call(tx, claim, step=step, ordinal=ordinal, call=call, outcome=outcome)], outcome)


async def _request_if_full(tx: Transaction, claim: Claim, full_from: int) -> None:
    """Ask for a compaction if the last prompt was as long, or what was said is, and there is something to summarise.

    What was said counts by itself, since a prompt that leaves some of it out may be short. What makes a prompt long may
    be no words of the session, and a compaction may fail: so once there was one, a :data:`WORTH` of a full window has
    to be said before the next, or each run would pay for one that shortens nothing.
    """
    newest = await _newest_summary(tx, claim.session_id)
    covers = newest["covers"] if newest else 0
    said = await _said(tx, claim.session_id, after=covers, full_from=full_from)
    if said.entries < LEAST:
        return
    turns = await tx.execute(
        "select turn from chaz.steps where run_id = %(run)s order by step desc limit 1", {"run": claim.run_id}
    )
    last = await turns.fetchone()
    prompt = Turn.model_validate(last["turn"]).usage.prompt if last else 0
    tokens = max(prompt, said.tokens)
    if tokens < full_from:
        return
    if last_try := max(covers, await _came_to_nothing(tx, claim.session_id)):
        new = await _said(tx, claim.session_id, after=last_try, full_from=full_from)
        if new.entries < LEAST or new.tokens < full_from // WORTH:
            return
    id = derived_id("compaction", str(claim.run_id), "end")
    content = f"{claim.agent!r} had {tokens} tokens to read; from {full_from} on the session is summarised"
    await _request(tx, claim, id=id, author="system", sender="chaz", content=content)


@dataclass(frozen=True)
class _Said:
    entries: int
    tokens: int


async def _said(tx: Transaction, session_id: UUID, *, after: int, full_from: int) -> _Said:
    """What was said past a position that a summary may cover; no more is read of it than fills a window."""
    cursor = await tx.execute(
        f"""
        select count(*) as entries, coalesce(sum(size + %(each)s), 0)::bigint as bytes from (
            select octet_length(content) as size from chaz.entries
            where session_id = %(session)s and seq = 0 and type in ('message', 'directive')
                and position > %(after)s and position < {_FIRST_WAITING}
            order by position limit %(limit)s) said
        """,
        {
            "session": session_id,
            "after": after,
            "each": ENTRY_SIZE,
            "limit": max(LEAST, full_from * BYTES_OF_A_TOKEN // ENTRY_SIZE + 1),
        },
    )
    row = await cursor.fetchone()
    assert row is not None
    return _Said(row["entries"], row["bytes"] // BYTES_OF_A_TOKEN)


async def _came_to_nothing(tx: Transaction, session_id: UUID) -> int:
    """How far the session's last compaction had read, if it failed or was cancelled; else 0."""
    cursor = await tx.execute(
        """
        select state, coalesce(read_to, trigger_position) as read_to from chaz.runs
        where session_id = %(session)s and cause = 'compaction' and ended_at is not null
        order by trigger_position desc, created_at desc limit 1
        """,
        {"session": session_id},
    )
    row = await cursor.fetchone()
    return row["read_to"] if row is not None and row["state"] in {"failed", "cancelled"} else 0


async def _request(tx: Transaction, claim: Claim, *, id: UUID, author: Author, sender: str, content: str) -> bool:
    """Insert an unplaced request to the run's agent; False, and nothing, if the session has an open one that is due."""
    cursor = await tx.execute(
        """
        insert into chaz.entries (id, tenant, session_id, type, sender, author, recipient, content, run_id)
        select %(id)s, %(tenant)s, %(session)s, 'compaction_request', %(sender)s, %(author)s, %(agent)s, %(content)s,
            %(run)s
        where not exists (
                select from chaz.entries
                where session_id = %(session)s and position is null and type = 'compaction_request')
            -- One by one, as there are indexes.
            and not exists (
                select from chaz.runs
                where session_id = %(session)s and state in ('queued', 'running', 'parked') and cause = 'compaction')
            and not exists (
                select from chaz.runs
                where session_id = %(session)s and state = 'pending' and cause = 'compaction'
                    and (not_before is null or not_before <= clock_timestamp()))
        on conflict on constraint entries_pkey do nothing
        """,
        {
            "id": id,
            "tenant": claim.tenant,
            "session": claim.session_id,
            "sender": sender,
            "author": author,
            "agent": claim.agent,
            "content": content,
            "run": claim.run_id,
        },
    )
    return cursor.rowcount == 1
