"""The store of sessions and their logs: reading, appending under the head, and the producers' one door."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Any, LiteralString
from uuid import UUID

from psycopg.types.json import Jsonb

from chaz.callbacks import TaskCallback, Webhook
from chaz.database import Database, Row, Transaction
from chaz.entries import (
    ENTRY_SIZE,
    MAX_CONTENT,
    Author,
    Bookmark,
    Budget,
    Ended,
    Entry,
    EntryType,
    cut_mark,
    derived_id,
    fair_share,
)

# Every parameter has its cast, so that any driver can send it.
SEND: LiteralString = """
    select chaz.send(
        cast(%(session)s as text), cast(%(type)s as text), cast(%(sender)s as text), cast(%(content)s as text),
        recipient => cast(%(recipient)s as text), author => cast(%(author)s as text), id => cast(%(id)s as uuid),
        idempotency_key => cast(%(idempotency_key)s as text), metadata => cast(%(metadata)s as jsonb),
        tenant => cast(%(tenant)s as text),
        not_before => coalesce(
            cast(%(eta)s as timestamptz), clock_timestamp() + cast(%(countdown)s as interval)),
        expires => coalesce(
            cast(%(expires_at)s as timestamptz), clock_timestamp() + cast(%(expires_in)s as interval)),
        timeout => cast(%(timeout)s as interval), priority => cast(%(priority)s as integer),
        budget => cast(%(budget)s as jsonb), open_session => cast(%(open_session)s as boolean),
        on_complete => cast(%(on_complete)s as jsonb)) as id
"""


ENTRY: LiteralString = """
    id, session_id, position, seq, type, sender, author, recipient, content,
    metadata - 'session' - 'options' as metadata, run_id, created_at
"""
SAID: LiteralString = """
    id, session_id, position, seq, type, sender, author, recipient, content,
    '{}'::jsonb as metadata, run_id, created_at
"""
"""An entry as models are shown it: without its metadata, which may be of any size."""


@dataclass(frozen=True)
class Submission:
    """What a producer hands to ``chaz.send``, the SQL function that is the one door."""

    session: str
    """A name, or the uuid of a session that exists (or is opened with ``open_session``)."""
    type: EntryType
    sender: str
    content: str
    recipient: str | None = None
    author: Author = "program"
    id: UUID | None = None
    idempotency_key: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tenant: str = ""
    countdown: timedelta | None = None
    eta: datetime | None = None
    expires_at: datetime | None = None
    expires_in: timedelta | None = None
    timeout: timedelta | None = None
    priority: int | None = None
    budget: Budget | None = None
    open_session: bool = False
    on_complete: Webhook | TaskCallback | None = None

    def parameters(self) -> dict[str, Any]:
        """The parameters of :data:`SEND`."""
        budget = None if self.budget is None else self.budget.model_dump_json()
        on_complete = None if self.on_complete is None else self.on_complete.model_dump_json()
        wire = {"metadata": json.dumps(dict(self.metadata)), "budget": budget, "on_complete": on_complete}
        return {**self.__dict__, **wire}


async def send(tx: Transaction, submission: Submission) -> UUID:
    """Insert an entry; its id. Raises InvalidEntry, Conflict, UnknownSession."""
    async with tx.pipeline():
        cursor = await tx.execute(SEND, submission.parameters())
    row = await cursor.fetchone()
    assert row is not None
    return row["id"]


async def configure(
    tx: Transaction,
    session: str,
    *,
    tenant: str,
    open_session: bool,
    on_message: str | None = None,
    approvers: Sequence[str] | None = None,
    auto_approve: Sequence[str] | None = None,
    approval_timeout: timedelta | None = None,
    burst: int | None = None,
) -> None:
    """Say what holds for a session from now on; None leaves a thing as it is. Raises InvalidEntry, UnknownSession."""
    await tx.execute(
        """
        select chaz.configure_session(%(session)s::text, %(on_message)s::text, tenant => %(tenant)s::text,
            open_session => %(open)s::boolean, approvers => %(approvers)s::text[],
            auto_approve => %(auto_approve)s::text[], approval_timeout => %(approval_timeout)s::interval,
            burst => %(burst)s::bigint)
        """,
        {
            "session": session,
            "on_message": on_message,
            "tenant": tenant,
            "open": open_session,
            "approvers": None if approvers is None else list(approvers),
            "auto_approve": None if auto_approve is None else list(auto_approve),
            "approval_timeout": approval_timeout,
            "burst": burst,
        },
    )


async def lock_head(tx: Transaction, session_id: UUID) -> None:
    """Take the session's head, waiting for it."""
    await tx.execute("select from chaz.heads where session_id = %(session)s for update", {"session": session_id})


