"""The producer: a session's log, and the one door into it.

:class:`AsyncChaz` is the source; :class:`Chaz` is the same for code that is not async.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, Self, Unpack
from uuid import UUID

from chaz import cancelling, deciding, limits, pauses, requeueing, rosters, schedules, sessionlog
from chaz import usage as accounts
from chaz.database import Database
from chaz.deciding import Request
from chaz.entries import Entry, EntryType, Place
from chaz.errors import InvalidQuery, UnknownRequest, UnknownRun, UnknownSession
from chaz.listings import RunFilter, SessionFilter, list_sessions
from chaz.loops import LoopThread, loop_thread
from chaz.outcomes import Spent
from chaz.owning import AsyncOwner, Owner
from chaz.result import FOLLOW_EVERY, AgentResult, AsyncAgentResult, bookmark_of, iterate
from chaz.rosters import Attachment
from chaz.settings import Settings
from chaz.subjects import Subject
from chaz.submitting import SendOptions, SessionOptions, Target, agent_name, send_on, send_on_async, submission
from chaz.usage import By, UsageFilter
from chaz.waiter import Waits

DAY = timedelta(days=1)


class AsyncSession:
    """A session, to write to and to read."""

    def __init__(self, chaz: AsyncChaz, target: Target) -> None:
        self._chaz = chaz
        self._target = target

    @property
    def id(self) -> UUID:
        """The session's id."""
        return self._target.id(self._chaz.settings.tenant)

    @property
    def name(self) -> str | None:
        """Its name, if it was asked for by name."""
        return self._target.name

    async def send(
        self, type: EntryType, content: str, *, recipient: str | None = None, **options: Unpack[SendOptions]
    ) -> AsyncAgentResult:
        """Insert an entry and return the handle of the run that answers it. One INSERT; it takes no lock.

        Raises InvalidEntry, Conflict, UnknownSession, DatabaseUnavailable, SchemaError.
        """
        sent = submission(self._target, self._chaz.settings.tenant, type, content, recipient, options)
        connection = options.get("connection")
        if connection is not None:
            return self._chaz.handle(await send_on_async(connection, sent.parameters()), uncommitted=True)
        return self._chaz.handle(await self._chaz.database.transact(partial(sessionlog.send, submission=sent)))

    async def say(self, text: str, *, recipient: str | None = None, **options: Unpack[SendOptions]) -> AsyncAgentResult:
        """A message, by a person unless ``author`` says otherwise."""
        return await self.send("message", text, recipient=recipient, **{"author": "human", **options})

    async def direct(self, agent: str, instruction: str, **options: Unpack[SendOptions]) -> AsyncAgentResult:
        """A directive: an instruction to one agent, which it attaches to the session."""
        return await self.send("directive", instruction, recipient=agent, **options)

    async def compact(self, agent: str | None = None, **options: Unpack[SendOptions]) -> AsyncAgentResult:
        """Ask for a summary that takes the place of what was said so far, in what agents are shown; the log keeps all.

        By ``agent`` if it is attached, else by the session's lead. The handle gives the summary's text, or why there
        was nothing to summarise.
        """
        return await self.send("compaction_request", "", recipient=agent, **{"author": "human", **options})

    async def configure(self, **wanted: Unpack[SessionOptions]) -> None:
        """Say what holds for the session from now on; what is not named stays as it is. Makes a session that is new.

        Raises InvalidEntry, UnknownSession.
        """
        timeout = wanted.get("approval_timeout")
        configure = partial(
            sessionlog.configure,
            session=self._target.name or str(self.id),
            tenant=self._chaz.settings.tenant,
            open_session=self._target.fresh,
            on_message=wanted.get("on_message"),
            approvers=wanted.get("approvers"),
            auto_approve=wanted.get("auto_approve"),
            approval_timeout=timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout,
            burst=wanted.get("burst"),
        )
        await self._chaz.database.transact(configure)

    async def attach(self, agent: str, *, lead: bool = False) -> bool:
        """Attach an agent, or with ``lead`` make it the lead; False if it is that already. Makes a session that is new.

        The first attached is the lead, which answers what is said to nobody by name. No worker need serve it yet.
        Raises InvalidEntry, UnknownSession.
        """
        attach = partial(
            rosters.attach,
            session=self._target.name or str(self.id),
            agent=agent_name(agent),
            lead=lead,
            tenant=self._chaz.settings.tenant,
            open_session=self._target.fresh,
        )
        return await self._chaz.database.transact(attach)

    async def detach(self, agent: str) -> bool:
        """Detach an agent; False if it is not attached. Its runs that wait or are at work go on.

        If it was the lead, the first attached of the others is. Raises InvalidEntry, UnknownSession (of an id).
        """
        session, tenant = self._target.name or str(self.id), self._chaz.settings.tenant
        detach = partial(rosters.detach, session=session, agent=agent_name(agent), tenant=tenant)
        return await self._chaz.database.transact(detach)

    async def agents(self) -> list[Attachment]:
        """Its agents, in the order in which they were attached; one of them leads. Raises UnknownSession."""
        found = await self._chaz.database.transact(partial(rosters.roster, session_id=self.id))
        if not found and not await sessionlog.is_known(self._chaz.database, self.id):
            raise UnknownSession(self._target.name or str(self.id))
        return found

    async def approvals(self) -> list[Request[Awaitable[UUID | None]]]:
        """What its runs, and those that they spawned, ask people and nobody has decided yet; the oldest first."""
        return await self._chaz.approvals(self.id)

    async def usage(self, *, since: datetime | timedelta | None = None) -> Spent:
        """What its runs have used and cost (since a time, or a span ago); what they spawned has sessions of its own.

        Raises UnknownSession.
        """
        spent = await accounts.total(self._chaz.database, UsageFilter(_instant(since), session_id=self.id))
        if not spent.calls and await sessionlog.session_row(self._chaz.database, self.id) is None:
            raise UnknownSession(self._target.name or str(self.id))
        return spent

    async def entries(self, follow: bool = False, after: Place = 0) -> AsyncGenerator[Entry]:
        """Its entries past ``after``, in order, unplaced ones last; with ``follow`` as they come, for ever.

        ``after`` is an entry that was read, or its ``bookmark``: a reader that comes back gets each entry that it had
        not read, late audit entries too. A position is the same without what came late of the runs before it.
        Raises UnknownSession, InvalidEntry.
        """
        start = bookmark_of(after)
        if not follow or await sessionlog.session_row(self._chaz.database, self.id) is None:
            found = await sessionlog.entries(self._chaz.database, self.id, start)
            if not found and await sessionlog.session_row(self._chaz.database, self.id) is None:
                raise UnknownSession(self._target.name or str(self.id))
            if not follow:
                for entry in found:
                    yield entry
                return
        follower = sessionlog.Follower(self._chaz.database, self.id, after=start)
        while True:
            for entry in await follower.next():
                yield entry
            await asyncio.sleep(FOLLOW_EVERY)

    def __repr__(self) -> str:
        return f"<AsyncSession {self._target!r}>"


