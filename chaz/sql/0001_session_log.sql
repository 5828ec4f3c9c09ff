-- chaz: a session's log, the runs that answer it, and what they did.
--
--   entries        the log. A row with position null is the inbox: a producer inserted it, nobody has placed it yet.
--                    chaz.send() and plain INSERT/COPY add unplaced rows; the listener places them;
--                    workers add placed rows under the session's head; audit consumers add tool_call and tool_result.
--   sessions       one row per session, made when its first entry is placed (or with a child, by its parent's run).
--   heads          one row per session: the next position and the active run. Who holds its lock may append.
--   roster_changes who was attached to a session, made its lead, or detached. Only ever added to, so that nobody waits.
--   attachments    a view: the agents of a session, by these.
--   agents         what workers said they serve: name, queue, version, when.
--   pauses         agents, sessions, or everything, of which nothing new starts till they are resumed.
--   runs           one agent's work on one trigger.        listener: pending, queued      worker: running, parked, final
--   steps          one stored turn of the model per row.   worker
--   model_calls    what each call of a model used and cost: the one account of it.  worker
--   calls          one tool call of a step per row.        worker
--   waits          what a parked run waits for.            the run asks; the child's end answers
--   cancellations  runs that are to end, with their trees.  anybody asks by chaz.cancel(); the listener ends them
--   approvals      what runs asked people: whether a call may be made, or a question; and the word that came back.
--   schedules      when agents wake by themselves, and what they are told then.   agents and people; the listener moves them on
--   firings        what came of each slot of a schedule: a run, or why there is none.   listener
--   callbacks      what is told of a run's end, and to whom; due once it has ended, gone once it has been told.
--   tool_rates     when each tool with a rate limit may be called next.  workers, before a call
--   tree_budgets   what a tree of runs may use and used, by its root.
--   limits         what sessions, agents, or everything may use in a period, and used in it.
--   workers        one lease per worker process (an incarnation, never a machine's name). Only it updates its row.
--   listeners      one row per listener process, for its health.
--   doorbell       one row: until when a listener is awake and needs no NOTIFY.
--   waiters        processes that wait for ends of runs; without one, an end notifies nobody.
--
-- Nothing refers to sessions by a foreign key: its check would make a listener wait for whoever holds a session's row.
--
-- Locks are taken in this order: heads (by session id), an agent with a cap (by a claim), runs (child before parent),
-- tree_budgets, limits (by key), workers, tool_rates, schedules (first the advisory lock of an agent's, by whoever counts
-- them).
--
-- States that must not happen raise:  CZ001 invalid entry   CZ002 conflict   CZ003 unknown session   CZ004 append-only
--                                     CZ005 unknown run     CZ006 unknown request

create function chaz.new_id() returns uuid
language sql volatile parallel safe
as $$
    -- A uuid of version 7: milliseconds first, so that the index grows at one end. PostgreSQL has one from 18 only.
    select encode(
        set_bit(set_bit(
            overlay(uuid_send(gen_random_uuid())
                placing substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3) from 1 for 6),
            52, 1), 53, 1),
        'hex')::uuid
$$;

create function chaz.derived_id(kind text, scope text, name text) returns uuid
language sql immutable strict parallel safe
as $$
    -- A uuid that anybody computes alike from the same words: version 8 (RFC 9562) over sha256, since PostgreSQL
    -- has no sha1 without an extension. Text cannot hold NUL, so the joined words are unambiguous.
    select encode(set_byte(set_byte(h, 6, (get_byte(h, 6) & 15) | 128), 8, (get_byte(h, 8) & 63) | 128), 'hex')::uuid
    from (select substring(sha256(
        convert_to(kind, 'UTF8') || '\x00'::bytea || convert_to(scope, 'UTF8') || '\x00'::bytea || convert_to(name, 'UTF8')
    ) from 1 for 16)) as hashed(h)
$$;

create function chaz.session_id(name text, tenant text default '') returns uuid
language sql immutable strict parallel safe
as $$
    select chaz.derived_id('session', tenant, name)
$$;

create function chaz.opening_key(id uuid) returns bigint
language sql immutable strict parallel safe
as $$
    -- The advisory lock of whoever makes the row of this session, or the cancellation of this run, in a transaction that
    -- may last: a listener, which would wait for that row, leaves it to a later round. Of a v7 id the end is random.
    select ('x' || right(replace(id::text, '-', ''), 16))::bit(64)::bigint
$$;


-- The log ------------------------------------------------------------------------------------------------------------

create table chaz.entries (
    id          uuid        not null default chaz.new_id() constraint entries_pkey primary key,
    tenant      text        not null default '',
    session_id  uuid        not null,  -- no foreign key: an insert must not wait for whoever makes the session
    arrival     bigint      not null generated always as identity,
    position    bigint,
    seq         integer     not null default 0,
    type        text        not null,
    sender      text        not null,
    author      text        not null default 'program',
    recipient   text,
    content     text        not null,
    metadata    jsonb       not null default '{}',
    run_id      uuid,
    created_at  timestamptz not null default clock_timestamp(),
    constraint entries_place unique (session_id, position, seq),
    constraint entries_type check (type in ('message', 'directive', 'summary', 'tool_call', 'tool_result', 'ack', 'error',
        'note', 'approval_request', 'approval_decision', 'compaction_request')),
    constraint entries_author check (author in ('human', 'program', 'agent', 'system')),
    constraint entries_unplaced_type check (
        position is not null or type in ('message', 'directive', 'approval_decision', 'compaction_request')),
    constraint entries_directive_recipient check (type <> 'directive' or recipient is not null),
    constraint entries_sender check (length(sender) between 1 and 200),
    constraint entries_recipient check (length(recipient) between 1 and 200),
    constraint entries_content check (length(content) <= 1048576),
    constraint entries_metadata check (jsonb_typeof(metadata) = 'object'),
    constraint entries_seq check (seq >= 0 and (position is not null or seq = 0))
);
create index entries_inbox on chaz.entries (session_id, arrival) where position is null;
create index entries_run on chaz.entries (run_id) where run_id is not null;
-- Audit entries, acks and notes lie between what is said: nobody who reads the conversation has to walk over them.
create index entries_said on chaz.entries (session_id, position)
    where type in ('message', 'directive') and position is not null;
create index entries_marks on chaz.entries (session_id, type, position) where type in ('summary', 'error');

create function chaz.refuse_change() returns trigger
language plpgsql
as $$
begin
    raise exception 'the log is append-only: % of chaz.entries is refused', tg_op
        using errcode = 'CZ004', hint = 'Only the role chaz_retention may remove entries.';
end
$$;

-- A decision is worth what its sender is: only whoever has the role may bring one, and the role's name is kept with it.
do $$
begin
    create role chaz_approver nologin;
exception
    when duplicate_object or unique_violation then null;
end
$$;

create function chaz.check_decision() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
    if new.author = 'agent' then
        raise exception 'an agent decides nothing: % cannot send an approval_decision', quote_literal(new.sender)
            using errcode = 'CZ001';
    elsif new.author <> 'system' then
        if current_user <> (select tableowner from pg_tables where schemaname = 'chaz' and tablename = 'entries')
            and not pg_has_role(current_user, 'chaz_approver', 'usage') then
            raise exception 'the role % may not decide', quote_ident(session_user)
                using errcode = 'insufficient_privilege', hint = 'grant chaz_approver to it.';
        end if;
        new.metadata := new.metadata || jsonb_build_object('decided_as', session_user);
        -- Whether it came in time is not its sender's to say.
        new.created_at := clock_timestamp();
    end if;
    return new;
end
$$;

create trigger entries_decision before insert on chaz.entries for each row
    when (new.type = 'approval_decision' and new.position is null) execute function chaz.check_decision();

-- Placing is the one change that an entry goes through: position from null to a number, and nothing else.
create trigger entries_append_only_update before update on chaz.entries for each row
    when (current_user <> 'chaz_retention' and not (
        old.position is null and new.position is not null
        and (new.id, new.tenant, new.session_id, new.arrival, new.seq, new.type, new.sender, new.author, new.recipient,
             new.content, new.metadata, new.run_id, new.created_at)
            is not distinct from
            (old.id, old.tenant, old.session_id, old.arrival, old.seq, old.type, old.sender, old.author, old.recipient,
             old.content, old.metadata, old.run_id, old.created_at)))
    execute function chaz.refuse_change();
create trigger entries_append_only_delete before delete on chaz.entries for each row
    when (current_user <> 'chaz_retention') execute function chaz.refuse_change();
create trigger entries_append_only_truncate before truncate on chaz.entries for each statement
    execute function chaz.refuse_change();


-- The doorbell -------------------------------------------------------------------------------------------------------

create table chaz.doorbell (
    single      boolean     not null default true constraint doorbell_pkey primary key constraint doorbell_single check (single),
    awake_until timestamptz not null default '-infinity'
);
insert into chaz.doorbell default values;

create function chaz.ring() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    awake_until timestamptz;
begin
    -- A run that leaves its worker makes room for another only where its agent has a cap.
    if tg_argv[0] = 'capped' then
        if not exists (select from chaz.agents a where a.name = new.agent and a.max_concurrent is not null) then
            return null;
        end if;
    end if;
    -- Rung in this transaction already. The setting is local, so a savepoint that is rolled back takes both away.
    if current_setting('chaz.rung', true) = 'on' or current_setting('chaz.bell', true) = 'off' then
        return null;
    end if;
    -- A listener that is awake finds the row by itself. More than 2 s ahead is a clock that was set back, not a listener;
    -- an older snapshot than this statement's may be blind to one that went to sleep.
    if current_setting('transaction_isolation') = 'read committed' then
        select d.awake_until into awake_until from chaz.doorbell d;
        if awake_until between clock_timestamp() and clock_timestamp() + interval '2 seconds' then
            return null;
        end if;
    end if;
    perform pg_notify('chaz', '');
    perform set_config('chaz.rung', 'on', true);
    return null;
end
$$;

-- Deferred, because what commits later than it reads would be read as "awake" by a listener long asleep.
create constraint trigger entries_ring after insert on chaz.entries deferrable initially deferred
    for each row when (new.position is null) execute function chaz.ring();


-- Sessions and agents ------------------------------------------------------------------------------------------------

create table chaz.sessions (
    id            uuid        not null constraint sessions_pkey primary key,
    tenant        text        not null default '',
    name          text,
    parent_run_id uuid,
    root_run_id   uuid,
    depth         integer     not null default 0,
    -- what a child's session hands on to every run in it; null: as the agent says
    depth_left    integer,     -- how many levels deep they may spawn
    scope         jsonb,       -- the tools that they may use: lists of globs, each of which has to match
    model         text,
    max_steps     integer,
    deadline      timestamptz, -- none may last longer
    detached      boolean     not null default false, -- they outlive the cancelling of the run that opened it
    schedule      uuid,        -- whose firing opened it
    on_message    text        not null default 'coalesce',
    -- what its runs may do without a person's word, and who gives that; null: as the deployment says
    approvers        text[],   -- names or globs; none: whatever needs a word is denied
    auto_approve     text[],   -- tools, by globs
    approval_timeout interval,
    burst         integer,     -- so many messages of agents in a row may wake others; null: as the deployment says
    created_at    timestamptz not null default clock_timestamp(),
    constraint sessions_name unique (tenant, name),
    constraint sessions_on_message check (on_message in ('coalesce', 'each', 'reject', 'interrupt', 'steer')),
    constraint sessions_burst check (burst >= 0)
);

create index sessions_tree on chaz.sessions (root_run_id) where root_run_id is not null;
create index sessions_created on chaz.sessions (created_at, id);
create index sessions_children on chaz.sessions (parent_run_id) where parent_run_id is not null;

create table chaz.heads (
    session_id    uuid   not null constraint heads_pkey primary key,
    next_position bigint not null default 1,
    active_run    uuid,
    agents_said   integer not null default 0  -- answers of agents since the last message of a person, or directive
) with (fillfactor = 70);

-- No row is ever changed and none is unique: a listener that attaches an agent waits for no transaction that does the same.
create table chaz.roster_changes (
    id         bigint      not null generated always as identity constraint roster_changes_pkey primary key,
    session_id uuid        not null,
    agent      text        not null,
    change     text        not null,
    run_id     uuid,       -- the run that made it necessary; null: somebody asked for it
    changed_at timestamptz not null default clock_timestamp(),
    constraint roster_changes_agent check (length(agent) between 1 and 200),
    constraint roster_changes_change check (change in ('attach', 'lead', 'detach'))
);
create index roster_changes_of_session on chaz.roster_changes (session_id, id);

-- The lead is who was made it last, if that one is still attached; else the first attached. `since` is the order.
create view chaz.attachments as
select session_id, agent, since, attached_at, by_run,
    row_number() over (partition by session_id order by (led is not distinct from newest_lead) desc, since) = 1 as lead
from (
    select session_id, agent, newest_lead, min(id) as since, min(changed_at) as attached_at,
        max(id) filter (where change = 'lead') as led, bool_and(run_id is not null) as by_run
    from (
        select c.*, max(id) filter (where change = 'lead') over (partition by session_id) as newest_lead,
            max(id) filter (where change = 'detach') over (partition by session_id, agent) as detached
        from chaz.roster_changes c) c
    where change <> 'detach' and (detached is null or id > detached)
    group by session_id, agent, newest_lead) attached;

create table chaz.agents (
    name           text        not null constraint agents_pkey primary key,
    queue          text        not null,
    version        text        not null,
    max_steps      integer     not null,
    timeout        interval    not null,
    -- what a spawn is checked against; null: a version that does not say
    tools          text[],
    models         text[],
    max_concurrent integer,    -- so many of its runs are running at once, on all machines together; null: any number
    seen_at        timestamptz not null default clock_timestamp(),
    constraint agents_max_concurrent check (max_concurrent > 0)
);

create table chaz.pauses (
    kind      text        not null,
    name      text        not null,  -- the agent's name; the session's id; of everything, empty
    since     timestamptz not null default clock_timestamp(),
    paused_by text        not null,
    reason    text        not null default '',
    constraint pauses_pkey primary key (kind, name),
    constraint pauses_kind check (kind in ('agent', 'session', 'all'))
);


-- Processes ----------------------------------------------------------------------------------------------------------

create table chaz.workers (
    id         uuid        not null constraint workers_pkey primary key,
    name       text        not null,
    pid        integer     not null,
    isolation  boolean     not null default false,
    started_at timestamptz not null default clock_timestamp(),
    beat_at    timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null
);
create index workers_expiry on chaz.workers (expires_at);

create table chaz.listeners (
    id         uuid        not null constraint listeners_pkey primary key,
    name       text        not null,
    pid        integer     not null,
    mode       text        not null,
    started_at timestamptz not null default clock_timestamp(),
    seen_at    timestamptz not null default clock_timestamp(),
    constraint listeners_mode check (mode in ('listening', 'polling', 'stopped'))
);

create table chaz.waiters (
    id         uuid        not null constraint waiters_pkey primary key,
    expires_at timestamptz not null
);


-- Runs ---------------------------------------------------------------------------------------------------------------

create table chaz.runs (
    id               uuid        not null constraint runs_pkey primary key,
    tenant           text        not null default '',
    session_id       uuid        not null,
    agent            text        not null,
    state            text        not null,
    cause            text        not null,
    trigger_position bigint,
    prompt           text,                 -- what a schedule tells it: no entry, and nobody else's to read
    retry_of         uuid,
    superseded_by    uuid,
    interrupts       uuid,                 -- the run that its message is to interrupt
    priority         integer     not null default 0,
    -- lineage
    parent_run_id    uuid,
    root_run_id      uuid        not null,
    depth            integer     not null default 0,
    -- limits; null: as the agent says
    depth_left       integer,
    scope            jsonb,
    model            text,
    max_steps        integer,
    not_before       timestamptz,
    expires_at       timestamptz,          -- not started by then: failed
    deadline         timestamptz not null, -- not ended by then: failed
    -- the attempt
    attempt          integer     not null default 0,
    crashes          integer     not null default 0,
    suspect          boolean     not null default false,  -- a worker was lost during a call of it: it runs alone
    lost_alone       boolean     not null default false,  -- and was lost again while it did: it is given up
    approve_all      boolean     not null default false,  -- a person has approved whatever else it calls
    worker_id        uuid,
    claim            uuid,
    ack_position     bigint,
    read_to          bigint,
    -- the audit trail
    event_seq        integer     not null default 0,
    digest           bytea       not null default '',
    audit_after      timestamptz,          -- when to look whether all its events are recorded; null: they are
    -- the bell
    publish_after    timestamptz not null default clock_timestamp(),
    publishes        integer     not null default 0,
    -- what it came to
    steps            integer     not null default 0,
    -- what it holds of its tree's budget, for the step that it is about to take
    reserved_step    integer,
    reserved_tokens  bigint      not null default 0,
    reserved_cost    numeric     not null default 0,
    waits_for        text,
    result           text,
    reason           text,
    created_at       timestamptz not null default clock_timestamp(),
    queued_at        timestamptz,
    started_at       timestamptz,
    ended_at         timestamptz,
    constraint runs_state check (
        state in ('pending', 'queued', 'running', 'parked', 'succeeded', 'failed', 'cancelled', 'superseded')),
    constraint runs_cause check (cause in ('message', 'directive', 'compaction', 'schedule', 'requeue')),
    constraint runs_owner check ((state = 'running') = (worker_id is not null and claim is not null)),
    constraint runs_ended check ((state in ('succeeded', 'failed', 'cancelled')) = (ended_at is not null)),
    constraint runs_superseded check ((state = 'superseded') = (superseded_by is not null))
) with (fillfactor = 70);
create unique index runs_one_active on chaz.runs (session_id) where state in ('queued', 'running', 'parked');
create index runs_pending on chaz.runs (session_id, priority desc, trigger_position) where state = 'pending';
create index runs_interrupting on chaz.runs (interrupts) where state = 'pending' and interrupts is not null;
create index runs_to_publish on chaz.runs (agent, tenant, priority desc, publish_after) where state = 'queued';
create index runs_announced on chaz.runs (agent, tenant, publish_after) where state = 'queued' and publishes > 0;
create index runs_running on chaz.runs (agent) where state = 'running';
create index runs_of_worker on chaz.runs (worker_id) where state = 'running';
create index runs_deadline on chaz.runs (deadline) where state in ('pending', 'queued', 'running', 'parked');
create index runs_scheduled on chaz.runs (not_before) where state = 'pending' and not_before is not null;
create index runs_expiry on chaz.runs (expires_at) where state in ('pending', 'queued') and expires_at is not null;
create index runs_to_audit on chaz.runs (audit_after) where audit_after is not null;
create index runs_tree on chaz.runs (root_run_id);
create index runs_children on chaz.runs (parent_run_id) where parent_run_id is not null;
create index runs_superseded_by on chaz.runs (superseded_by) where superseded_by is not null;
create index runs_retries on chaz.runs (retry_of) where retry_of is not null;
create index runs_created on chaz.runs (created_at);
create index runs_compactions on chaz.runs (session_id, trigger_position) where cause = 'compaction';

-- Whoever makes a run queued rings, so that a listener publishes it; and whoever makes room under an agent's cap.
create constraint trigger runs_ring_insert after insert on chaz.runs deferrable initially deferred
    for each row when (new.state = 'queued') execute function chaz.ring();
create constraint trigger runs_ring_capped after update of state on chaz.runs deferrable initially deferred
    for each row when (old.state = 'running' and new.state <> 'running') execute function chaz.ring('capped');
create constraint trigger runs_ring_update after update of state on chaz.runs deferrable initially deferred
    for each row when (new.state = 'queued' and old.state <> 'queued') execute function chaz.ring();

-- A request touches no run, so that it waits for nobody. It may come before its run, while the entry is not placed.
create table chaz.cancellations (
    run_id        uuid        not null constraint cancellations_pkey primary key,
    cancelled_by  text        not null,
    reason        text        not null default '',
    parent_run_id uuid,       -- the cancelled run that had spawned this one; null: this one was named
    requested_at  timestamptz not null default clock_timestamp(),
    done_at       timestamptz, -- the run is over, and its children have rows of their own
    constraint cancellations_cancelled_by check (length(cancelled_by) between 1 and 200),
    constraint cancellations_reason check (length(reason) <= 10000)
);
create index cancellations_open on chaz.cancellations (requested_at) where done_at is null;

create constraint trigger cancellations_ring after insert on chaz.cancellations deferrable initially deferred
    for each row execute function chaz.ring();

create table chaz.schedules (
    key          uuid        not null constraint schedules_pkey primary key,  -- derived from tenant, agent and id
    tenant       text        not null default '',
    agent        text        not null,
    id           text        not null,
    prompt       text        not null,
    cron         text,
    time_zone    text        not null default 'UTC',
    every        interval,
    at           timestamptz,
    anchor       timestamptz not null default clock_timestamp(),  -- from where an interval is counted
    session_id   uuid,                     -- it is pinned to it; null: each firing opens one
    enabled      boolean     not null default true,
    expires_at   timestamptz,
    max_fires    integer,
    fire_count   integer     not null default 0,
    max_failures integer,
    failures     integer     not null default 0,   -- in a row
    jitter       interval    not null default '0',
    catch_up     text        not null default 'skip',
    declared     jsonb,                    -- as its agent's definition had it last; null: it never did
    next_slot    timestamptz,              -- null: it fires no more, and the reason says why
    next_at      timestamptz,              -- the slot and its jitter
    reason       text,
    retired_by   text,                     -- "code": the definition no longer has it, and may bring it back
    retired_at   timestamptz,
    created_by   text        not null,
    created_at   timestamptz not null default clock_timestamp(),
    changed_by   text        not null,
    changed_at   timestamptz not null default clock_timestamp(),
    constraint schedules_id unique (tenant, agent, id),
    constraint schedules_trigger check (num_nonnulls(cron, every, at) = 1),
    constraint schedules_every check (every > interval '0'),
    constraint schedules_jitter check (jitter >= interval '0'),
    constraint schedules_catch_up check (catch_up in ('skip', 'once')),
    constraint schedules_limits check (max_fires > 0 and max_failures > 0),
    constraint schedules_next check ((next_slot is null) = (next_at is null) and (next_at is null) = (reason is not null)),
    constraint schedules_fires check (next_at is null or (enabled and retired_at is null)),
    constraint schedules_retired check ((retired_at is null) = (retired_by is null))
) with (fillfactor = 70);
create index schedules_due on chaz.schedules (next_at) where next_at is not null;

-- A listener that sleeps until the next one is due has to hear of one that is due before.
create constraint trigger schedules_ring after insert or update of next_at on chaz.schedules
    deferrable initially deferred for each row when (new.next_at is not null) execute function chaz.ring();

create table chaz.firings (
    schedule   uuid        not null,
    slot       timestamptz not null,
    run_id     uuid,
    session_id uuid,
    skipped    text,                       -- why there is no run, in a word
    detail     text        not null default '',
    fired_by   text,                       -- who asked for it; null: it was due
    fired_at   timestamptz not null default clock_timestamp(),
    constraint firings_pkey primary key (schedule, slot),
    constraint firings_skipped check ((run_id is null) = (skipped is not null))
);
create unique index firings_run on chaz.firings (run_id) where run_id is not null;

create table chaz.callbacks (
    run_id      uuid        not null constraint callbacks_pkey primary key,
    target      jsonb       not null,
    ended_at    timestamptz,           -- null: its run goes on
    due_at      timestamptz,           -- when to tell it (again)
    tries       integer     not null default 0,
    last_error  text,
    given_up_at timestamptz,
    constraint callbacks_due check ((due_at is null) = (ended_at is null))
);
create index callbacks_to_tell on chaz.callbacks (due_at) where due_at is not null and given_up_at is null;

-- Whoever ends a run of which somebody is to be told rings, so that a listener tells it.
create constraint trigger callbacks_ring after insert or update of due_at on chaz.callbacks
    deferrable initially deferred for each row when (new.due_at is not null and new.tries = 0) execute function chaz.ring();

-- What is used is counted with each stored step; what is reserved is held by runs (runs.reserved_*) that take one.
create table chaz.tree_budgets (
    root_run_id     uuid    not null constraint tree_budgets_pkey primary key,
    max_steps       integer,
    steps           integer not null default 0,
    reserved_steps  integer not null default 0,
    max_tokens      bigint,
    tokens          bigint  not null default 0,
    reserved_tokens bigint  not null default 0,
    max_cost        numeric,
    cost            numeric not null default 0,
    reserved_cost   numeric not null default 0
) with (fillfactor = 70);

-- Counted with each stored step, in its transaction. Nothing is reserved: a limit is looked at before a model is asked, so
-- that each run that is at work then may take one turn more than it allows.
create table chaz.limits (
    kind       text        not null,
    name       text        not null,  -- the agent's name; the session's id; of everything, empty
    period     interval    not null,  -- a fixed number of seconds; periods begin at multiples of it from Monday, 2001-01-01 UTC
    max_tokens bigint,
    max_cost   numeric,
    ends_at    timestamptz not null,  -- of the period that is counted here; past: nothing is used of the one that goes on
    tokens     bigint      not null default 0,
    cost       numeric     not null default 0,
    unpriced   integer     not null default 0,  -- calls of models without a known price
    set_by     text        not null,
    set_at     timestamptz not null default clock_timestamp(),
    constraint limits_pkey primary key (kind, name, period),
    constraint limits_kind check (kind in ('session', 'agent', 'all')),
    constraint limits_period check (period > interval '0'),
    constraint limits_max check (max_tokens is not null or max_cost is not null),
    constraint limits_max_tokens check (max_tokens > 0),
    constraint limits_max_cost check (max_cost > 0)
) with (fillfactor = 70);

create function chaz.period_end(period interval, at timestamptz default clock_timestamp()) returns timestamptz
language sql stable parallel safe
as $$
    -- In seconds, since a day of timestamptz is not always 24 hours.
    select date_bin(s.stride, at, timestamptz '2001-01-01 00:00:00+00') + s.stride
    from (select make_interval(secs => extract(epoch from period)::float8)) as s(stride)
$$;


-- The journal --------------------------------------------------------------------------------------------------------

create table chaz.steps (
    run_id     uuid        not null constraint steps_run references chaz.runs,
    step       integer     not null,
    attempt    integer     not null,
    version    text        not null,  -- of the agent's definition
    read_to    bigint      not null,  -- the last position that the model had seen
    turn       json        not null,  -- json, not jsonb: kept as it came, escaped NULs and lone surrogates included
    created_at timestamptz not null default clock_timestamp(),
    constraint steps_pkey primary key (run_id, step)
);

-- One row for each turn that a model gave, the refused ones (cut off, filtered, malformed) too: they are paid for as well.
-- Agent, session, tree and tenant are the run's, which never change, so that the account needs no other table.
create table chaz.model_calls (
    run_id            uuid        not null,
    step              integer     not null,
    attempt           integer     not null,
    try               integer     not null,  -- 0: the turn that was stored; else one of its tries that was refused
    tenant            text        not null,
    session_id        uuid        not null,
    root_run_id       uuid        not null,
    agent             text        not null,
    model             text        not null,
    prompt_tokens     bigint      not null,
    completion_tokens bigint      not null,
    cached_tokens     bigint      not null,  -- a part of the prompt's
    reasoning_tokens  bigint      not null,  -- a part of the completion's
    cost              numeric,               -- null: the model's price is not known
    created_at        timestamptz not null default clock_timestamp(),
    constraint model_calls_pkey primary key (run_id, step, attempt, try),
    constraint model_calls_try check (try >= 0)
);
create unique index model_calls_stored on chaz.model_calls (run_id, step) where try = 0;
create index model_calls_created on chaz.model_calls (created_at);
create index model_calls_session on chaz.model_calls (session_id, created_at);
create index model_calls_tree on chaz.model_calls (root_run_id);

create table chaz.calls (
    run_id          uuid        not null,
    step            integer     not null,
    ordinal         integer     not null,
    call_id         text        not null,
    tool            text        not null,
    arguments       text        not null,  -- for workers only
    shown           text,                  -- what leaves of them; null: all
    attempt         integer     not null,
    state           text        not null default 'started',
    outcome         text,
    result          text,
    error           text,
    call_position   bigint      not null,
    call_seq        integer     not null,
    result_position bigint,
    result_seq      integer,
    result_attempt  integer,
    started_at      timestamptz not null default clock_timestamp(),
    ended_at        timestamptz,
    constraint calls_pkey primary key (run_id, step, ordinal),
    constraint calls_step foreign key (run_id, step) references chaz.steps,
    constraint calls_state check (state in ('started', 'done')),
    constraint calls_outcome check (outcome in ('ok', 'error', 'cancelled', 'unknown')),
    constraint calls_done check ((state = 'done') = (outcome is not null and result is not null and result_seq is not null))
);

create function chaz.keep_until_told() returns trigger
language plpgsql
as $$
begin
    if exists (select from chaz.runs r where r.id = old.run_id and (r.ended_at is null or r.audit_after is not null)) then
        raise exception 'call %.% of run % stays until the run has ended and its audit trail is complete',
            old.step, old.ordinal, old.run_id using errcode = 'CZ004';
    end if;
    return old;
end
$$;

-- What a consumer has not recorded is told again from here.
create trigger calls_kept_until_told before delete on chaz.calls for each row execute function chaz.keep_until_told();

create table chaz.waits (
    run_id       uuid        not null,
    step         integer     not null,
    ordinal      integer     not null,
    kind         text        not null,
    child_run_id uuid,
    answer       json,       -- what the call came to, once answered
    created_at   timestamptz not null default clock_timestamp(),
    answered_at  timestamptz,
    constraint waits_pkey primary key (run_id, step, ordinal),
    -- A call that waits to be approved has not started: it has no row in calls, and starting it takes the wait away.
    constraint waits_step foreign key (run_id, step) references chaz.steps,
    constraint waits_kind check (kind in ('child', 'approval', 'question')),
    constraint waits_child check ((kind = 'child') = (child_run_id is not null)),
    constraint waits_answered check ((answer is null) = (answered_at is null))
);
create index waits_open on chaz.waits (child_run_id) where answer is null;

create table chaz.approvals (
    id             uuid        not null constraint approvals_pkey primary key,  -- its approval_request entry's, too
    kind           text        not null,
    run_id         uuid        not null,
    step           integer     not null,
    ordinal        integer     not null,
    tenant         text        not null,
    session_id     uuid        not null,  -- where it is asked: the run's own session, or that of its tree's root
    agent          text        not null,
    tool           text        not null,
    risk           text        not null,
    shown          text        not null,  -- the arguments, sensitive ones masked; or the question
    digest         text        not null,  -- of the exact call
    choices        text[],                -- of a question: what may be answered; null: anything
    approvers      text[]      not null,  -- the deployment's, where the session names none
    asked_at       timestamptz not null default clock_timestamp(),
    expires_at     timestamptz not null,
    decision       text,
    decided_by     text,
    decided_as     text,                  -- the database's role that brought the decision
    reason         text,
    decided_at     timestamptz,
    constraint approvals_call unique (run_id, step, ordinal),
    constraint approvals_kind check (kind in ('approval', 'question')),
    constraint approvals_risk check (risk in ('low', 'medium', 'high')),
    constraint approvals_decision check (
        decision in ('approve', 'approve_all', 'deny', 'answer', 'timed_out', 'cancelled')),
    constraint approvals_decided check ((decision is null) = (decided_at is null) and (decision is null) = (decided_by is null))
);
create index approvals_open on chaz.approvals (session_id, asked_at) where decision is null;
create index approvals_expiry on chaz.approvals (expires_at) where decision is null;

-- Shared by all machines. A call takes its turn in a transaction of its own, before it starts.
create table chaz.tool_rates (
    tool    text        not null constraint tool_rates_pkey primary key,
    next_at timestamptz not null default '-infinity'  -- when a burst of none may be called again
) with (fillfactor = 70);


-- The one door -------------------------------------------------------------------------------------------------------

create function chaz.send(
    session          text,
    type             text,
    sender           text,
    content          text,
    recipient        text        default null,
    author           text        default 'program',
    id               uuid        default null,
    idempotency_key  text        default null,
    metadata         jsonb       default '{}',
    tenant           text        default '',
    not_before       timestamptz default null,
    expires          timestamptz default null,
    timeout          interval    default null,
    priority         integer     default null,
    budget           jsonb       default null,
    open_session     boolean     default false,
    on_complete      jsonb       default null
) returns uuid
language plpgsql
as $$
-- Insert one entry and return its id, which is also the id of the run that answers it. It takes no lock but for a
-- caller-given id or key, which waits for an open transaction that uses the same one.
-- `session` is a name, or a uuid for a session that exists (`open_session` makes it).
#variable_conflict use_variable
declare
    session_id uuid;
    options    jsonb := jsonb_strip_nulls(jsonb_build_object(
        'not_before', not_before, 'expires', expires, 'timeout', extract(epoch from timeout), 'priority', priority,
        'budget', jsonb_strip_nulls(budget)));
    entry_id   uuid := id;
    found_id   uuid;
    found      chaz.entries;
    differs    text;
begin
    if session is null or length(session) not between 1 and 200 then
        raise exception 'a session''s name has 1 to 200 characters, not %', coalesce(length(session), 0) using errcode = 'CZ001';
    elsif type = 'approval_decision' then
        raise exception 'a decision is sent by chaz.decide' using errcode = 'CZ001';
    elsif type is null or type not in ('message', 'directive', 'compaction_request') then
        raise exception 'a producer cannot send an entry of type %; it may send message, directive or compaction_request',
            coalesce(quote_literal(type), 'null') using errcode = 'CZ001';
    elsif author is null or author not in ('human', 'program') then
        raise exception 'a producer is a human or a program, not %', coalesce(quote_literal(author), 'null') using errcode = 'CZ001';
    elsif sender is null or length(sender) not between 1 and 200 then
        raise exception 'a sender has 1 to 200 characters, not %', coalesce(length(sender), 0) using errcode = 'CZ001';
    elsif length(recipient) not between 1 and 200 then
        raise exception 'a recipient has 1 to 200 characters, not %', length(recipient) using errcode = 'CZ001';
    elsif type = 'directive' and recipient is null then
        raise exception 'a directive needs a recipient: the agent that it instructs' using errcode = 'CZ001';
    elsif type in ('message', 'directive') and (content is null or btrim(content, E' \t\r\n') = '') then
        raise exception 'a % needs a text, and this one is empty', type using errcode = 'CZ001';
    elsif length(content) > 1048576 then
        raise exception 'an entry holds 1048576 characters at most, and this one has %', length(content) using errcode = 'CZ001';
    elsif jsonb_typeof(metadata) is distinct from 'object' then
        raise exception 'metadata is a JSON object, not %', coalesce(jsonb_typeof(metadata), 'null') using errcode = 'CZ001';
    elsif metadata ?| array['session', 'options'] then
        raise exception 'the keys "session" and "options" of metadata are chaz''s own' using errcode = 'CZ001';
    elsif timeout <= interval '0' or timeout > interval '10 years' then
        raise exception 'a timeout is more than 0 s and at most ten years, not %', timeout using errcode = 'CZ001';
    elsif priority not between -1000 and 1000 then
        raise exception 'a priority is between -1000 and 1000, not %', priority using errcode = 'CZ001';
    elsif jsonb_typeof(budget) <> 'object' or budget - array['steps', 'tokens', 'cost'] <> '{}' then
        raise exception 'a budget is a JSON object of steps, tokens and cost, not %', budget using errcode = 'CZ001';
    elsif on_complete is not null and (jsonb_typeof(on_complete) <> 'object' or on_complete->>'kind' is null) then
        raise exception 'on_complete is an object like {"kind": "webhook", "url": "https://…"}, not %', on_complete
            using errcode = 'CZ001';
    elsif length(on_complete::text) > 1048576 then
        raise exception 'on_complete holds 1048576 characters at most, and this one has %', length(on_complete::text)
            using errcode = 'CZ001';
    elsif id is not null and idempotency_key is not null then
        raise exception 'give an id or an idempotency key, not both' using errcode = 'CZ001';
    end if;

    if session ~* '^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$' then
        session_id := session::uuid;
        if open_session then
            insert into chaz.sessions (id, tenant) values (session_id, tenant) on conflict do nothing;
            insert into chaz.heads (session_id) values (session_id) on conflict do nothing;
        elsif not exists (select from chaz.sessions s where s.id = session_id and s.tenant = tenant) then
            raise exception 'no session %', session using errcode = 'CZ003', detail = session;
        end if;
    else
        session_id := chaz.session_id(session, tenant);
        metadata := metadata || jsonb_build_object('session', session);
    end if;
    if on_complete is not null then
        -- Not above: its nulls are somebody's arguments.
        options := options || jsonb_build_object('on_complete', on_complete);
    end if;
    if options <> '{}' then
        metadata := metadata || jsonb_build_object('options', options);
    end if;

    if entry_id is null and idempotency_key is null then
        insert into chaz.entries (tenant, session_id, type, sender, author, recipient, content, metadata)
        values (tenant, session_id, type, sender, author, recipient, coalesce(content, ''), metadata)
        returning entries.id into entry_id;
        return entry_id;
    end if;

    entry_id := coalesce(entry_id, chaz.derived_id('entry', session_id::text, idempotency_key));
    insert into chaz.entries (id, tenant, session_id, type, sender, author, recipient, content, metadata)
    values (entry_id, tenant, session_id, type, sender, author, recipient, coalesce(content, ''), metadata)
    on conflict on constraint entries_pkey do nothing
    returning entries.id into found_id;
    if found_id is null then
        select * into found from chaz.entries e where e.id = entry_id;
        differs := case
            when found.session_id <> session_id or found.tenant <> tenant then 'session'
            when found.type <> type then 'type'
            when found.sender <> sender then 'sender'
            when found.author <> author then 'author'
            when found.recipient is distinct from recipient then 'recipient'
            when found.content <> coalesce(content, '') then 'content'
            -- A relative time (countdown, timeout from now) is another instant at each try, and no other request.
            when found.metadata #- '{options,not_before}' #- '{options,expires}'
                <> metadata #- '{options,not_before}' #- '{options,expires}' then 'metadata or options'
        end;
        if differs is not null then
            raise exception 'entry % exists with another %', entry_id, differs
                using errcode = 'CZ002', detail = entry_id::text, hint = differs;
        end if;
    end if;
    return entry_id;
end
$$;


create function chaz.configure_session(
    session          text,
    on_message       text     default null,
    tenant           text     default '',
    open_session     boolean  default false,
    approvers        text[]   default null,
    auto_approve     text[]   default null,
    approval_timeout interval default null,
    burst            bigint   default null
) returns uuid
language plpgsql
as $$
-- Say what a message does that comes while the session is busy, who may approve its agents' calls (names or globs; an
-- empty array: nobody), which tools need no approval, how long one is waited for, and how many messages of agents in a
-- row may wake other agents. Null leaves a thing as it is. Holds for what is placed, asked or answered from its commit
-- on. It locks the session's row only, and makes it if need be: a name makes its session, a uuid with `open_session`.
#variable_conflict use_variable
declare
    session_id uuid;
