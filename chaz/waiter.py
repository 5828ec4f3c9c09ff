"""Waiting for ends of runs: one LISTEN for all waits of a process, and a poll behind it.

It lives on the process's loop thread. A producer on a loop of its own waits for that thread's answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future
from uuid import UUID, uuid4

from chaz import runs
from chaz.channels import DONE
from chaz.database import SILENCE, Database, Row, Subscription, Transaction
from chaz.errors import ChazError
from chaz.loops import loop_thread
from chaz.outcomes import FINAL_STATES

logger = logging.getLogger("chaz.result")

NOBODY = "nobody"
"""The state of an entry that woke no agent."""

REGISTERED_FOR = 30.0
IDLE_FOR = 30.0
FIRST_POLL = 0.05
LAST_POLL = 1.0


def is_over(row: Row) -> bool:
    """Whether a status row of :func:`chaz.runs.status` will not change."""
    return row["state"] in FINAL_STATES or row["state"] == NOBODY


def _expected(error: Exception) -> bool:
    return isinstance(error, ChazError | OSError)


def waiting() -> int:
    """How many waits go on in this process."""
    return sum(waiter.waiting for waiter in list(_shared.values()))


class Waits:
    """A producer's waits, from any loop: all producers of a process share one :class:`Waiter` for each database."""

    def __init__(self, url: str, listen_url: str = "", silence: float = SILENCE) -> None:
        self._key = (url, listen_url or url, silence)
        self._going: set[Future[Row]] = set()
        self._joined = self._closed = False

    async def wait(self, run_id: UUID) -> Row:
        """The status of the run once it is over. Cancel to stop waiting. Raises ChazError if this is closed."""
        self._joined = True
        going = loop_thread().submit(self._wait(run_id))
        self._going.add(going)
        try:
            return await asyncio.wrap_future(going)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and not (task and task.cancelling()):
                raise ChazError("the producer was closed during this wait; the run goes on") from None
            raise
        finally:
            self._going.discard(going)

    async def _wait(self, run_id: UUID) -> Row:
        waiter = _shared.get(self._key)
        if waiter is None:
            waiter = _shared[self._key] = Waiter(*self._key)
        waiter.users.add(self)
        return await waiter.wait(run_id)

    async def close(self) -> None:
        """End the waits that go on with an error, and the process's listening if nobody else's are left."""
        self._closed = True
        for going in list(self._going):
            going.cancel()
        if self._joined:
            await asyncio.wrap_future(loop_thread().submit(self._leave()))

    async def _leave(self) -> None:
        waiter = _shared.get(self._key)
        if waiter is not None and self in waiter.users:
            waiter.users.remove(self)
            if not waiter.users:
                del _shared[self._key]
                await waiter.close()


class Waiter:
    """All waits of a process on one database. A thousand of them are one connection. Used on the loop thread only."""

    def __init__(self, url: str, listen_url: str, silence: float) -> None:
        self.users: set[Waits] = set()
        self._database = Database(url, size=2, name="chaz-waiter", silence=silence)
        self._listen_url = listen_url
        self._silence = silence
        self._waits: dict[UUID, set[asyncio.Future[Row]]] = defaultdict(set)
        self._task: asyncio.Task[None] | None = None
        self._listening = asyncio.Event()
        self._poll = FIRST_POLL

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(len(futures) for futures in list(self._waits.values()))

    async def wait(self, run_id: UUID) -> Row:
        """The status of the run once it is over. Cancel to stop waiting."""
        future: asyncio.Future[Row] = asyncio.get_running_loop().create_future()
        self._waits[run_id].add(future)
        # An end that was being committed while this wait was registered notifies nobody: look again soon.
        self._poll = FIRST_POLL
        try:
            if self._task is None or self._task.done():
                self._listening.clear()
                self._task = asyncio.create_task(self._listen())
            await self._listening.wait()
            if not future.done():
                await self._look([run_id])
            return await future
        finally:
            self._waits[run_id].discard(future)
            if not self._waits[run_id]:
                del self._waits[run_id]

    async def close(self) -> None:
        """Stop listening. Nobody waits any more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._database.close()

    async def _listen(self) -> None:
        # Its own, because a next task may begin while this one lets go.
        id = uuid4()
        subscription = Subscription(self._listen_url, [DONE], name="chaz-wait", silence=self._silence)
        registered = idle_since = 0.0
        try:
            while True:
                try:
                    if not subscription.connected:
                        await subscription.connect()
                        registered = 0.0
                    if time.monotonic() - registered > REGISTERED_FOR / 3:
                        await self._register(id, REGISTERED_FOR)
                        registered = time.monotonic()
                    self._listening.set()
                    if self._waits:
                        idle_since = time.monotonic()
                    elif time.monotonic() - idle_since > IDLE_FOR:
                        # From here on a new wait starts a new task.
                        self._task = None
                        return
                    await self._look(await self._ended_or_poll(subscription))
                except Exception as error:
                    # All waits of the process hang on this task: whatever it was, they go on by polling.
                    logger.warning("waiting: %s; polling until it is back", error, exc_info=not _expected(error))
                    self._listening.set()
                    await subscription.close()
                    await asyncio.sleep(LAST_POLL)
                    with contextlib.suppress(Exception):
                        await self._look(list(self._waits))
        finally:
            with contextlib.suppress(ChazError):
                if registered:
                    await self._register(id, 0)
            await subscription.close()

    async def _ended_or_poll(self, subscription: Subscription) -> list[UUID]:
        """Runs to look at: the one notified, or after a while all that are waited for."""
        payloads = await subscription.wait(self._poll)
        if payloads:
            # Anybody may notify anything, so what is no id of ours is no mistake.
            return [id for id in self._waits if str(id) in payloads]
        self._poll = min(self._poll * 2, LAST_POLL)
        return list(self._waits)

    async def _look(self, ids: Iterable[UUID]) -> None:
        wanted = list(ids)
        if not wanted:
            return
        for id, status in (await runs.status(self._database, wanted)).items():
            if is_over(status):
                for future in self._waits.get(id, set()):
                    if not future.done():
                        future.set_result(status)

    async def _register(self, id: UUID, seconds: float) -> None:
        async def work(tx: Transaction) -> None:
            await tx.execute(
                """
                insert into chaz.waiters (id, expires_at) values (%(id)s, now() + %(seconds)s * interval '1 second')
                on conflict (id) do update set expires_at = excluded.expires_at
                """,
                {"id": id, "seconds": seconds},
            )

        await self._database.transact(work)


_shared: dict[tuple[str, str, float], Waiter] = {}
"""Touched on the loop thread only."""
_inherited: list[object] = []
"""What was open before a fork: never used and never collected here, since its tasks belong to a loop that has gone."""


def _forget_after_fork() -> None:
    global _shared
    _inherited.append(_shared)
    _shared = {}


os.register_at_fork(after_in_child=_forget_after_fork)
