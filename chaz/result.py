"""The handle of a run, with the manners of Celery's ``AsyncResult``.

:class:`AsyncAgentResult` is the source; :class:`AgentResult` is the same for code that is not async.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for_futures
from datetime import datetime
from functools import partial
from itertools import dropwhile
from typing import Any
from uuid import UUID

from chaz import cancelling, runs, sessionlog, usage
from chaz.database import Database, Row
from chaz.entries import Bookmark, Entry, Place
from chaz.errors import InvalidEntry, RunCancelled, RunFailed, UnknownRun, WaitInsideRun, WaitTimeout
from chaz.loops import LoopThread, loop_thread
from chaz.outcomes import Spent
from chaz.runtime.tools import current_call
from chaz.waiter import NOBODY, Waits, is_over

_UNKNOWN = ("result", "reason", "session_id", "agent", "parent_run_id", "root_run_id", "ended_at", "waits_for")

FOLLOW_EVERY = 0.1
"""Seconds between two looks of a reader that follows."""
SETTLE = 5.0
"""Seconds that a reader waits, after the end of a run, for its last audit entries."""


def outcome_of(row: Row, *, propagate: bool = True) -> str | None:
    """The text of a run that is over; None where the entry woke nobody. Raises RunFailed, RunCancelled."""
    if row["state"] == NOBODY:
        return None
    if row["state"] == "succeeded" or not propagate:
        return row["result"]
    error = RunCancelled if row["state"] == "cancelled" else RunFailed
    raise error(row["id"], row["reason"] or row["state"], row["result"] or "")


class AsyncAgentResult:
    """What a producer holds of the run that answers its entry."""

    def __init__(self, id: UUID, database: Database, waits: Waits, *, uncommitted: bool = False) -> None:
        self.id = id
        self._database = database
        self._waits = waits
        # Sent in the caller's own transaction: unknown until that commits, and no mistake.
        self._uncommitted = uncommitted

    async def status(self) -> Row:
        """The row of :func:`chaz.runs.status`: all that is known of its state, at one moment. Raises UnknownRun."""
        row = (await runs.status(self._database, [self.id])).get(self.id)
        if row is None:
            if self._uncommitted:
                return {**dict.fromkeys(_UNKNOWN), "state": "pending", "id": self.id, "attempt": 0}
            raise UnknownRun(self.id)
        return row

    async def state(self) -> str:
        """The run's state: ``pending`` till it is placed, ``nobody`` if it wakes no agent. Raises UnknownRun."""
        return (await self.status())["state"]

    async def ready(self) -> bool:
        """Whether it is over."""
        return is_over(await self.status())

    async def successful(self) -> bool:
        """Whether it has succeeded."""
        return (await self.status())["state"] in {"succeeded", NOBODY}

    async def failed(self) -> bool:
        """Whether it has failed."""
        return (await self.status())["state"] == "failed"

    async def result(self) -> str | None:
        """The answer, or why it ended; None while it is not over."""
        row = await self.status()
        return row["result"] if is_over(row) else None

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until it is over, for ``timeout`` seconds at most. Raises WaitTimeout, UnknownRun, WaitInsideRun."""
        await self._over(timeout)

    async def get(self, timeout: float | None = None, propagate: bool = True) -> str | None:
        """The answer, once it is there; None where the entry woke nobody.

        Raises RunFailed and RunCancelled (not with ``propagate=False``: then the text), WaitTimeout after ``timeout``
        seconds, UnknownRun, and WaitInsideRun in a tool, where a wait would hold a worker.
        """
        return outcome_of(await self._over(timeout), propagate=propagate)

    async def _over(self, timeout: float | None) -> Row:
        refuse_in_a_run("get()")
        row = await self.status()
        if is_over(row):
            return row
        try:
            async with asyncio.timeout(timeout):
                return await self._waits.wait(self.id)
        except TimeoutError:
            row = await self.status()
            if is_over(row):
                return row
            raise WaitTimeout(self.id, row["state"], timeout) from None

    async def revoke(self, terminate: bool = False, *, by: str | None = None, reason: str = "") -> bool:
        """Ask that it be ended, with the runs that it spawned, wherever they are; False if it is over already.

        One INSERT, which a listener acts upon; ``get`` then raises RunCancelled. ``terminate`` is Celery's, and changes
        nothing: a running one is always cut off, in the middle of a model call too. ``by`` says who asks, by default
        the program's user. Raises UnknownRun.
        """
        return await self._database.transact(partial(cancelling.request, run_id=self.id, by=by, reason=reason))

    def __await__(self) -> Generator[Any, None, str | None]:
        return self.get().__await__()

    def sibling(self, id: UUID) -> AsyncAgentResult:
        """The handle of another run of the same database, unchecked."""
        return AsyncAgentResult(id, self._database, self._waits)

    async def agent(self) -> str | None:
        """The agent that answers; None while that is not known, and where nobody was woken."""
        return (await self.status())["agent"]

    async def session_id(self) -> UUID | None:
        """Its session's id: ``chaz.session(id=…)`` gives the session. None until the sender's transaction commits."""
        return (await self.status())["session_id"]

    async def usage(self) -> Spent:
        """What its calls of models have used and cost so far, without its children's."""
        id = (await self.status())["id"]
        return (await usage.of_runs(self._database, [id]))[id]

    async def date_done(self) -> datetime | None:
        """When it ended; None while it is not over."""
        return (await self.status())["ended_at"]

    async def children(self) -> list[AsyncAgentResult]:
        """The runs that it has spawned so far, oldest first."""
        status = await self.status()
        return [self.sibling(id) for id in await runs.children(self._database, status["id"])]

    async def parent(self) -> AsyncAgentResult | None:
        """The run that spawned it; None for one that was not spawned."""
        id = (await self.status())["parent_run_id"]
        return None if id is None else self.sibling(id)

    async def root(self) -> AsyncAgentResult:
        """The run at the top of its tree; itself, if nobody spawned it."""
        return self.sibling((await self.status())["root_run_id"] or self.id)

    async def entries(self, follow: bool = False, after: Place | None = None) -> AsyncGenerator[Entry]:
        """The entries of its session from its own on, in order; with ``follow`` as they come, until it is over.

        ``after`` is an entry that was read (or its ``bookmark``, or a position) and goes on from there: a reader that
        comes back gets each entry that it had not read, late audit entries too.
        """
        place = None if after is None else bookmark_of(after)
        row = await self.status()
        while row["session_id"] is None:
            await asyncio.sleep(FOLLOW_EVERY)
            row = await self.status()
        own = await sessionlog.entry(self._database, self.id)
        while follow and own is not None and own.position is None:
            await asyncio.sleep(FOLLOW_EVERY)
            own = await sessionlog.entry(self._database, self.id)
        # A run without an entry of its own (a requeued one) shows its whole session.
        start = place or Bookmark(own.position - 1 if own is not None and own.position is not None else 0)
        if not follow:
            found = await sessionlog.entries(self._database, row["session_id"], start)
            unplaced = place is None and own is not None and own.position is None
            for entry in dropwhile(lambda entry: entry.id != self.id, found) if unplaced else found:
                yield entry
            return
        async for entry in follow_until_over(self, self._database, row["session_id"], start):
            yield entry

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)