begin
    if session is null or length(session) not between 1 and 200 then
        raise exception 'a session''s name has 1 to 200 characters, not %', coalesce(length(session), 0) using errcode = 'CZ001';
    elsif on_message not in ('coalesce', 'each', 'reject', 'interrupt', 'steer') then
        raise exception 'on_message is coalesce, each, reject, interrupt or steer, not %', quote_literal(on_message)
            using errcode = 'CZ001';
    elsif approval_timeout <= interval '0' or approval_timeout > interval '10 years' then
        raise exception 'an approval_timeout is more than 0 s and at most ten years, not %', approval_timeout
            using errcode = 'CZ001';
    elsif exists (select from unnest(approvers || auto_approve) as name
            where name is null or length(name) not between 1 and 200) then
        raise exception 'approvers and auto_approve are names or globs of 1 to 200 characters, not %',
            approvers || auto_approve using errcode = 'CZ001';
    elsif burst not between 0 and 2147483647 then
        raise exception 'a burst is a number of messages from 0 to 2147483647, not %', burst using errcode = 'CZ001';
    end if;
    if session ~* '^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$' then
        session_id := session::uuid;
        session := null;
        if not open_session and not exists (select from chaz.sessions s where s.id = session_id and s.tenant = tenant) then
            raise exception 'no session %', session_id using errcode = 'CZ003', detail = session_id::text;
        end if;
    else
        session_id := chaz.session_id(session, tenant);
    end if;
    -- Placing, which would wait for a row that is being made, leaves the session to a later round meanwhile.
    perform pg_advisory_xact_lock(chaz.opening_key(session_id));
    insert into chaz.sessions as s (id, tenant, name, on_message, approvers, auto_approve, approval_timeout, burst)
    values (session_id, tenant, session, coalesce(on_message, 'coalesce'), approvers, auto_approve, approval_timeout,
        burst)
    on conflict (id) do update set
        on_message = coalesce(on_message, s.on_message), approvers = coalesce(approvers, s.approvers),
        auto_approve = coalesce(auto_approve, s.auto_approve),
        approval_timeout = coalesce(approval_timeout, s.approval_timeout), burst = coalesce(burst, s.burst)
    where s.tenant = excluded.tenant;
    if not found then
        raise exception 'no session %', session_id using errcode = 'CZ003', detail = session_id::text;
    end if;
    return session_id;
