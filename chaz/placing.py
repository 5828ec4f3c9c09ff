"""Placing: the listener's transaction that gives unplaced entries their positions and makes the runs they ask for."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast
from uuid import UUID

from psycopg import AsyncCursor
from psycopg.rows import DictRow
from psycopg.types.json import Jsonb

from chaz import approvals
from chaz.approvals import Said
from chaz.callbacks import callback_of
from chaz.completion import answer_parents
from chaz.database import Row, Transaction
from chaz.entries import Budget
from chaz.lineage import answer_of
from chaz.outcomes import RunOutcome
from chaz.publishing import room_at_once
from chaz.routing import Noted, Refused, Roster, Wake, route
from chaz.runs import Publication, publication
from chaz.waking import INHERITED, insert_runs, new_run

logger = logging.getLogger("chaz.listener")


@dataclass
class Placed:
    """What one round of placing did."""

    entries: int = 0
    more: bool = False
    """Something is left that this round did not take."""
    publications: list[Publication] = field(default_factory=list[Publication])
    """Runs to publish once the transaction has committed."""


@dataclass
class _Session:
    """A locked head, and what is to be appended under it."""

    row: Row
    next_position: int
    active_run: UUID | None
    agents_said: int
    """How many answers of agents there are since a person or a directive spoke."""
    roster: list[str]
    lead: str | None
    unread_by: str | None = None
    """The agent of the active run, if that is to answer a message and has not read the log yet: it reads on."""
    changed: bool = False


async def place(
    tx: Transaction,
    *,
    default_agent: str,
    first_wait: float,
    only: UUID | None = None,
    without: Sequence[UUID] = (),
    sessions: int = 200,
    per_session: int = 500,
) -> Placed:
    """Place unplaced entries of sessions whose heads are free, in order of arrival, and make the runs they ask for.

    Of ``only`` this session, or of all but those ``without``.

    Heads are locked first and the entries read in a second statement: in one statement two listeners would place the
    same entry twice, its snapshot being older than the lock.
    """
    async with tx.pipeline():
        await _open_sessions(tx, only, without)
        heads = await _lock_heads(tx, only, without, sessions)
    locked = {
        row["session_id"]: _Session(row, row["next_position"], row["active_run"], row["agents_said"], [], None)
        for row in await heads.fetchall()
    }
    if not locked:
        return Placed()
    async with tx.pipeline():
        placed = await _give_positions(tx, locked, per_session)
        rosters = await _rosters(tx, locked)
        registered = await tx.execute("select name, queue, timeout from chaz.agents")
    room = await room_at_once(tx, sorted({session.row["tenant"] for session in locked.values()}))
    for row in await rosters.fetchall():
        session = locked[row["session_id"]]
        session.roster.append(row["agent"])
        if row["lead"]:
            session.lead = row["agent"]
    await _see_unread(tx, [session for session in locked.values() if session.row["on_message"] == "interrupt"])
    agents = {row["name"]: row for row in await registered.fetchall()}
    rows = sorted(await placed.fetchall(), key=lambda row: (row["session_id"], row["position"]))
    counts: dict[UUID, int] = defaultdict(int)
    for row in rows:
        counts[row["session_id"]] += 1
        session = locked[row["session_id"]]
        session.next_position = row["position"] + 1
        session.changed = True
    work = _Work(tx, agents, room, default_agent, first_wait)
    for row in rows:
        await work.answer(locked[row["session_id"]], row)
    # The system's own close what has been closed.
    decisions = [
        row
        for row in rows
        if row["type"] == "approval_decision"
        and row["author"] != "system"
        and row["tenant"] == locked[row["session_id"]].row["tenant"]
    ]
    for said in await approvals.decide(tx, decisions) if decisions else []:
        work.say(locked[said.entry["session_id"]], said)
    await work.write(locked)
    return Placed(
        entries=len(rows),
        more=len(locked) == sessions or any(count == per_session for count in counts.values()),
        publications=work.publications,
    )


async def _open_sessions(tx: Transaction, only: UUID | None, without: Sequence[UUID]) -> None:
    """Make the sessions that unplaced entries name. A name that is not of its id is dropped, not believed."""
    await tx.execute(
        """
        with missing as (
            select distinct on (e.session_id) e.session_id, e.tenant,
                case when chaz.session_id(e.metadata->>'session', e.tenant) = e.session_id
                    then e.metadata->>'session' end as name
            from chaz.entries e
            where e.position is null and (%(only)s::uuid is null or e.session_id = %(only)s)
                and e.session_id <> all(%(without)s::uuid[])
                and not exists (select from chaz.heads h where h.session_id = e.session_id)
            order by e.session_id, e.arrival),
        named as (
            select * from missing where pg_try_advisory_xact_lock_shared(chaz.opening_key(session_id))),
        opened as (
            insert into chaz.sessions (id, tenant, name) select session_id, tenant, name from named
            on conflict do nothing)
        insert into chaz.heads (session_id) select session_id from named order by session_id on conflict do nothing
        """,
        {"only": only, "without": list(without)},
    )


async def _lock_heads(tx: Transaction, only: UUID | None, without: Sequence[UUID], limit: int) -> AsyncCursor[DictRow]:
    return await tx.execute(
        f"""
        select h.session_id, h.next_position, h.active_run, h.agents_said, s.tenant, {INHERITED}, s.on_message,
            clock_timestamp() as now,
            exists (select from chaz.pauses where kind = 'session' and name = h.session_id::text) as paused
        from chaz.heads h join chaz.sessions s on s.id = h.session_id
        where h.session_id in (
            select session_id from chaz.entries
            where position is null and (%(only)s::uuid is null or session_id = %(only)s)
                and session_id <> all(%(without)s::uuid[]))
        order by h.session_id limit %(limit)s for update of h skip locked
        """,
        {"only": only, "without": list(without), "limit": limit},
    )


async def _give_positions(tx: Transaction, locked: Mapping[UUID, _Session], per_session: int) -> AsyncCursor[DictRow]:
    return await tx.execute(
        """
        with head(session_id, next_position) as (
            select * from unnest(%(ids)s::uuid[], %(positions)s::bigint[])),
        unplaced as (
            select e.id,
                h.next_position - 1 + row_number() over (partition by e.session_id order by e.arrival) as position
            from head h cross join lateral (
                select id, session_id, arrival from chaz.entries
                where session_id = h.session_id and position is null order by arrival limit %(limit)s) e)
        update chaz.entries e set position = u.position from unplaced u where e.id = u.id
        returning e.id, e.tenant, e.session_id, e.position, e.type, e.author, e.recipient, e.run_id,
            case when e.type = 'approval_decision' or (e.type = 'message' and strpos(e.content, '@') > 0)
                then e.content else '' end as content,
            e.metadata->'options' as options, case when e.type = 'approval_decision' then e.metadata end as metadata,
            e.sender
        """,
        {
            "ids": list(locked),
            "positions": [session.next_position for session in locked.values()],
            "limit": per_session,
        },
    )


async def _rosters(tx: Transaction, locked: Mapping[UUID, _Session]) -> AsyncCursor[DictRow]:
    return await tx.execute(
        """
        select session_id, agent, lead from chaz.attachments
        where session_id = any(%(ids)s) order by session_id, since
        """,
        {"ids": list(locked)},
    )


async def _see_unread(tx: Transaction, sessions: Sequence[_Session]) -> None:
    """Which active runs have not read the log yet. In a statement of its own: a claim holds the head, as we do now."""
    active = {session.active_run: session for session in sessions if session.active_run is not None}
    if not active:
        return
    cursor = await tx.execute(
        """
        select id, agent, state = 'queued' and attempt = 0 and cause = 'message' as unread
        from chaz.runs where id = any(%(ids)s::uuid[])
        """,
        {"ids": list(active)},
    )
    for row in await cursor.fetchall():
        active[row["id"]].unread_by = row["agent"] if row["unread"] else None


class _Work:
    """Rows gathered from the routing of a round, written together at its end."""

    def __init__(
        self,
        tx: Transaction,
        agents: Mapping[str, Row],
        room: dict[tuple[str, str], int],
        default_agent: str,
        first_wait: float,
    ) -> None:
        self.publications: list[Publication] = []
        self._tx = tx
        self._agents = agents
        self._room = room
        self._default_agent = default_agent
        self._first_wait = first_wait
        self._attachments: list[dict[str, Any]] = []
        self._entries: list[dict[str, Any]] = []
        self._runs: list[dict[str, Any]] = []
        self._callbacks: list[dict[str, Any]] = []

    async def answer(self, session: _Session, row: dict[str, Any]) -> None:
        """Do what the entry asks for. An entry that cannot be routed never stops the others."""
        self._remember_callback(row)
        if row["tenant"] != session.row["tenant"]:
            self._append(session, row, "error", f"the entry's tenant is {row['tenant']!r}, not the session's")
            return
        # Also one that is refused: a person is there, or whoever directs the agents.
        if row["type"] == "directive" or (row["type"], row["author"]) == ("message", "human"):
            session.agents_said = 0
        try:
            wake = route(
                type=row["type"],
                author=row["author"],
                recipient=row["recipient"],
                content=row["content"],
                options=row["options"],
                roster=Roster(tuple(session.roster), session.lead, self._default_agent),
            )
        except Exception as error:
            logger.exception("listener: entry %s cannot be routed", row["id"])
            wake = Refused(row["recipient"] or "", f"it cannot be routed: {type(error).__name__}")
        match wake:
            case Wake():
                self._wake(session, row, wake)
                if wake.note:
                    self._append(session, row, "note", wake.note)
            case Refused():
                self._refuse(session, row, self._run(session, row, wake.agent), wake.why, "invalid")
            case Noted():
                self._append(session, row, "note", wake.why)
            case None:
                pass

    def _remember_callback(self, row: dict[str, Any]) -> None:
        """Keep who is to be told of the run's end."""
        options = cast("dict[str, object]", row["options"] if isinstance(row["options"], dict) else {})
        wanted = options.get("on_complete")
        if wanted is not None:
            # What is no callback has been refused by routing.
            with contextlib.suppress(ValueError):
                target = Jsonb(callback_of(wanted).model_dump(mode="json"))
                self._callbacks.append({"run": row["id"], "target": target})

    def _wake(self, session: _Session, row: dict[str, Any], wake: Wake) -> None:
        if wake.attach:
            lead = not session.roster
            session.roster.append(wake.agent)
            session.lead = session.lead or (wake.agent if lead else None)
            self._attachments.append({"session": row["session_id"], "agent": wake.agent, "run": row["id"]})
        options = wake.options
        run = self._run(session, row, wake.agent) | {
            "not_before": options.not_before,
            "expires": options.expires,
            "priority": options.priority,
            "budget": options.budget or Budget(),
        }
        agent = self._agents.get(wake.agent)
        if options.timeout is not None:
            run["timeout"] = timedelta(seconds=options.timeout)
        # What is to run later is pending till then, and in nobody's way.
        due = options.not_before is None or options.not_before <= session.row["now"]
        if session.active_run is not None and due and row["type"] == "message":
            match session.row["on_message"]:
                case "reject":
                    self._refuse(session, row, run, _BUSY.format(run=session.active_run), "busy")
                    return
                case "interrupt" if session.unread_by != wake.agent:
                    run["interrupts"] = session.active_run
                case _:
                    pass
        if session.active_run is None and due:
            session.active_run = row["id"]
            session.unread_by = wake.agent if row["type"] == "message" else None
            run["state"] = "queued"
            # Published right after the commit, so the next bell is due later; the rest is for the sweep.
            tenant = session.row["tenant"]
            if agent is not None and not session.row["paused"] and self._room[wake.agent, tenant] > 0:
                self._room[wake.agent, tenant] -= 1
                run["publishes"] = 1
                self.publications.append(
                    publication(
                        {
                            "id": row["id"],
                            "agent": wake.agent,
                            "session_id": row["session_id"],
                            "parent_run_id": run["parent"],
                            "queue": agent["queue"],
                            "priority": options.priority,
                        }
                    )
                )
        self._runs.append(run)

    def _refuse(self, session: _Session, row: dict[str, Any], run: dict[str, Any], why: str, reason: str) -> None:
        self._append(session, row, "error", why, run_id=row["id"], reason=reason)
        self._runs.append(run | {"state": "failed", "result": why, "reason": reason, "ended": True})

    def _run(self, session: _Session, row: dict[str, Any], agent: str) -> dict[str, Any]:
        registered = self._agents.get(agent)
        # Only the directive that spawned a child session is its parent's; what comes in later is its sender's own.
        parent = row["run_id"] if row["author"] == "agent" and row["type"] == "directive" else None
        timeout = registered["timeout"] if registered else None
        return new_run(session.row, row, agent, timeout=timeout, parent=parent) | {"first_wait": self._first_wait}

    def say(self, session: _Session, said: Said) -> None:
        """Append what a decision gives the log to say."""
        self._append(session, dict(said.entry), said.type, said.text, metadata=said.metadata)

    def _append(
        self,
        session: _Session,
        row: dict[str, Any],
        type: str,
        text: str,
        *,
        run_id: UUID | None = None,
        reason: str = "",
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self._entries.append(
            {
                "tenant": session.row["tenant"],
                "session": row["session_id"],
                "position": session.next_position,
                "type": type,
                "content": text,
                "metadata": Jsonb(
                    {"entry": str(row["id"])} | ({"reason": reason} if reason else {})
                    if metadata is None
                    else dict(metadata)
                ),
                "run": run_id,
            }
        )
        session.next_position += 1

    async def write(self, locked: dict[UUID, _Session]) -> None:
        """Write what was gathered, in few round trips."""
        tx = self._tx
        async with tx.pipeline(), tx.cursor() as cursor:
            if self._attachments:
                await cursor.executemany(
                    """
                    insert into chaz.roster_changes (session_id, agent, change, run_id)
                    values (%(session)s, %(agent)s, 'attach', %(run)s)
                    """,
                    self._attachments,
                )
            if self._runs:
                await insert_runs(tx, self._runs)
            if self._callbacks:
                # Told at once where there is no end to come: nobody was woken, or the run was refused.
                goes_on = {run["id"] for run in self._runs if not run["ended"]}
                await cursor.executemany(
                    """
                    insert into chaz.callbacks (run_id, target, ended_at, due_at)
                    values (%(run)s, %(target)s, case when %(ended)s then clock_timestamp() end,
                        case when %(ended)s then clock_timestamp() end)
                    on conflict do nothing
                    """,
                    [callback | {"ended": callback["run"] not in goes_on} for callback in self._callbacks],
                )
            if self._entries:
                await cursor.executemany(
                    """
                    insert into chaz.entries
                        (tenant, session_id, position, type, sender, author, content, metadata, run_id)
                    values (%(tenant)s, %(session)s, %(position)s, %(type)s, 'chaz', 'system', %(content)s,
                        %(metadata)s, %(run)s)
                    """,
                    self._entries,
                )
            await cursor.executemany(
                """
                update chaz.heads set next_position = %(next)s, active_run = %(active)s, agents_said = %(said)s
                where session_id = %(session)s
                """,
                [
                    {"session": id, "next": s.next_position, "active": s.active_run, "said": s.agents_said}
                    for id, s in locked.items()
                    if s.changed
                ],
            )
        for run in sorted((run for run in self._runs if run["ended"] and run["parent"]), key=lambda run: run["parent"]):
            outcome = RunOutcome(state="failed", reason=run["reason"], text=run["result"])
            await answer_parents(tx, run["id"], answer_of(run["agent"], outcome))


_BUSY = (
    "the session is busy with run {run} and refuses messages meanwhile (its on_message is reject); send it again later"
)
