"""Is a deployment well? Each thing that it stands on, looked at once and judged in a line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast
from uuid import uuid4

from chaz import limits, pauses
from chaz.broker import (
    DAY,
    audit_queue,
    check,
    connect,
    dead_letter_queue,
    forgets_bindings,
    queue_length,
    transport_options,
)
from chaz.database import Database, Subscription
from chaz.errors import BrokerUnavailable, ConfigurationError, DatabaseUnavailable
from chaz.schema import status
from chaz.settings import Settings, without_secrets

Verdict = Literal["ok", "warn", "bad"]

A_WHILE = 60.0
"""Seconds after which what waits is worth a warning."""
REGISTERED_BEFORE = 60.0
"""Seconds that a worker may take from registering its agents to its first lease."""
MANY_DELIVERIES = 1000
"""Deliveries in the audit queue that are worth a warning."""
TRIAL = "chaz_doctor"
"""NOTIFY channel on which the doctor listens to itself."""
HEARD_WITHIN = 5.0
CONSUMER_TIMEOUT_PER_QUEUE = (3, 12)
"""The RabbitMQ from which on a queue has a consumer timeout of its own."""


@dataclass(frozen=True)
class Finding:
    """What was found of one thing."""

    name: str
    verdict: Verdict
    text: str


Look = Callable[[Database, Settings], Awaitable[Finding]]


async def examine(settings: Settings, options: Mapping[str, Any] | None = None) -> list[Finding]:
    """Look at everything. A service that is away is a finding, and what cannot be seen without it is left out.

    ``options`` are the broker transport options that the workers use, where they are not chaz's own.
    """
    found = await _examine_database(settings)
    return found + await asyncio.to_thread(_examine_broker, settings, options or transport_options(settings))


async def _examine_database(settings: Settings) -> list[Finding]:
    database = Database(settings.require_database(), size=1, name="chaz-doctor")
    try:
        await database.open()
        found = [await postgresql(database, settings), await schema(database, settings)]
        if found[-1].verdict == "bad":
            return found
        return [*found, await doorbell(database, settings), *[await look(database, settings) for look in LOOKS]]
    except DatabaseUnavailable as error:
        return [Finding("postgresql", "bad", str(error))]
    finally:
        await database.close()


def _examine_broker(settings: Settings, options: Mapping[str, Any]) -> list[Finding]:
    try:
        check(settings)
        return [broker(settings, options), audit_queued(settings), dead_letters(settings)]
    except (BrokerUnavailable, ConfigurationError) as error:
        return [Finding("broker", "bad", str(error))]


# PostgreSQL


async def postgresql(database: Database, _: Settings) -> Finding:
    """The server and its version."""
    (row,) = await database.fetch("select current_setting('server_version') as version, pg_is_in_recovery() as standby")
    if row["standby"]:
        return Finding("postgresql", "bad", f"{database.address} is a standby, which takes no entries")
    return Finding("postgresql", "ok", f"version {row['version']} at {database.address}")


async def schema(database: Database, _: Settings) -> Finding:
    """The schema's version, against the one that this package needs."""
    versions = await status(database)
    if versions.current:
        return Finding("schema", "ok", f"version {versions.found}")
    if versions.found is not None and versions.found > versions.needed:
        return Finding("schema", "warn", f"version {versions.found}; this chaz knows {versions.needed} only")
    found = f"version {versions.found}" if versions.found else "none"
    return Finding("schema", "bad", f"{found}; this chaz needs {versions.needed}: run `chaz schema upgrade`")


async def doorbell(database: Database, settings: Settings) -> Finding:
    """Whether a NOTIFY is heard where listeners LISTEN; through a pooler of transactions it is not."""
    url = settings.listen_url or settings.database_url
    subscription = Subscription(url, [TRIAL], name="chaz-doctor")
    word = str(uuid4())
    try:
        await subscription.connect()
        await database.fetch("select pg_notify(%(channel)s, %(word)s)", {"channel": TRIAL, "word": word})
        ends = time.monotonic() + HEARD_WITHIN
        while (left := ends - time.monotonic()) > 0:
            if word in await subscription.wait(left):
                return Finding("doorbell", "ok", f"heard at {without_secrets(url)}")
        text = f"a NOTIFY is not heard at {without_secrets(url)}, so that listeners find things by polling only"
    except DatabaseUnavailable as error:
        text = f"listeners cannot LISTEN, and poll: {error}"
    finally:
        await subscription.close()
    return Finding("doorbell", "warn", f"{text}; set CHAZ_LISTEN_URL to the same database, past any pooler")


# The processes


