"""Steering: in a session whose ``on_message`` is ``steer``, the agent at work hears new messages between two steps.

What a step's model had seen is stored with the step (``steps.read_to``), so that a replay shows it the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from uuid import UUID

from chaz import sessionlog
from chaz.database import Transaction
from chaz.entries import Entry
from chaz.runs import TAKEN_BACK, Claim, fence
from chaz.sessionlog import SAID


async def is_spoken_to(tx: Transaction, claim: Claim, *, after: int) -> bool:
    """Whether a message past position ``after`` waits that the run is to hear. Mostly none does; this locks nothing.

    A run that a schedule woke hears none: it may have nothing to say, and a message is owed an answer.
    """
    if claim.prompt is not None:
        return False
    cursor = await tx.execute(
        f"""
        select from chaz.sessions s where s.id = %(session)s and s.on_message = 'steer' and exists (
            select from chaz.runs p where p.session_id = s.id and p.state = 'pending' and p.cause = 'message'
                and p.agent = %(agent)s and p.trigger_position > %(after)s
                and (p.not_before is null or p.not_before <= clock_timestamp())
                and not {TAKEN_BACK})
        """,
        {"session": claim.session_id, "agent": claim.agent, "after": after},
    )
    return await cursor.fetchone() is not None


async def hear(tx: Transaction, claim: Claim, *, step: int, after: int) -> list[Entry]:
    """Take over the messages past ``after`` that wait for the run's agent, and move ``read_to`` past them; those.

    Their runs are superseded by this one, and a ``note`` says so. What was sent before that for a later time keeps a
    run of its own: the model has read past it. Done twice (its commit was in doubt), it gives the same again. Raises
    StaleAttempt.
    """
    await sessionlog.lock_head(tx, claim.session_id)
    await fence(tx, claim)
    taken = await tx.execute(
        f"""
        with taken as (
            update chaz.runs p set state = 'superseded', superseded_by = %(run)s
            from chaz.sessions s
            where s.id = p.session_id and s.on_message = 'steer'
                and p.session_id = %(session)s and p.state = 'pending' and p.cause = 'message' and p.agent = %(agent)s
                and p.trigger_position > %(after)s
                and (p.not_before is null or p.not_before <= clock_timestamp())
                and not {TAKEN_BACK}
            returning p.id, p.trigger_position),
        read as (
            update chaz.runs set read_to = greatest(read_to, (select max(trigger_position) from taken))
            where id = %(run)s and exists (select from taken))
        select id from taken order by trigger_position
        """,
        {"run": claim.run_id, "session": claim.session_id, "agent": claim.agent, "after": after},
    )
    if new := [str(row["id"]) for row in await taken.fetchall()]:
        messages = "a message" if len(new) == 1 else f"{len(new)} messages"
        await sessionlog.append(
            tx,
            session_id=claim.session_id,
            tenant=claim.tenant,
            type="note",
            sender="chaz",
            author="system",
            content=f"{claim.agent!r} hears {messages} before its step {step}",
            metadata={"entries": new, "reason": "steered", "run": str(claim.run_id), "step": step},
        )
    return await heard(tx, claim.run_id, claim.session_id, after=after)


async def heard(tx: Transaction, run_id: UUID, session_id: UUID, *, after: int) -> list[Entry]:
    """The messages past position ``after`` that the run has taken over, in order; also those taken back since."""
    cursor = await tx.execute(
        f"""
        select {SAID} from chaz.entries e
        where session_id = %(session)s and position > %(after)s and seq = 0
            and id = any(array(
                select r.id from chaz.runs r where r.superseded_by = %(run)s
                union all
                select jsonb_array_elements_text(n.metadata->'entries')::uuid from chaz.entries n
                where n.session_id = %(session)s and n.position > %(after)s and n.seq = 0 and n.type = 'note'
                    and n.metadata->>'reason' = 'steered' and n.metadata->>'run' = %(run)s::text))
        order by position
        """,
        {"run": run_id, "session": session_id, "after": after},
    )
    return [Entry.model_validate(row) for row in await cursor.fetchall()]


def by_step(entries: Sequence[Entry], read_to: Sequence[int]) -> Mapping[int, list[Entry]]:
    """Each message with the first step whose model had seen it; the next step, where none had.

    ``read_to`` says of each stored step how far its model had seen the log.
    """
    steps: dict[int, list[Entry]] = defaultdict(list)
    for entry in entries:
        position = entry.position or 0
        steps[next((step for step, seen in enumerate(read_to) if seen >= position), len(read_to))].append(entry)
    return steps