end
$$;


create function chaz.attach(
    session      text,
    agent        text,
    lead         boolean default false,
    tenant       text    default '',
    open_session boolean default false
) returns boolean
language plpgsql
as $$
-- Attach an agent to the session, or make it the lead; false if it is that already. The first attached is the lead.
-- Any name will do: its worker may come later. One INSERT, which waits for nobody, but where the session is new: a name
-- makes its session, a uuid with `open_session`.
#variable_conflict use_variable
declare
    session_id uuid;
begin
    if session is null or length(session) not between 1 and 200 then
        raise exception 'a session''s name has 1 to 200 characters, not %', coalesce(length(session), 0) using errcode = 'CZ001';
    elsif agent is null or length(agent) not between 1 and 200 then
        raise exception 'an agent''s name has 1 to 200 characters, not %', coalesce(length(agent), 0) using errcode = 'CZ001';
    elsif lead is null then
        raise exception 'lead is true or false, not null' using errcode = 'CZ001';
    end if;
    if session ~* '^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$' then
        session_id := session::uuid;
    else
        session_id := chaz.session_id(session, tenant);
    end if;
    if not exists (select from chaz.sessions s where s.id = session_id and s.tenant = tenant) then
        perform chaz.configure_session(session, tenant => tenant, open_session => open_session);
    end if;
    insert into chaz.roster_changes (session_id, agent, change)
    select session_id, agent, case when lead then 'lead' else 'attach' end
    where not exists (
        select from chaz.attachments a where a.session_id = session_id and a.agent = agent and (a.lead or not lead));
    return found;
