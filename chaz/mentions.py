"""Mentions: an agent's answer that names another agent of the session wakes that one, within the session's burst.

The burst bounds what agents say to each other without anybody else: so many answers in a row may wake. It is counted on
the session's head, by whoever holds that: an end of a run adds one with the answer that it appends, and placing begins
anew with each message of a person and each directive.
"""

from __future__ import annotations

from uuid import UUID

from chaz import rosters, sessionlog
from chaz.database import Row, Transaction
from chaz.routing import Roster, first_mentioned
from chaz.waking import INHERITED, insert_runs, new_run


async def answered(tx: Transaction, run: Row, *, position: int, text: str, burst: int) -> None:
    """Count the answer that ``run`` has just appended, and wake the agent that it mentions. The caller holds the head.

    ``burst`` is the deployment's. What is woken is a run as that of a message is: it takes its turn and coalesces. But
    whatever the session's ``on_message`` says, it is not refused, interrupts nothing and steers nobody: the only run
    at work is the one that is ending. What a schedule has its agent say does not count, and wakes nobody beyond the
    burst.
    """
    head = await tx.execute(
        """
        update chaz.heads set agents_said = agents_said + %(counts)s where session_id = %(session)s
        returning agents_said + 1 - %(counts)s as agents_said
        """,
        {"session": run["session_id"], "counts": int(run["prompt"] is None)},
    )
    counted = await head.fetchone()
    if counted is None or "@" not in text:
        return
    attached = await rosters.roster(tx, run["session_id"])
    agent = first_mentioned(text, run["agent"], Roster([attachment.agent for attachment in attached]))
    if agent is None:
        return
    cursor = await tx.execute(
        f"""
        select e.id, e.tenant, e.session_id, e.position, e.type, e.author, e.run_id, {INHERITED}, a.timeout,
            coalesce(s.burst, %(burst)s) as burst
        from chaz.entries e join chaz.sessions s on s.id = e.session_id left join chaz.agents a on a.name = %(agent)s
        where e.session_id = %(session)s and e.position = %(position)s and e.seq = 0
        """,
        {"session": run["session_id"], "position": position, "agent": agent, "burst": burst},
    )
    entry = await cursor.fetchone()
    assert entry is not None
    if counted["agents_said"] > entry["burst"]:
        await _note(tx, run, entry["id"], agent, entry["burst"])
        return
    # A sibling: it was spoken to, not spawned; but whoever spawned the one that speaks ends both.
    await insert_runs(tx, [new_run(entry, entry, agent, timeout=entry["timeout"], parent=run["parent_run_id"])])


async def _note(tx: Transaction, run: Row, entry: UUID, agent: str, burst: int) -> None:
    why = (
        "agents wake nobody by a mention here (the burst is 0)"
        if not burst
        else f"agents have said more than {burst} messages since a person or a directive spoke (the burst is {burst})"
    )
    await sessionlog.append(
        tx,
        session_id=run["session_id"],
        tenant=run["tenant"],
        type="note",
        sender="chaz",
        author="system",
        content=f"{agent!r} was not woken, though {run['agent']!r} mentions it: {why}",
        metadata={"entry": str(entry), "reason": "burst", "agent": agent},
    )