async def listeners(database: Database, settings: Settings) -> Finding:
    """Listeners that were seen within three sweeps, and whether they hear the doorbell."""
    rows = await database.fetch(
        """
        select mode, count(*) as number from chaz.listeners
        where mode <> 'stopped' and seen_at > now() - %(within)s * interval '1 second' group by mode order by mode
        """,
        {"within": 3 * settings.sweep},
    )
    if not rows:
        return Finding("listeners", "bad", "none is alive: nothing is placed or published; start `chaz listener`")
    modes = ", ".join(f"{row['number']} {row['mode']}" for row in rows)
    if any(row["mode"] == "polling" for row in rows):
        return Finding("listeners", "warn", f"{modes}; one that polls has lost its LISTEN connection")
    return Finding("listeners", "ok", modes)


async def workers(database: Database, settings: Settings) -> Finding:
    """Worker processes with a lease, which some take with their first run only."""
    (row,) = await database.fetch(
        """
        select (select count(*) from chaz.workers where expires_at > now()) as alive,
            exists (select from chaz.runs where state = 'queued'
                and greatest(queued_at, not_before) < now() - %(within)s * interval '1 second') as waiting
        """,
        {"within": 3 * settings.sweep},
    )
    if row["alive"]:
        return Finding("workers", "ok", f"{_count(row['alive'], 'process', 'processes')} alive")
    if row["waiting"]:
        return Finding("workers", "bad", "none is alive, and runs wait; start `celery -A chaz worker`")
    return Finding("workers", "warn", "none holds a lease; one that has run nothing yet may be there all the same")


async def agents(database: Database, settings: Settings) -> Finding:
    """Agents with queued runs that, by what is known, no living worker serves.

    A worker registers its agents when it starts, and does not say when it ends. So an agent is served if a living
    worker runs it now, or if one started about when the agent was last registered or before.
    """
    rows = await database.fetch(
        """
        with waiting as (
            select agent, count(*) as runs from chaz.runs
            where state = 'queued' and greatest(queued_at, not_before) < now() - %(within)s * interval '1 second'
            group by agent),
        alive as (select id, started_at from chaz.workers where expires_at > now())
        select w.agent, w.runs, a.seen_at is not null as registered
        from waiting w left join chaz.agents a on a.name = w.agent
        where not exists (select from chaz.runs r join alive on alive.id = r.worker_id
                where r.state = 'running' and r.agent = w.agent)
            and not exists (select from alive where alive.started_at < a.seen_at + %(slack)s * interval '1 second')
        order by w.agent
        """,
        {"within": 3 * settings.sweep, "slack": REGISTERED_BEFORE},
    )
    if not rows:
        return Finding("agents", "ok", "none with waiting runs is known to lack a worker")
    lacking = ", ".join(
        f"{row['agent']} ({_count(row['runs'], 'queued run')}"
        f"{'' if row['registered'] else ', never registered by any worker'})"
        for row in rows
    )
    return Finding("agents", "warn", f"no living worker is known to serve {lacking}")


async def isolation(database: Database, _: Settings) -> Finding:
    """Whether suspect runs, under which a worker was lost during a call, have a worker of their own to go to."""
    (row,) = await database.fetch(
        """
        select (select count(*) from chaz.runs where suspect and state in ('queued', 'running', 'parked')) as runs,
            exists (select from chaz.workers where isolation and expires_at > now()) as alive
        """
    )
    if not row["runs"]:
        return Finding("isolation", "ok", "no suspect run")
    runs = f"{_count(row['runs'], 'suspect run')}: a worker was lost during a call of each"
    if row["alive"]:
        return Finding("isolation", "ok", f"{runs}, and the isolation worker is alive")
    return Finding("isolation", "warn", f"{runs}, and they go on among others; start `chaz worker --isolation`")


# What waits


async def paused(database: Database, _: Settings) -> Finding:
    """What somebody has paused; a pause that was forgotten looks like an outage."""
    found = [
        (row["kind"] if row["kind"] == "all" else f"{row['kind']}:{row['name']}")
        + f" by {row['paused_by']}"
        + (f" ({row['reason']})" if row["reason"] else "")
        for row in await pauses.paused(database)
    ]
    if not found:
        return Finding("paused", "ok", "nothing")
    return Finding("paused", "warn", f"{', '.join(found)}; `chaz resume` lets it go on")


async def limited(database: Database, _: Settings) -> Finding:
    """Whose limits are reached, so that no model is asked for it."""
    found = [
        f"{limits.named(limit)} till {limit['ends_at'].astimezone():%Y-%m-%d %H:%M:%S}"
        for limit in await limits.limits(database)
        if limit["reached"]
    ]
    if not found:
        return Finding("limits", "ok", "none is reached")
    return Finding("limits", "warn", f"reached: {', '.join(found)}; runs fail, and `chaz limits` says what was used")