end
$$;


create function chaz.detach(session text, agent text, tenant text default '') returns boolean
language plpgsql
as $$
-- Detach an agent from the session; false if it is not attached. Its runs that wait or are at work go on. If it was the
-- lead, the first attached of the others is. One INSERT, which waits for nobody. A name that no session has is no error;
-- a uuid has to exist.
#variable_conflict use_variable
declare
    session_id uuid;
begin
    if session is null or length(session) not between 1 and 200 then
        raise exception 'a session''s name has 1 to 200 characters, not %', coalesce(length(session), 0) using errcode = 'CZ001';
    elsif agent is null or length(agent) not between 1 and 200 then
        raise exception 'an agent''s name has 1 to 200 characters, not %', coalesce(length(agent), 0) using errcode = 'CZ001';
    end if;
    if session ~* '^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$' then
        session_id := session::uuid;
        if not exists (select from chaz.sessions s where s.id = session_id and s.tenant = tenant) then
            raise exception 'no session %', session using errcode = 'CZ003', detail = session;
        end if;
    else
        session_id := chaz.session_id(session, tenant);
    end if;
    insert into chaz.roster_changes (session_id, agent, change)
    select session_id, agent, 'detach'
    where exists (select from chaz.attachments a where a.session_id = session_id and a.agent = agent);
    return found;