class AsyncChaz:
    """A producer on the running loop. Use it as an async context manager, or call :meth:`close`."""

    def __init__(self, url: str | None = None, *, settings: Settings | None = None) -> None:
        self.settings = settings or Settings.from_env({}, database_url=url)
        silence = self.settings.database_silence
        self.database = Database(
            self.settings.require_database(), size=self.settings.database_pool, name="chaz-producer", silence=silence
        )
        self._waits = Waits(self.settings.database_url, self.settings.listen_url, silence)

    @classmethod
    def from_env(cls) -> Self:
        """A producer by ``CHAZ_DATABASE_URL`` and the other ``CHAZ_*`` variables. Raises ConfigurationError."""
        return cls(settings=Settings.from_env())

    async def __aenter__(self) -> Self:
        await self.database.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Give the connections back."""
        await self._waits.close()
        await self.database.close()

    def session(self, name: str | None = None, *, id: UUID | None = None) -> AsyncSession:
        """The session of this name (made when first sent to), the existing one of this id, or a fresh one."""
        return AsyncSession(self, Target(name, id))

    def agent(self, name: str) -> AsyncOwner:
        """The agent of this name, for its ``schedules``."""
        return AsyncOwner(self.database, self.settings, name)

    def handle(self, id: UUID, *, uncommitted: bool = False) -> AsyncAgentResult:
        """The handle of a run, unchecked."""
        return AsyncAgentResult(id, self.database, self._waits, uncommitted=uncommitted)

    async def runs(self, wanted: RunFilter | None = None) -> list[dict[str, Any]]:
        """Runs as a person wants to see them, newest first; ``wanted`` is a :class:`chaz.listings.RunFilter`."""
        # Not at the top: SQLAlchemy takes longer to import than all the rest, and sending does without.
        from chaz.runlistings import list_runs

        return await list_runs(self.database, wanted or RunFilter())

    async def sessions(self, wanted: SessionFilter | None = None) -> list[dict[str, Any]]:
        """Sessions of its tenant, newest first, with what is at work and what waits: see :mod:`chaz.listings`."""
        return await list_sessions(self.database, replace(wanted or SessionFilter(), tenant=self.settings.tenant))

    async def usage(
        self,
        by: By | Sequence[By] = (),
        *,
        since: datetime | timedelta | None = None,
        agent: str | None = None,
        session: str | UUID | None = None,
        tree: UUID | str | None = None,
        tz: str = "UTC",
    ) -> list[dict[str, Any]]:
        """What calls of models used and cost, by any of agent, model, session, tree, run, day and tenant, together.

        Each dictionary has those, and the fields of :class:`chaz.Spent`; without ``by`` it is one. ``since`` is a time,
        or a span ago; ``session`` a name or id; ``tree`` any run of it; ``tz`` the zone of a day, as PostgreSQL knows
        it. Raises InvalidQuery, UnknownRun.
        """
        root = None if tree is None else (await (await self.result(tree)).root()).id
        target = Target(None, session) if isinstance(session, UUID) else Target(session, None)
        session_id = None if session is None else target.id(self.settings.tenant)
        wanted = UsageFilter(_instant(since), agent, session_id, root)
        return await accounts.by(self.database, (by,) if isinstance(by, str) else by, wanted, timezone=tz)

    async def limit(
        self,
        what: str,
        *,
        tokens: int | None = None,
        cost: float | Decimal | None = None,
        period: timedelta = DAY,
        by: str | None = None,
    ) -> None:
        """Let ``agent:NAME``, ``session:NAME`` (or its id) or ``all`` use no more than this in each period.

        It takes the place of its limit of the same period. Periods have a fixed length, and begin at multiples of it
        from a Monday's midnight, UTC. Once a limit is reached, no model is asked: runs fail with the reason ``limit``.
        What is limited in its cost fails with the reason ``price`` where its model's price is not known. Raises
        InvalidSubject, InvalidLimit, UnknownAgent, UnknownSession.
        """
        limit = partial(
            limits.set_limit,
            what=Subject.parse(what),
            tenant=self.settings.tenant,
            period=period,
            tokens=tokens,
            cost=None if cost is None else Decimal(str(cost)),
            by=by or os.environ.get("USER") or "program",
        )
        await self.database.transact(limit)

    async def unlimit(self, what: str, *, period: timedelta | None = None) -> bool:
        """Take its limit of this period away, or all that it has; False if it has none. Raises InvalidSubject."""
        remove = partial(limits.remove_limit, what=Subject.parse(what), tenant=self.settings.tenant, period=period)
        return await self.database.transact(remove)

    async def limits(self) -> list[dict[str, Any]]:
        """All limits, with what is used of the period that goes on: see :func:`chaz.limits.limits`."""
        return await limits.limits(self.database)

    async def result(self, id: UUID | str) -> AsyncAgentResult:
        """The handle of a run that exists. Raises UnknownRun."""
        handle = self.handle(_run_id(id))
        await handle.state()
        return handle

    async def requeue(self, id: UUID | str) -> AsyncAgentResult:
        """Run what failed or was cancelled anew: the handle of a new run, with an id of its own.

        What was asked at sending (``budget``, ``timeout``, ``priority``, ``on_complete``) holds for it anew; a run that
        was spawned has what is left of its tree's budget and time, and its parent, told already, is not told again.
        Raises UnknownRun, NotRequeueable (also if a run that took its place goes on or has succeeded, or if it could
        only fail again).
        """
        return self.handle(await self.database.transact(partial(requeueing.requeue, run_id=_run_id(id))))

    async def cancel(self, id: UUID | str, *, by: str | None = None, reason: str = "") -> bool:
        """Ask that a run be ended, with the runs that it spawned; False if it is over already.

        One INSERT; a listener ends them. ``by`` says who asks, by default the program's user. Raises UnknownRun.
        """
        return await self.database.transact(partial(cancelling.request, run_id=_run_id(id), by=by, reason=reason))

    async def approvals(self, session_id: UUID | None = None) -> list[Request[Awaitable[UUID | None]]]:
        """What runs (of this session, if one is named) ask people and nobody has decided yet; the oldest first."""
        tenant = self.settings.tenant
        return await deciding.waiting(self.database, self.decide, tenant=tenant, session_id=session_id)

    async def approval(self, id: UUID | str) -> Request[Awaitable[UUID | None]]:
        """What a run asked by this id, decided or not. Raises UnknownRequest."""
        return await deciding.request(self.database, _request_id(id), self.decide)

    async def decide(self, id: UUID | str, word: deciding.Word, by: str | None = None, reason: str = "") -> UUID | None:
        """Send a word for a request: see :class:`chaz.Request`. Raises UnknownRequest, InvalidEntry, NotPermitted."""
        decide = partial(deciding.decide, id=_request_id(id), word=word, by=by, reason=reason)
        return await self.database.transact(decide)

    async def pause(self, what: str, *, by: str | None = None, reason: str = "") -> bool:
        """Start nothing new of ``agent:NAME``, ``session:NAME`` (or its id) or ``all``; what runs goes on.

        False if that is paused already. Raises InvalidSubject, UnknownAgent, UnknownSession.
        """
        pause = partial(
            pauses.pause,
            what=Subject.parse(what),
            tenant=self.settings.tenant,
            by=by or os.environ.get("USER") or "program",
            reason=reason,
        )
        return await self.database.transact(pause)

    async def resume(self, what: str) -> bool:
        """Let start again what was paused; False if it was not. Raises InvalidSubject."""
        resume = partial(pauses.resume, what=Subject.parse(what), tenant=self.settings.tenant)
        return await self.database.transact(resume)

    async def schedules(self, *, retired: bool = False) -> list[dict[str, Any]]:
        """The schedules of all agents, the ``retired`` ones too if so asked: as those of :meth:`agent`."""
        return await schedules.listed(self.database, tenant=self.settings.tenant, retired=retired)

    async def paused(self) -> list[dict[str, Any]]:
        """All that is paused, the longest first: kind, name, since, paused_by, reason."""
        return await pauses.paused(self.database)


def _instant(since: datetime | timedelta | None) -> datetime | None:
    if isinstance(since, datetime) and since.tzinfo is None:
        raise InvalidQuery(f"since has no time zone: {since}; use an aware datetime, or a timedelta for a span ago")
    return datetime.now(UTC) - since if isinstance(since, timedelta) else since


def _run_id(id: UUID | str) -> UUID:
    if isinstance(id, UUID):
        return id
    try:
        return UUID(id)
    except ValueError:
        raise UnknownRun(id) from None


def _request_id(id: UUID | str) -> UUID:
    if isinstance(id, UUID):
        return id
    try:
        return UUID(id)
    except ValueError:
        raise UnknownRequest(id) from None


class Session:
    """A session, to write to and to read."""

    def __init__(self, chaz: Chaz, target: Target) -> None:
        self._chaz = chaz
        self._target = target

    @property
    def id(self) -> UUID:
        """The session's id."""
        return self._target.id(self._chaz.settings.tenant)

    @property
    def name(self) -> str | None:
        """Its name, if it was asked for by name."""
        return self._target.name

    def _inner(self) -> AsyncSession:
        return AsyncSession(self._chaz.inner, self._target)

    def send(
        self, type: EntryType, content: str, *, recipient: str | None = None, **options: Unpack[SendOptions]
    ) -> AgentResult:
        """Insert an entry and return the handle of the run that answers it. Raises as :meth:`AsyncSession.send`."""
        connection = options.get("connection")
        if connection is not None:
            # On the caller's own thread: it is the caller's connection.
            sent = submission(self._target, self._chaz.settings.tenant, type, content, recipient, options)
            id = send_on(connection, sent.parameters())
            return self._chaz.handle(id, uncommitted=True)
        sent = self._chaz.loop.run(self._inner().send(type, content, recipient=recipient, **options))
        return self._chaz.handle(sent.id)

    def say(self, text: str, *, recipient: str | None = None, **options: Unpack[SendOptions]) -> AgentResult:
        """A message, by a person unless ``author`` says otherwise."""
        return self.send("message", text, recipient=recipient, **{"author": "human", **options})

    def direct(self, agent: str, instruction: str, **options: Unpack[SendOptions]) -> AgentResult:
        """A directive: an instruction to one agent, which it attaches to the session."""
        return self.send("directive", instruction, recipient=agent, **options)

    def compact(self, agent: str | None = None, **options: Unpack[SendOptions]) -> AgentResult:
        """Ask for a summary that takes the place of what was said so far. As :meth:`AsyncSession.compact`."""
        return self.send("compaction_request", "", recipient=agent, **{"author": "human", **options})

    def configure(self, **wanted: Unpack[SessionOptions]) -> None:
        """Say what holds for the session from now on. As :meth:`AsyncSession.configure`."""
        self._chaz.loop.run(self._inner().configure(**wanted))

    def attach(self, agent: str, *, lead: bool = False) -> bool:
        """Attach an agent, or make it the lead; False if it is that already. As :meth:`AsyncSession.attach`."""
        return self._chaz.loop.run(self._inner().attach(agent, lead=lead))

    def detach(self, agent: str) -> bool:
        """Detach an agent; False if it is not attached. As :meth:`AsyncSession.detach`."""
        return self._chaz.loop.run(self._inner().detach(agent))

    def agents(self) -> list[Attachment]:
        """Its agents, in the order in which they were attached; one of them leads. Raises UnknownSession."""
        return self._chaz.loop.run(self._inner().agents())

    def usage(self, *, since: datetime | timedelta | None = None) -> Spent:
        """What its runs have used and cost. As :meth:`AsyncSession.usage`."""
        return self._chaz.loop.run(self._inner().usage(since=since))

    def approvals(self) -> list[Request[UUID | None]]:
        """What its runs, and those that they spawned, ask people and nobody has decided yet; the oldest first."""
        return self._chaz.approvals(self.id)

    def entries(self, follow: bool = False, after: Place = 0) -> Iterator[Entry]:
        """Its entries past ``after``, in order; with ``follow`` for ever. As :meth:`AsyncSession.entries`."""
        return iterate(self._inner().entries(follow, after), self._chaz.loop)

    def __repr__(self) -> str:
        return f"<Session {self._target!r}>"