async def inbox(database: Database, settings: Settings) -> Finding:
    """The age of the oldest entry that nobody has placed."""
    (row,) = await database.fetch(
        """
        select count(*) as entries, coalesce(extract(epoch from now() - min(created_at)), 0)::float8 as age
        from chaz.entries where position is null
        """
    )
    if not row["entries"]:
        return Finding("inbox", "ok", "empty")
    text = f"{_count(row['entries'], 'entry', 'entries')} not placed, the oldest {_age(row['age'])} old"
    return Finding("inbox", _by_age(row["age"], 3 * settings.sweep, A_WHILE + 3 * settings.sweep), text)


async def queued(database: Database, _: Settings) -> Finding:
    """Queued runs, and how long the oldest has waited for a worker. A long queue is no fault in itself."""
    (row,) = await database.fetch(
        """
        select count(*) as runs, coalesce(max(extract(epoch from now() - greatest(queued_at, not_before))), 0)::float8
            as age
        from chaz.runs where state = 'queued'
        """
    )
    if not row["runs"]:
        return Finding("queued", "ok", "no run")
    text = f"{_count(row['runs'], 'run')}, the oldest unclaimed for {_age(row['age'])}"
    return Finding("queued", _by_age(row["age"], A_WHILE), text)


async def leases(database: Database, settings: Settings) -> Finding:
    """Running runs whose worker's lease is over; a listener's next sweep takes them back."""
    (row,) = await database.fetch(
        """
        select count(*) as runs,
            coalesce(max(extract(epoch from now() - coalesce(w.expires_at, r.started_at))), 0)::float8 as age
        from chaz.runs r left join chaz.workers w on w.id = r.worker_id
        where r.state = 'running' and (w.id is null or w.expires_at < now())
        """
    )
    if not row["runs"]:
        return Finding("leases", "ok", "no run is past its lease")
    text = f"{_count(row['runs'], 'run')} past the lease, by {_age(row['age'])}; a listener should have taken them back"
    return Finding("leases", "bad" if row["age"] > 3 * settings.sweep else "warn", text)


async def parked(database: Database, _: Settings) -> Finding:
    """Parked runs; each has to wait for something."""
    (row,) = await database.fetch(
        """
        select count(*) as runs, count(*) filter (where not exists (
            select from chaz.waits w where w.run_id = r.id and w.answer is null)) as stuck
        from chaz.runs r where state = 'parked'
        """
    )
    if row["stuck"]:
        return Finding("parked", "bad", f"{_count(row['runs'], 'run')}, {row['stuck']} of them waiting for nothing")
    return Finding("parked", "ok", _count(row["runs"], "run") if row["runs"] else "no run")


async def cancellations(database: Database, settings: Settings) -> Finding:
    """Cancels that were asked for several sweeps ago and are not done, and the runs below them that still go on."""
    (row,) = await database.fetch(
        """
        with recursive old as (
            select run_id, requested_at from chaz.cancellations
            where done_at is null and requested_at < now() - %(within)s * interval '1 second'),
        below as (
            select run_id as id from old
            union
            select r.id from below join chaz.runs r on r.parent_run_id = below.id
                join chaz.sessions s on s.id = r.session_id and not s.detached)
        select (select count(*) from old) as cancels,
            (select coalesce(extract(epoch from now() - min(requested_at)), 0)::float8 from old) as age,
            (select count(*) from below join chaz.runs r using (id)
                where r.state in ('pending', 'queued', 'running', 'parked')) as runs,
            (select count(*) from old join chaz.entries e on e.id = old.run_id where e.position is null) as unplaced,
            exists (select from chaz.listeners
                where mode <> 'stopped' and seen_at > now() - %(within)s * interval '1 second') as heard
        """,
        {"within": 3 * settings.sweep},
    )
    if not row["cancels"]:
        return Finding("cancels", "ok", "none is open for long")
    cancels = f"{_count(row['cancels'], 'cancel')} open, the oldest for {_age(row['age'])}"
    text = f"{cancels}; {_count(row['runs'], 'run')} of theirs still to be ended"
    if row["unplaced"]:
        text += f", and {_count(row['unplaced'], 'entry', 'entries')} not placed"
    if not row["heard"]:
        return Finding("cancels", "bad", f"{text}; no listener is alive to end them: start `chaz listener`")
    todo = "the listeners' logs say why: look there for `cannot be cancelled`, and for who holds the sessions' heads"
    return Finding("cancels", _by_age(row["age"], 0, A_WHILE + 3 * settings.sweep), f"{text}; {todo}")