end
$$;


-- A person's word ------------------------------------------------------------------------------------------------------

create function chaz.decide(request uuid, decision text, who text, reason text default '') returns uuid
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
-- Say `approve`, `approve_all` (whatever else the run calls) or `deny` of a request, or `answer` a question with the text
-- of `reason`: the entry's id; null if it has been decided already. One INSERT, which takes no lock: the listener that
-- places the entry decides whether `who` may, and whether it came first and in time.
#variable_conflict use_variable
declare
    asked    chaz.approvals;
    entry_id uuid;
begin
    if decision is null or decision not in ('approve', 'approve_all', 'deny', 'answer') then
        raise exception 'a decision is approve, approve_all, deny or answer, not %', coalesce(quote_literal(decision), 'null')
            using errcode = 'CZ001';
    elsif who is null or length(who) not between 1 and 200 then
        raise exception 'who decides has 1 to 200 characters, not %', coalesce(length(who), 0) using errcode = 'CZ001';
    elsif reason is null or length(reason) > 100000 then
        raise exception 'a reason has 100000 characters at most, not %', coalesce(length(reason)::text, 'null')
            using errcode = 'CZ001';
    end if;
    select * into asked from chaz.approvals a where a.id = request;
    if not found then
        raise exception 'no request %', coalesce(request::text, 'null')
            using errcode = 'CZ006', detail = coalesce(request::text, 'null');
    elsif decision = 'answer' and asked.kind <> 'question' then
        raise exception 'request % is to be approved or denied; it is no question to answer', request using errcode = 'CZ001';
    elsif decision in ('approve', 'approve_all') and asked.kind = 'question' then
        raise exception 'request % is a question; answer it with a text, or deny it', request using errcode = 'CZ001';
    elsif decision = 'answer' and reason <> all(asked.choices) then
        raise exception 'the answer to request % is one of %', request, array_to_string(asked.choices, ', ')
            using errcode = 'CZ001';
    elsif decision = 'answer' and btrim(reason, E' \t\r\n') = '' then
        raise exception 'an answer needs a text, and this one is empty' using errcode = 'CZ001';
    elsif asked.decision is not null then
        return null;
    end if;
    insert into chaz.entries (tenant, session_id, type, sender, author, content, metadata)
    values (asked.tenant, asked.session_id, 'approval_decision', who, 'human', reason,
        jsonb_build_object('request', request, 'decision', decision))
    returning id into entry_id;
    return entry_id;