def bookmark_of(place: Place) -> Bookmark:
    """The bookmark of a place in a log. Raises InvalidEntry."""
    try:
        return Bookmark.of(place)
    except ValueError as error:
        raise InvalidEntry(str(error)) from None


async def follow_until_over(
    handle: AsyncAgentResult, database: Database, session_id: UUID, after: Bookmark
) -> AsyncGenerator[Entry]:
    """Entries past a bookmark as they come, until the run is over and its audit trail read (or late)."""
    follower = sessionlog.Follower(database, session_id, after=after)
    over_since: float | None = None
    while True:
        if over_since is None and await handle.ready():
            over_since = time.monotonic()
        for entry in await follower.next():
            yield entry
        if over_since is not None and (not follower.open_runs or time.monotonic() - over_since > SETTLE):
            return
        await asyncio.sleep(FOLLOW_EVERY)


def refuse_in_a_run(method: str) -> None:
    """Raise WaitInsideRun where the code runs in a tool."""
    if current_call.get() is not None:
        raise WaitInsideRun(method)


class AgentResult:
    """What a producer holds of the run that answers its entry. It may also be awaited, on any loop."""

    def __init__(self, id: UUID, make: Callable[[], AsyncAgentResult]) -> None:
        """``make`` gives the async handle of the process that this is used in: it may be another after a fork."""
        self.id = id
        """The run's id, which is its triggering entry's, and Celery's task id."""
        self._make = make

    @property
    def _inner(self) -> AsyncAgentResult:
        return self._make()

    @property
    def _loop(self) -> LoopThread:
        return loop_thread()

    @property
    def state(self) -> str:
        """The run's state: ``pending`` till it is placed, ``nobody`` if it wakes no agent. Raises UnknownRun."""
        return self._loop.run(self._inner.state())

    def ready(self) -> bool:
        """Whether it is over."""
        return self._loop.run(self._inner.ready())

    def successful(self) -> bool:
        """Whether it has succeeded."""
        return self._loop.run(self._inner.successful())

    def failed(self) -> bool:
        """Whether it has failed."""
        return self._loop.run(self._inner.failed())

    @property
    def result(self) -> str | None:
        """The answer, or why it ended; None while it is not over."""
        return self._loop.run(self._inner.result())

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is over, for ``timeout`` seconds at most. Raises WaitTimeout, UnknownRun, WaitInsideRun."""
        refuse_in_a_run("wait()")
        self._loop.run(self._inner.wait(timeout))

    def get(self, timeout: float | None = None, propagate: bool = True) -> str | None:
        """The answer, once it is there; None where the entry woke nobody. Raises as :meth:`AsyncAgentResult.get`."""
        refuse_in_a_run("get()")
        return self._loop.run(self._inner.get(timeout, propagate))

    def revoke(self, terminate: bool = False, *, by: str | None = None, reason: str = "") -> bool:
        """Ask that it be ended, with the runs that it spawned. As :meth:`AsyncAgentResult.revoke`."""
        return self._loop.run(self._inner.revoke(terminate, by=by, reason=reason))

    @property
    def agent(self) -> str | None:
        """The agent that answers; None while that is not known, and where nobody was woken."""
        return self._loop.run(self._inner.agent())

    @property
    def session_id(self) -> UUID | None:
        """Its session's id: ``chaz.session(id=…)`` gives the session. None until the sender's transaction commits."""
        return self._loop.run(self._inner.session_id())

    @property
    def usage(self) -> Spent:
        """What its calls of models have used and cost so far, without its children's."""
        return self._loop.run(self._inner.usage())

    @property
    def date_done(self) -> datetime | None:
        """When it ended; None while it is not over."""
        return self._loop.run(self._inner.date_done())

    @property
    def children(self) -> list[AgentResult]:
        """The runs that it has spawned so far, oldest first."""
        return [self._sibling(child) for child in self._loop.run(self._inner.children())]

    @property
    def parent(self) -> AgentResult | None:
        """The run that spawned it; None for one that was not spawned."""
        found = self._loop.run(self._inner.parent())
        return None if found is None else self._sibling(found)

    @property
    def root(self) -> AgentResult:
        """The run at the top of its tree; itself, if nobody spawned it."""
        return self._sibling(self._loop.run(self._inner.root()))

    def _sibling(self, other: AsyncAgentResult) -> AgentResult:
        id = other.id
        return AgentResult(id, lambda: self._inner.sibling(id))

    def entries(self, follow: bool = False, after: Place | None = None) -> Iterator[Entry]:
        """The entries of its session from its own on, in order; with ``follow`` as they come, until it is over.

        ``after`` goes on from a place, as :meth:`AsyncAgentResult.entries` does.
        """
        return iterate(self._inner.entries(follow, after), self._loop)

    def __await__(self) -> Generator[Any, None, str | None]:
        refuse_in_a_run("await")
        return asyncio.wrap_future(self._loop.submit(self._inner.get())).__await__()

    def __repr__(self) -> str:
        return f"<AgentResult {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AgentResult) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def future(self) -> Future[None]:
        """A future that is done when the run is over."""
        refuse_in_a_run("future()")
        return self._loop.submit(self._inner.wait())


def iterate(generator: AsyncGenerator[Entry], loop: LoopThread) -> Iterator[Entry]:
    """An async generator of the loop, for code that is not async."""

    async def step() -> Entry | None:
        return await anext(generator, None)

    try:
        while (item := loop.run(step())) is not None:
            yield item
    finally:
        loop.run(generator.aclose())


def as_completed(handles: Iterable[AgentResult], timeout: float | None = None) -> Iterator[AgentResult]:
    """The handles in the order in which their runs end. Raises WaitTimeout after ``timeout`` seconds in all."""
    started = time.monotonic()
    futures = {handle.future(): handle for handle in dict.fromkeys(handles)}
    try:
        while futures:
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - started))
            done, _ = wait_for_futures(futures, left, FIRST_COMPLETED)
            if not done:
                handle = next(iter(futures.values()))
                raise WaitTimeout(handle.id, handle.state, timeout)
            for future in done:
                future.result()
                yield futures.pop(future)
    finally:
        for future in futures:
            future.cancel()
