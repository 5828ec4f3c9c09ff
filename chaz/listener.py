"""The listener: hears the doorbell, places entries, makes runs and publishes them. Any number may run.

Awake, it says so ahead of time (so that producers need not ring) and works until nothing is left. Going to sleep is a
proof, not a pause: it takes the word back, and then looks until everybody who may have read it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from uuid import UUID, uuid4

from chaz import cancelling, firing, interrupts, sweeps
from chaz.aside import Aside
from chaz.audit import trail
from chaz.audit.publisher import AuditPublisher
from chaz.channels import BELL
from chaz.database import RETRIED, Database, Subscription, Transaction
from chaz.ear import Ear
from chaz.errors import ChazError, DatabaseUnavailable
from chaz.placing import Placed, place
from chaz.publishing import publishable
from chaz.runs import Publication
from chaz.settings import Settings
from chaz.teller import SendTasks, Teller, send_nothing

logger = logging.getLogger("chaz.listener")

AWAKE_AHEAD = timedelta(seconds=1)
RENEW_AFTER = 0.5
PROOF_AT_MOST = 5.0

Publish = Callable[[list[Publication]], None]
"""Hands runs over to be put on their agents' queues. Never blocks: no round waits for the broker."""


class Listener:
    """One listener process. :meth:`run` until cancelled or :meth:`stop`."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        publish: Publish,
        audit: AuditPublisher,
        send_tasks: SendTasks = send_nothing,
    ) -> None:
        self.id = uuid4()
        self._settings = settings
        self._database = database
        self._publish = publish
        self._audit = audit
        self._teller = Teller(settings, database, send_tasks)
        subscription = Subscription(
            settings.listen_url or settings.database_url, [BELL], silence=settings.database_silence
        )
        self._ear = Ear(subscription, pause=min(settings.sweep, settings.long_poll), changed=self._sweep_at_once)
        self._stopping = asyncio.Event()
        self._last_contact = time.monotonic()
        self._out_of_contact = False
        self._in_contact_since = float("-inf")
        self._next_sweep = 0.0
        self._awake_until = 0.0
        self._proof: tuple[int, float] | None = None
        self._left = False
        self._behind = False
        self._nap = settings.short_poll
        self._next_schedule = float("inf")
        self._firing_since: float | None = None
        self._aside = Aside()

    def stop(self) -> None:
        """Finish what is at hand and return from :meth:`run`."""
        self._stopping.set()

    async def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Listen, sweep, wait; after every reconnect in that order. No fault of one round ends it.

        Without its LISTEN connection it goes on by polling, and says so in its health.
        """
        stopped = asyncio.create_task(self._stopping.wait())
        failures = 0
        rung = False
        await self._ear.open(stopped)
        try:
            while not self._stopping.is_set():
                try:
                    if on_ready is not None:
                        on_ready()
                        on_ready = None
                    await self._work_until_asleep(rung=rung)
                    failures = 0
                    rung = await self._sleep(stopped)
                except (ChazError, OSError, *RETRIED) as error:
                    failures += 1
                    logger.warning("listener: %s; trying again", error)
                    if isinstance(error, DatabaseUnavailable):
                        self._out_of_contact = True
                        self._firing_since = None
                    await self._pause(stopped, min(0.1 * 2**failures, self._settings.sweep))
                except Exception:
                    failures += 1
                    logger.exception("listener: a round failed; trying again")
                    await self._pause(stopped, min(0.1 * 2**failures, self._settings.sweep))
        finally:
            stopped.cancel()
            with contextlib.suppress(ChazError):
                await self._say_awake(timedelta(0))
                await self._report("stopped")
            await self._ear.close()
            self._teller.close()

    async def _sleep(self, stopped: asyncio.Task[bool]) -> bool:
        longest = max(self._settings.short_poll, min(self._settings.long_poll, self._next_schedule - time.monotonic()))
        if not self._behind:
            return await self._ear.wait(stopped, longest)
        # Claims make room for more, and ring no bell.
        nap = min(self._nap, longest)
        self._nap = nap * 2
        return await self._ear.wait(stopped, nap)

    def _sweep_at_once(self) -> None:
        self._next_sweep = 0.0

    def _in_contact(self) -> None:
        """Remember when PostgreSQL was last reached, and since when without an outage that leases do not outlast."""
        now = time.monotonic()
        if self._out_of_contact and now - self._last_contact > self._settings.lease / 2:
            self._in_contact_since = now
        self._out_of_contact = False
        self._last_contact = now

    @staticmethod
    async def _pause(stopped: asyncio.Task[bool], seconds: float) -> None:
        await asyncio.wait({stopped}, timeout=seconds)

    async def _work_until_asleep(self, *, rung: bool = False) -> None:
        """Work while there is work, then prove that nobody relies on this listener's being awake."""
        # Most often somebody rang for just this; the clock's work comes with the next round.
        found = await self._attempt("placing and publishing", self._place_and_publish) if rung else False
        pause = self._settings.short_poll
        while not self._stopping.is_set():
            if found:
                self._proof = None
                pause = self._settings.short_poll
                await self._say_awake(AWAKE_AHEAD)
                found = await self._round()
            elif self._awake_until:
                await self._say_awake(timedelta(0))
                if self._awake_until:
                    found = await self._round()
                else:
                    self._proof = await self._begin_proof()
            elif self._proof is not None:
                # Before the round: whoever has ended by then is seen by it.
                proven = await self._is_proven(self._proof)
                found = await self._round()
                if not found and proven:
                    self._proof = None
                elif not found:
                    await asyncio.sleep(self._settings.short_poll)
            else:
                found = await self._round()
                if not found and not self._left:
                    return
                if not found:
                    # Somebody holds a head for a moment, and will ring no bell when it is free.
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, self._settings.long_poll)

    async def _begin_proof(self) -> tuple[int, float]:
        """A transaction id that everybody who may have read "awake" is older than, and when to wait no longer."""
        (row,) = await self._database.fetch("select pg_current_xact_id()::text::numeric as xid")
        return int(row["xid"]), time.monotonic() + PROOF_AT_MOST

    async def _is_proven(self, proof: tuple[int, float]) -> bool:
        """Whether all of them have ended, or have taken so long that the long poll has to find them."""
        xid, ends = proof
        (row,) = await self._database.fetch("select pg_snapshot_xmin(pg_current_snapshot())::text::numeric as xmin")
        return int(row["xmin"]) > xid or time.monotonic() > ends

    async def _say_awake(self, ahead: timedelta) -> None:
        """Say until when producers need not ring; nothing ahead takes the word back."""
        now = time.monotonic()
        if ahead and now < self._awake_until - AWAKE_AHEAD.total_seconds() + RENEW_AFTER:
            return

        async def work(tx: Transaction) -> bool:
            # Losing this row's last write in a crash makes producers ring more, never less.
            await tx.execute("set local synchronous_commit = off")
            cursor = await tx.execute(
                """
                update chaz.doorbell set awake_until = clock_timestamp() + %(ahead)s
                where single = (select single from chaz.doorbell for update skip locked)
                """,
                {"ahead": ahead or timedelta(microseconds=-1)},
            )
            return cursor.rowcount > 0

        # Whoever holds the row holds up no round: producers ring more meanwhile, and a word is taken back later.
        if await self._database.transact(work):
            self._awake_until = now + ahead.total_seconds() if ahead else 0.0
        elif not ahead:
            await asyncio.sleep(self._settings.short_poll)

    async def _round(self) -> bool:
        """Do all work that is there now; whether there was any. ``_left`` says whether some could not be done yet."""
        if time.monotonic() >= self._next_sweep:
            await self._sweep()
        due = await sweeps.due(self._database, lease=self._settings.lease)
        self._in_contact()
        self._left = False
        self._behind = due.behind
        self._next_schedule = float("inf") if due.next_schedule is None else time.monotonic() + due.next_schedule
        if not due.schedules:
            self._firing_since = None
        if not due:
            return False
        found = False
        # Before it is published, or an unplaced one placed: then in the next round.
        if due.cancel:
            found = await self._attempt("cancelling", self._cancel)
            self._left = not found
        if due.inbox or due.publish:
            placed = await self._attempt("placing and publishing", self._place_and_publish)
            self._left |= not placed
            found |= placed
        if due.interrupting:
            interrupted = await self._attempt("interrupting runs", self._interrupt)
            self._left |= not interrupted
            found |= interrupted
        if due.scheduled:
            found |= await self._attempt("queueing what was to come later", self._queue_scheduled)
        if due.schedules:
            found |= await self._attempt("firing schedules", self._fire)
        # After an outage, workers that live have yet to say so: their runs are not lost.
        if due.lost and time.monotonic() - self._in_contact_since > self._settings.lease:
            found |= await self._attempt("taking back the runs of lost workers", self._rescue)
        if due.late:
            found |= await self._attempt("ending runs whose time is over", self._close_late)
        if due.overdue:
            found |= await self._attempt("closing requests whose time is over", self._time_out)
        if due.callbacks:
            found |= await self._attempt("telling of ends", self._teller.tell)
        if due.untold:
            found |= await self._attempt("telling the audit trail again", self._tell_again)
        if found:
            self._nap = self._settings.short_poll
        return found

    async def _attempt(self, what: str, work: Callable[[], Awaitable[bool]]) -> bool:
        """Do one kind of work; where it fails it is set aside, and holds up no other kind."""
        if what in self._aside:
            return False
        try:
            found = await work()
        except (DatabaseUnavailable, *RETRIED):
            raise
        except Exception:
            pause = self._aside.put(what, longest=self._settings.sweep)
            logger.exception("listener: %s failed; set aside for %g s", what, pause)
            return False
        self._aside.forget(what)
        return found

    async def _cancel(self) -> bool:
        walked = await cancelling.walk(self._database, aside=self._aside)
        for run in walked.ended:
            logger.warning("listener: run=%s %s", run.run_id, run.text)
            self._audit.tell(run.events)
        return walked.settled > 0

    async def _queue_scheduled(self) -> bool:
        return await sweeps.queue_scheduled(self._database) > 0

    async def _fire(self) -> bool:
        # What was in time when this began is not missed because so much is due at once, or somebody held a head.
        now = time.monotonic()
        since = now if self._firing_since is None else self._firing_since
        grace = self._settings.schedule_grace + now - since
        fired, left = await firing.fire_due(self._database, grace=grace, aside=self._aside)
        self._firing_since = since if left else None
        self._left |= left
        for one in fired:
            came_to = f"run={one.run_id}" if one.run_id else f"skipped: {one.skipped}, {one.detail}"
            logger.info("listener: schedule %s of %s, slot %s: %s", one.id, one.agent, one.slot.isoformat(), came_to)
        return bool(fired)

    async def _place_and_publish(self) -> bool:
        """Place what is unplaced and publish what is due, in one transaction; whether there was anything."""

        async def work(tx: Transaction) -> tuple[Placed, list[Publication]]:
            return await self._place(tx), await self._due_publications(tx)

        try:
            placed, publications = await self._database.transact(work)
        except DatabaseUnavailable:
            raise
        except Exception:
            # A row that cannot be written, or one that somebody holds.
            return await self._place_and_publish_apart()
        await self._publish_now(placed.publications + publications)
        return bool(placed.entries or publications)

    async def _place_and_publish_apart(self) -> bool:
        """A session's entries cannot be placed, or a run not published: do the others, and set the session aside."""
        found = False
        for row in await self._database.fetch("select distinct session_id from chaz.entries where position is null"):
            session = row["session_id"]
            if session in self._aside:
                continue
            try:
                placed = await self._database.transact(partial(self._place, only=session))
            except DatabaseUnavailable:
                raise
            except RETRIED as error:
                logger.warning("listener: session %s cannot be placed now (%s); going on", session, error)
            except Exception:
                pause = self._aside.put(session)
                logger.exception("listener: session %s cannot be placed; set aside for %g s", session, pause)
            else:
                self._aside.forget(session)
                await self._publish_now(placed.publications)
                found |= placed.entries > 0
        publications = await self._database.transact(self._due_publications)
        await self._publish_now(publications)
        return found or bool(publications)

    async def _place(self, tx: Transaction, only: UUID | None = None) -> Placed:
        return await place(
            tx,
            default_agent=self._settings.default_agent,
            first_wait=self._settings.sweep,
            only=only,
            without=[] if only else self._aside.ids(),
        )

    async def _due_publications(self, tx: Transaction) -> list[Publication]:
        return await publishable(tx, first_wait=self._settings.sweep)

    async def _publish_now(self, publications: list[Publication]) -> None:
        """The rows are committed: what is lost from here on is published by a later round."""
        if publications:
            self._publish(publications)

    async def _rescue(self) -> bool:
        rescued = await sweeps.rescue_lost(self._database)
        for run, worker in rescued:
            logger.warning("listener: worker %s was lost; run=%s is queued again", worker, run)
        return bool(rescued)

    async def _interrupt(self) -> bool:
        interrupted = await interrupts.interrupt(self._database, aside=self._aside)
        for run, by, events in interrupted:
            logger.info("listener: run=%s was interrupted by the message of run=%s", run, by)
            self._audit.tell(events)
        return bool(interrupted)

    async def _close_late(self) -> bool:
        closed = await sweeps.close_late(
            self._database,
            grace=self._settings.unknown_agent_grace,
            lease=self._settings.lease,
            aside=self._aside,
        )
        for run, reason, events in closed:
            logger.warning("listener: run=%s failed: %s", run, reason)
            self._audit.tell(events)
        return bool(closed)

    async def _time_out(self) -> bool:
        closed = await sweeps.time_out_requests(self._database, aside=self._aside)
        for request in closed:
            logger.info("listener: request=%s was not decided in time", request)
        return bool(closed)

    async def _tell_again(self) -> bool:
        settled = await trail.settle(self._database)
        if settled.missing:
            logger.warning("listener: %d audit events were not recorded; sent again", len(settled.missing))
            self._audit.tell(settled.missing)
        return settled.runs > 0

    async def _sweep(self) -> None:
        """What is due by the clock only: the connection's probe, this listener's health."""
        await self._ear.probe()
        await self._report("listening" if self._ear.hears else "polling")
        await sweeps.forget_processes(self._database)
        self._next_sweep = time.monotonic() + self._settings.sweep

    async def _report(self, mode: str) -> None:
        async def work(tx: Transaction) -> None:
            await tx.execute(
                """
                insert into chaz.listeners (id, name, pid, mode) values (%(id)s, %(name)s, %(pid)s, %(mode)s)
                on conflict (id) do update set mode = excluded.mode, seen_at = clock_timestamp()
                """,
                {"id": self.id, "name": socket.gethostname(), "pid": os.getpid(), "mode": mode},
            )

        await self._database.transact(work)