async def lock_free_head(tx: Transaction, session_id: UUID) -> bool:
    """Take the session's head if nobody has it; whether it was free."""
    cursor = await tx.execute(
        "select from chaz.heads where session_id = %(session)s for update skip locked", {"session": session_id}
    )
    return await cursor.fetchone() is not None


async def append(
    tx: Transaction,
    *,
    id: UUID | None = None,
    session_id: UUID,
    tenant: str,
    type: EntryType,
    sender: str,
    author: Author,
    content: str,
    recipient: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    run_id: UUID | None = None,
) -> int:
    """Append an entry at the next position and return it. The caller holds the session's head."""
    row = await (
        await tx.execute(
            """
            with head as (
                update chaz.heads set next_position = next_position + 1
                where session_id = %(session_id)s returning next_position - 1 as position)
            insert into chaz.entries
                (id, tenant, session_id, position, type, sender, author, recipient, content, metadata, run_id)
            select coalesce(%(id)s, chaz.new_id()), %(tenant)s, %(session_id)s, head.position, %(type)s, %(sender)s,
                %(author)s, %(recipient)s, %(content)s, %(metadata)s, %(run_id)s
            from head returning position
            """,
            {
                "id": id,
                "session_id": session_id,
                "tenant": tenant,
                "type": type,
                "sender": sender,
                "author": author,
                "recipient": recipient,
                "content": content,
                "metadata": Jsonb(dict(metadata or {})),
                "run_id": run_id,
            },
        )
    ).fetchone()
    assert row is not None
    return row["position"]


async def session_row(database: Database, session_id: UUID) -> Row | None:
    """The session's row, or None where nothing was ever placed in it."""
    rows = await database.fetch("select * from chaz.sessions where id = %(id)s", {"id": session_id})
    return rows[0] if rows else None


async def is_known(database: Database, session_id: UUID) -> bool:
    """Whether there is such a session, or something was sent to it that is not placed yet."""
    rows = await database.fetch(
        """
        select from chaz.sessions where id = %(id)s
        union all select from chaz.entries where session_id = %(id)s and position is null limit 1
        """,
        {"id": session_id},
    )
    return bool(rows)


async def entry(database: Database, entry_id: UUID) -> Entry | None:
    """The entry of this id, or None."""
    rows = await database.fetch(f"select {ENTRY} from chaz.entries where id = %(id)s", {"id": entry_id})
    return Entry.model_validate(rows[0]) if rows else None


async def entries(database: Database, session_id: UUID, after: Bookmark | None = None) -> list[Entry]:
    """The session's entries past the bookmark, in order; what is not yet placed comes last, as sent.

    What a gap in a run's audit trail hides from a bookmark is given all the same, and again by the next reading.
    """
    after = after or Bookmark()
    rows = await database.fetch(
        f"""
        (select {ENTRY} from chaz.entries
            where session_id = %(session)s and position > %(position)s
            order by position, seq)
        union all
        (select {ENTRY} from chaz.entries e
            join unnest(%(runs)s::uuid[], %(seqs)s::int[]) as told(run, told_seq) on run_id = run and seq > told_seq
            where position <= %(position)s order by position, seq)
        union all
        (select {ENTRY} from chaz.entries
            where session_id = %(session)s and position is null order by arrival)
        """,
        {
            "session": session_id,
            "position": after.position,
            "runs": list(after.told),
            "seqs": list(after.told.values()),
        },
    )
    found = sorted(map(Entry.model_validate, rows), key=_place)
    runs = after.told.keys() | {entry.run_id for entry in found if entry.type == "ack" and entry.run_id is not None}
    return [entry for entry, _ in after.moved_over(found, await ends(database, runs))]


ROOM = 2_000_000
"""Bytes of conversation that are read for a run, where nobody says how much its model can be shown."""
PAGE = 500
"""Entries that are looked at in one statement."""

_OWN_TRIGGERS: LiteralString = """
    with recursive tries(run) as (
        select %(run)s::uuid
        union
        -- Down to a null, which is nobody's id.
        select r.retry_of from tries join chaz.runs r on r.id = tries.run
    )
    select e.id, octet_length(content) as size from chaz.entries e
    where session_id = %(session)s and position <= %(read_to)s and id = any(array(
        select run from tries
        union all
        select r.id from chaz.runs r where r.superseded_by = any(array(select run from tries))
        union all
        -- What it coalesced, also what was taken back since: the note stands right after the ack of the first claim.
        select jsonb_array_elements_text(n.metadata->'entries')::uuid from chaz.entries n
        where n.session_id = %(session)s and n.position = %(read_to)s + 2 and n.seq = 0 and n.type = 'note'
            and n.metadata->>'reason' = 'coalesced' and n.metadata->>'run' = %(run)s::text))
"""
NEWEST_SUMMARY: LiteralString = f"""
    select {SAID},
        case when jsonb_typeof(metadata->'covers') = 'number' and metadata->>'covers' ~ '^[0-9]{{1,18}}$'
            then least((metadata->>'covers')::bigint, position - 1) else position - 1 end as covers
    from chaz.entries
    where session_id = %(session)s and type = 'summary' and position <= %(read_to)s
    order by position desc limit 1
"""
"""The newest summary placed up to ``read_to``, and the last position that it ``covers``."""