end
$$;
revoke execute on function chaz.decide(uuid, text, text, text) from public;
grant execute on function chaz.decide(uuid, text, text, text) to chaz_approver;
grant usage on schema chaz to chaz_approver;


-- Taking it back -----------------------------------------------------------------------------------------------------

create function chaz.cancel(id uuid, cancelled_by text, reason text default '') returns boolean
language plpgsql
as $$
-- Ask that a run be ended, with the runs that it spawned; false if it is over already, or its entry woke nobody.
-- One INSERT, which waits only for an open transaction that asks the same.
#variable_conflict use_variable
declare
    state text;
begin
    if cancelled_by is null or length(cancelled_by) not between 1 and 200 then
        raise exception 'who cancels has 1 to 200 characters, not %', coalesce(length(cancelled_by), 0) using errcode = 'CZ001';
    elsif reason is null or length(reason) > 10000 then
        raise exception 'a reason has 10000 characters at most, not %', coalesce(length(reason)::text, 'null')
            using errcode = 'CZ001';
    end if;
    -- In one statement: an entry that is placed between two would seem to have woken nobody.
    select coalesce(
        (with recursive followed as (
            select r.state, r.superseded_by from chaz.runs r where r.id = id
            union all
            select r.state, r.superseded_by from followed f join chaz.runs r on r.id = f.superseded_by)
        select f.state from followed f where f.superseded_by is null),
        (select case when e.position is null then 'pending' else 'nobody' end from chaz.entries e where e.id = id))
    into state;
    if state is null then
        raise exception 'no run %', coalesce(id::text, 'null') using errcode = 'CZ005', detail = coalesce(id::text, 'null');
    elsif state in ('succeeded', 'failed', 'cancelled', 'nobody') then
        return false;
    end if;
    perform pg_advisory_xact_lock_shared(chaz.opening_key(id));
    insert into chaz.cancellations (run_id, cancelled_by, reason) values (id, cancelled_by, reason)
    on conflict on constraint cancellations_pkey do nothing;
    return true;
end
$$;