_making = threading.Lock()


def _renew_lock() -> None:
    global _making
    _making = threading.Lock()


_inherited: list[AsyncChaz] = []
"""What was open before a fork: never used and never collected here, since its tasks belong to a loop that has gone."""


os.register_at_fork(after_in_child=_renew_lock)


class Chaz:
    """A producer, for any thread, and after a fork. Use it as a context manager, or call :meth:`close`."""

    def __init__(self, url: str | None = None, *, settings: Settings | None = None) -> None:
        self.settings = settings or Settings.from_env({}, database_url=url)
        self.settings.require_database()
        self._made: tuple[int, AsyncChaz] | None = None

    @classmethod
    def from_env(cls) -> Self:
        """A producer by ``CHAZ_DATABASE_URL`` and the other ``CHAZ_*`` variables. Raises ConfigurationError."""
        return cls(settings=Settings.from_env())

    @property
    def loop(self) -> LoopThread:
        """The process's loop thread, on which everything happens."""
        return loop_thread()

    @property
    def inner(self) -> AsyncChaz:
        """The async producer of this process."""
        made = self._made
        if made is None or made[0] != os.getpid():
            with _making:
                made = self._made
                if made is None or made[0] != os.getpid():

                    async def make() -> AsyncChaz:
                        return AsyncChaz(settings=self.settings)

                    if made is not None:
                        _inherited.append(made[1])
                    made = self._made = (os.getpid(), self.loop.run(make()))
        return made[1]

    def __enter__(self) -> Self:
        self.loop.run(self.inner.database.open())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        made, self._made = self._made, None
        if made is not None and made[0] == os.getpid():
            self.loop.run(made[1].close())

    def session(self, name: str | None = None, *, id: UUID | None = None) -> Session:
        """The session of this name (made when first sent to), the existing one of this id, or a fresh one."""
        return Session(self, Target(name, id))

    def agent(self, name: str) -> Owner:
        """The agent of this name, for its ``schedules``."""
        return Owner(lambda: self.inner.agent(name))

    def handle(self, id: UUID, *, uncommitted: bool = False) -> AgentResult:
        """The handle of a run, unchecked."""
        return AgentResult(id, lambda: self.inner.handle(id, uncommitted=uncommitted))

    def result(self, id: UUID | str) -> AgentResult:
        """The handle of a run that exists. Raises UnknownRun."""
        return self.handle(self.loop.run(self.inner.result(id)).id)

    def requeue(self, id: UUID | str) -> AgentResult:
        """Run what failed or was cancelled anew. Raises as :meth:`AsyncChaz.requeue`."""
        return self.handle(self.loop.run(self.inner.requeue(id)).id)

    def cancel(self, id: UUID | str, *, by: str | None = None, reason: str = "") -> bool:
        """Ask that a run be ended, with the runs that it spawned. As :meth:`AsyncChaz.cancel`."""
        return self.loop.run(self.inner.cancel(id, by=by, reason=reason))

    def approvals(self, session_id: UUID | None = None) -> list[Request[UUID | None]]:
        """What runs (of this session, if one is named) ask people and nobody has decided yet; the oldest first."""
        waiting = deciding.waiting(self.inner.database, self.decide, tenant=self.settings.tenant, session_id=session_id)
        return self.loop.run(waiting)

    def approval(self, id: UUID | str) -> Request[UUID | None]:
        """What a run asked by this id, decided or not. Raises UnknownRequest."""
        return self.loop.run(deciding.request(self.inner.database, _request_id(id), self.decide))

    def decide(self, id: UUID | str, word: deciding.Word, by: str | None = None, reason: str = "") -> UUID | None:
        """Send a word for a request: see :class:`chaz.Request`. Raises UnknownRequest, InvalidEntry, NotPermitted."""
        return self.loop.run(self.inner.decide(id, word, by, reason))

    def pause(self, what: str, *, by: str | None = None, reason: str = "") -> bool:
        """Start nothing new of it. As :meth:`AsyncChaz.pause`."""
        return self.loop.run(self.inner.pause(what, by=by, reason=reason))

    def resume(self, what: str) -> bool:
        """Let start again what was paused; False if it was not. Raises InvalidSubject."""
        return self.loop.run(self.inner.resume(what))

    def schedules(self, *, retired: bool = False) -> list[dict[str, Any]]:
        """The schedules of all agents, the ``retired`` ones too if so asked."""
        return self.loop.run(self.inner.schedules(retired=retired))

    def paused(self) -> list[dict[str, Any]]:
        """All that is paused, the longest first: kind, name, since, paused_by, reason."""
        return self.loop.run(self.inner.paused())

    def usage(
        self,
        by: By | Sequence[By] = (),
        *,
        since: datetime | timedelta | None = None,
        agent: str | None = None,
        session: str | UUID | None = None,
        tree: UUID | str | None = None,
        tz: str = "UTC",
    ) -> list[dict[str, Any]]:
        """What calls of models used and cost. As :meth:`AsyncChaz.usage`."""
        return self.loop.run(self.inner.usage(by, since=since, agent=agent, session=session, tree=tree, tz=tz))

    def limit(
        self,
        what: str,
        *,
        tokens: int | None = None,
        cost: float | Decimal | None = None,
        period: timedelta = DAY,
        by: str | None = None,
    ) -> None:
        """Let it use no more than this in each period. As :meth:`AsyncChaz.limit`."""
        self.loop.run(self.inner.limit(what, tokens=tokens, cost=cost, period=period, by=by))

    def unlimit(self, what: str, *, period: timedelta | None = None) -> bool:
        """Take its limits away. As :meth:`AsyncChaz.unlimit`."""
        return self.loop.run(self.inner.unlimit(what, period=period))

    def limits(self) -> list[dict[str, Any]]:
        """All limits, with what is used of the period that goes on: see :func:`chaz.limits.limits`."""
        return self.loop.run(self.inner.limits())

    def runs(self, wanted: RunFilter | None = None) -> list[dict[str, Any]]:
        """Runs as a person wants to see them, newest first; ``wanted`` is a :class:`chaz.listings.RunFilter`."""
        return self.loop.run(self.inner.runs(wanted))

    def sessions(self, wanted: SessionFilter | None = None) -> list[dict[str, Any]]:
        """Sessions of its tenant, newest first, with what is at work and what waits: see :mod:`chaz.listings`."""
        return self.loop.run(self.inner.sessions(wanted))