# As ranges: a long queue is one. A run's own triggers are out of the conversation, too, since they come after it.
# Nothing else of the session is at work while a run is, so that what was open when it was claimed is pending still, or
# has been closed since, with an error; or is this run's own. A run that takes another's place answers all that it did.
_HIDDEN: LiteralString = """
    with recursive mine as (
        select started_at from chaz.runs where id = %(run)s
    ), open(id, position, retry_of, created_at) as (
        select id, trigger_position, retry_of, created_at from chaz.runs
        where session_id = %(session)s and state = 'pending'
        union all
        select r.id, r.trigger_position, r.retry_of, r.created_at
        from chaz.entries e join chaz.runs r on r.id = e.run_id
        where e.session_id = %(session)s and e.type = 'error' and e.position > %(read_to)s
            and r.session_id = e.session_id
    ), others as (
        select position, retry_of from open
        where position <= %(read_to)s and created_at <= (select started_at from mine) and id <> %(run)s
    ), tries(run) as (
        select retry_of from others where retry_of is not null
        union
        select r.retry_of from tries join chaz.runs r on r.id = tries.run
    )
    select range_agg(int8range(position, position, '[]'))::text as positions from (
        select position from (
            select position from others
            union all
            select r.trigger_position from chaz.runs r where r.superseded_by = any(array(select run from tries))) owed
        -- What an agent says to another is an answer, too: without it, what that answers would seem to be open.
        where not exists (
            select from chaz.entries e where e.session_id = %(session)s and e.position = owed.position and e.seq = 0
                and e.type = 'message' and e.author = 'agent')
        union all
        select unnest(%(own)s::bigint[])) hidden
    where position is not null
"""


async def context_entries(
    tx: Transaction, *, session_id: UUID, run_id: UUID, read_to: int, room: int = ROOM
) -> tuple[list[Entry], list[Entry]]:
    """What a run sees of its session, in order: the conversation so far, and the triggers that it answers.

    ``read_to`` is where its first claim found the log. In view is what was placed by then: the newest summary, and
    what that does not cover, but nothing that was still another run's to answer when this one was claimed, whatever
    has become of it since; so every attempt sees the same. A requeued run answers what the run answered whose place
    it takes.

    Of the conversation it is the newest that fits into ``room`` bytes. The summary is in all the same, and so are the
    triggers: together larger than that, the long ones are cut with a mark.
    """
    place = {"session": session_id, "run": run_id, "read_to": read_to}
    triggers = await _own_triggers(tx, place, room)
    summary = await (await tx.execute(NEWEST_SUMMARY, place)).fetchone()
    covered = 0 if summary is None else summary.pop("covers")
    own = [entry.position for entry in triggers]
    hidden = await (await tx.execute(_HIDDEN, place | {"own": own})).fetchone()
    assert hidden is not None
    conversation = [] if summary is None else [Entry.model_validate(summary)]
    conversation += await _newest(tx, session_id, after=covered, up_to=read_to, hidden=hidden["positions"], room=room)
    return conversation, triggers


async def _own_triggers(tx: Transaction, place: Mapping[str, Any], room: int) -> list[Entry]:
    sizes = {row["id"]: row["size"] for row in await (await tx.execute(_OWN_TRIGGERS, place)).fetchall()}
    most = min(fair_share(sizes.values(), room), MAX_CONTENT)
    cursor = await tx.execute(
        f"""
        select {SAID}, length(whole) as whole from (
            select id, session_id, position, seq, type, sender, author, recipient, left(content, %(most)s) as content,
                run_id, created_at, content as whole
            from chaz.entries where id = any(%(ids)s)) e
        order by position
        """,
        {"ids": list(sizes), "most": most},
    )
    rows = [(row.pop("whole"), row) for row in await cursor.fetchall()]
    return [
        Entry.model_validate(row if whole <= most else row | {"content": row["content"] + cut_mark(whole, most)})
        for whole, row in rows
    ]


