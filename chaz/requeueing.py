"""Running anew what failed or was cancelled: a new run of the same agent and trigger, with an id of its own."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from pydantic import ValidationError

from chaz.database import Transaction
from chaz.entries import Budget, RunOptions, safe_text
from chaz.errors import AlreadyRequeued, NotRequeueable, RequeueRefused, UnknownRun
from chaz.runs import DEFAULT_TIMEOUT


async def requeue(tx: Transaction, run_id: UUID) -> UUID:
    """Make a new run of the agent and trigger of one that failed or was cancelled, and return its id.

    The root of a tree starts a tree of its own, whose usage begins at nothing; any other run stays in its tree, with
    what is left of its budget and time. What was asked at sending holds anew: budget, timeout and priority, and
    ``on_complete`` is told of the new run; ``countdown`` and ``expires`` are not, their instants being past. It takes
    its place in the session as any other run: queued if the session is free, else pending. Raises UnknownRun,
    NotRequeueable.
    """
    await tx.execute(
        """
        select from chaz.heads where session_id = (select session_id from chaz.runs where id = %(run)s) for update
        """,
        {"run": run_id},
    )
    options = await _options_of(tx, run_id)
    # The agent is attached (again): a run that failed because nobody served its agent took it off the session.
    row = await (
        await tx.execute(
            """
            with fresh as materialized (
                select chaz.new_id() as id),
            made as (
                insert into chaz.runs (id, tenant, session_id, agent, state, cause, trigger_position, prompt,
                    retry_of, priority, parent_run_id, root_run_id, depth, depth_left, scope, model, max_steps, suspect,
                    deadline, queued_at)
                select fresh.id, r.tenant, r.session_id, r.agent,
                    case when h.active_run is null then 'queued' else 'pending' end,
                    case r.cause when 'compaction' then r.cause else 'requeue' end, r.trigger_position, r.prompt,
                    r.id, r.priority, r.parent_run_id,
                    case r.root_run_id when r.id then fresh.id else r.root_run_id end,
                    r.depth, r.depth_left, r.scope, r.model, r.max_steps, r.suspect,
                    least(clock_timestamp() + coalesce(%(asked)s, a.timeout, %(timeout)s), s.deadline),
                    case when h.active_run is null then clock_timestamp() end
                from fresh cross join chaz.runs r join chaz.heads h using (session_id)
                    join chaz.sessions s on s.id = r.session_id left join chaz.agents a on a.name = r.agent
                where r.id = %(run)s
                returning id, session_id, agent, state, root_run_id),
            attached as (
                insert into chaz.roster_changes (session_id, agent, change, run_id)
                select session_id, agent, 'attach', id from made
                where not exists (
                    select from chaz.attachments a where a.session_id = made.session_id and a.agent = made.agent)),
            active as (
                update chaz.heads h set active_run = made.id
                from made where h.session_id = made.session_id and made.state = 'queued'),
            limits as (
                insert into chaz.tree_budgets (root_run_id, max_steps, max_tokens, max_cost)
                select id, %(steps)s, %(tokens)s, %(cost)s from made where root_run_id = id),
            told as (
                insert into chaz.callbacks (run_id, target)
                select id, %(target)s::jsonb from made where %(target)s::jsonb is not null)
            select id from made
            """,
            {
                "run": run_id,
                "timeout": DEFAULT_TIMEOUT,
                "asked": None if options.timeout is None else timedelta(seconds=options.timeout),
                "target": None if options.on_complete is None else options.on_complete.model_dump_json(),
                **(options.budget or Budget()).model_dump(),
            },
        )
    ).fetchone()
    assert row is not None
    return row["id"]


async def _options_of(tx: Transaction, run_id: UUID) -> RunOptions:
    """What was asked of a run that may be requeued, at its sending. Raises what :func:`requeue` raises."""
    cursor = await tx.execute(
        """
        select r.state, s.deadline, s.deadline <= clock_timestamp() as late, e.metadata->'options' as options
        from chaz.runs r left join chaz.sessions s on s.id = r.session_id
            left join chaz.entries e on e.session_id = r.session_id and e.position = r.trigger_position and e.seq = 0
        where r.id = %(run)s
        """,
        {"run": run_id},
    )
    old = await cursor.fetchone()
    if old is None:
        raise UnknownRun(run_id)
    if old["state"] not in {"failed", "cancelled"}:
        raise NotRequeueable(run_id, old["state"])
    later = await tx.execute(
        "select id, state from chaz.runs where retry_of = %(run)s and state not in ('failed', 'cancelled')",
        {"run": run_id},
    )
    if (row := await later.fetchone()) is not None:
        raise AlreadyRequeued(run_id, row["id"], row["state"])
    if old["late"]:
        raise RequeueRefused(run_id, f"the time of its session was over at {old['deadline']}; requeue its tree's root")
    try:
        return RunOptions.model_validate(old["options"] or {})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(("metadata.options", *map(str, first["loc"])))
        raise RequeueRefused(run_id, f"its entry is invalid ({safe_text(where, 200)}: {first['msg']})") from None