async def audit(database: Database, _: Settings) -> Finding:
    """Runs that ended a minute ago and more, and whose audit events are not known to be recorded."""
    (row,) = await database.fetch(
        """
        select count(*) as runs, count(*) filter (where audit_after < now() - %(while)s * interval '1 second') as unseen
        from chaz.runs
        where audit_after is not null and (
            audit_after < now() - %(while)s * interval '1 second' or ended_at < now() - %(while)s * interval '1 second')
        """,
        {"while": A_WHILE},
    )
    if not row["runs"]:
        return Finding("audit", "ok", "no backlog")
    text = f"{_count(row['runs'], 'run')} ended over a minute ago and not known to be recorded whole"
    if row["unseen"]:
        text += f"; no listener has looked at {row['unseen']} of them"
    return Finding("audit", "warn", f"{text}; is `chaz audit` running?")


async def callbacks(database: Database, _: Settings) -> Finding:
    """Ends of which somebody was to be told, and could not be."""
    (row,) = await database.fetch(
        """
        select count(*) filter (where given_up_at is not null) as given_up,
            count(*) filter (where given_up_at is null and last_error is not null) as failing,
            (array_agg(run_id || ': ' || last_error order by given_up_at desc nulls last, due_at desc)
                filter (where last_error is not null))[1] as latest
        from chaz.callbacks where due_at is not null
        """
    )
    if not row["latest"]:
        return Finding("callbacks", "ok", "all told")
    text = f"{_count(row['failing'], 'end')} could not be told of yet, {row['given_up']} given up after a day"
    return Finding("callbacks", "warn", f"{text}; run {_one_line(row['latest'])}")


LOOKS: tuple[Look, ...] = (
    listeners,
    workers,
    agents,
    isolation,
    paused,
    limited,
    inbox,
    queued,
    leases,
    parked,
    cancellations,
    audit,
    callbacks,
)
"""What is asked of a database whose schema is there, in the order in which it is shown."""


# The broker


def broker(settings: Settings, options: Mapping[str, Any]) -> Finding:
    """The broker that has let us in, and after what time it would deliver a run again or throw a consumer out."""
    where = f"{without_secrets(settings.broker_url)}, prefix {settings.broker_prefix!r}"
    if forgets_bindings(settings):
        seconds = options["visibility_timeout"]
        found = f"Redis or Valkey at {where}; visibility_timeout {_age(seconds)}"
        if seconds >= DAY:
            return Finding("broker", "ok", found)
        return Finding(
            "broker",
            "warn",
            f"{found}: a run that takes longer is delivered again, for nothing; leave visibility_timeout out of "
            "broker_transport_options in celeryconfig.py",
        )
    with connect(settings) as connection:
        server = cast("dict[str, Any]", connection.connection.server_properties)
    version = str(server.get("version", "0"))
    found = f"{server.get('product', 'AMQP')} {version} at {where}"
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) >= CONSUMER_TIMEOUT_PER_QUEUE:
        return Finding("broker", "ok", f"{found}; consumer timeout of a day, set by chaz on its queues")
    return Finding(
        "broker",
        "warn",
        f"{found}; before 3.12 the consumer timeout is the server's, and a run that takes longer throws its worker "
        "out: see that consumer_timeout is 86400000 in rabbitmq.conf",
    )


def audit_queued(settings: Settings) -> Finding:
    """How many deliveries wait for an audit consumer."""
    deliveries = queue_length(settings, audit_queue(settings.broker_prefix))
    if not deliveries:
        return Finding("audit queue", "ok", "empty")
    text = f"{_count(deliveries, 'delivery waits', 'deliveries wait')}"
    if deliveries < MANY_DELIVERIES:
        return Finding("audit queue", "ok", text)
    return Finding("audit queue", "warn", f"{text}; start (more of) `chaz audit`")


def dead_letters(settings: Settings) -> Finding:
    """How many deliveries the audit consumers could not record."""
    queue = dead_letter_queue(settings.broker_prefix)
    messages = queue_length(settings, queue)
    if not messages:
        return Finding("dead letters", "ok", "none")
    return Finding(
        "dead letters",
        "warn",
        f"{_count(messages, 'delivery', 'deliveries')} in {queue.name}, each with its reason in x-chaz-reason",
    )


# Words


def _by_age(age: float, warn: float, bad: float = float("inf")) -> Verdict:
    return "bad" if age > bad else "warn" if age > warn else "ok"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length * 2:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