async def _newest(
    tx: Transaction, session_id: UUID, *, after: int, up_to: int, hidden: str | None, room: int
) -> list[Entry]:
    """The newest messages and directives between two positions that fit, in order. One that does not fit ends them."""
    found: list[Entry] = []
    while True:
        cursor = await tx.execute(
            f"""
            select {SAID}, total from (
                select *, sum(octet_length(content) + %(each)s) over (order by position desc) as total from (
                    select * from chaz.entries
                    where session_id = %(session)s and type in ('message', 'directive')
                        and position > %(after)s and position <= %(up_to)s
                        and (%(hidden)s::int8multirange @> position) is not true
                    order by position desc limit %(page)s) page) summed
            where total <= %(room)s order by position desc
            """,
            {
                "session": session_id,
                "after": after,
                "up_to": up_to,
                "hidden": hidden,
                "each": ENTRY_SIZE,
                "page": PAGE,
                "room": room,
            },
        )
        rows = await cursor.fetchall()
        totals = [int(row.pop("total")) for row in rows]
        found += map(Entry.model_validate, rows)
        if len(rows) < PAGE:
            return found[::-1]
        room -= totals[-1]
        up_to = rows[-1]["position"] - 1


def private_entry(session_id: UUID, agent: str, prompt: str) -> Entry:
    """What a schedule tells a run, in the form of an instruction that its log does not have."""
    return Entry(
        id=derived_id("prompt", str(session_id), prompt),
        session_id=session_id,
        position=None,
        seq=0,
        type="directive",
        sender=agent,
        author="system",
        recipient=agent,
        content=prompt,
        metadata={},
        run_id=None,
        created_at=datetime.now(UTC),
    )


class Follower:
    """Reads a session as it grows: every entry once, in the order in which it could be known, late audit entries too.

    Where it is, is a bookmark, and each entry carries the one behind it: a follower that begins there gets all that
    this one had not read.
    """

    def __init__(self, database: Database, session_id: UUID, *, after: Bookmark | None = None) -> None:
        self._database = database
        self._session_id = session_id
        self._mark = after or Bookmark()

    @property
    def open_runs(self) -> frozenset[UUID]:
        """Runs that have been seen to start and whose trail is not complete."""
        return frozenset(self._mark.told)

    async def next(self) -> list[Entry]:
        """What is new since the last call, in order; empty where nothing is."""
        # Ends are read first: what a run had counted by then has to come.
        known = await ends(self._database, self._mark.told)
        new = await self._read(
            f"""
            select {ENTRY} from chaz.entries
            where session_id = %(session)s and position > %(position)s and seq = 0 order by position
            """,
            {"session": self._session_id, "position": self._mark.position},
        )
        told = {entry.run_id: 0 for entry in new if entry.type == "ack" and entry.run_id is not None}
        told |= self._mark.told
        new += await self._told_without_a_gap(told)
        # Of the runs that have come up only now: all of theirs that this round may have missed comes later.
        ended = known | await ends(self._database, told.keys() - self._mark.told.keys())
        read: list[Entry] = []
        for entry, mark in self._mark.moved_over(sorted(new, key=_place), ended):
            read.append(entry)
            self._mark = mark
        self._mark = self._mark.without(known)
        return read

    async def _told_without_a_gap(self, told: dict[UUID, int]) -> list[Entry]:
        if not told:
            return []
        new: list[Entry] = []
        for entry in await self._read(
            f"""
            select {ENTRY} from chaz.entries e
            join unnest(%(runs)s::uuid[], %(seqs)s::int[]) as told(run, told_seq) on run_id = run and seq > told_seq
            order by run_id, seq
            """,
            {"runs": list(told), "seqs": list(told.values())},
        ):
            if entry.run_id is not None and entry.seq == told[entry.run_id] + 1:
                told[entry.run_id] = entry.seq
                new.append(entry)
        return new

    async def _read(self, query: LiteralString, parameters: dict[str, Any]) -> list[Entry]:
        return [Entry.model_validate(row) for row in await self._database.fetch(query, parameters)]


async def ends(database: Database, runs: Collection[UUID]) -> dict[UUID, Ended]:
    """Those of these runs that have ended."""
    if not runs:
        return {}
    rows = await database.fetch(
        """
        select id, coalesce(ack_position, 0) as last_ack, event_seq from chaz.runs
        where id = any(%(runs)s) and ended_at is not null
        """,
        {"runs": list(runs)},
    )
    return {row["id"]: Ended(row["last_ack"], row["event_seq"]) for row in rows}


def _place(entry: Entry) -> tuple[float, int]:
    return inf if entry.position is None else entry.position, entry.seq


async def child_sessions(database: Database, root_run_id: UUID) -> list[Row]:
    """Id, depth and parent of the sessions that runs of a tree have opened, oldest first."""
    rows = await database.fetch(
        "select id, depth, parent_run_id from chaz.sessions where root_run_id = %(root)s order by created_at",
        {"root": root_run_id},
    )
    return list(rows)
