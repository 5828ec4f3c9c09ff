"""A worker process: its lease, its loop, and the way of one run through it: claim, rebuild, run, end or park."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar
from uuid import UUID, uuid4

import psycopg
from psycopg.rows import DictRow

from chaz import compactions, journal, rosters, runs, sessionlog, steering, workers
from chaz.aborting import AbortEar
from chaz.audit.publisher import AuditPublisher
from chaz.database import CONNECT_TIMEOUT, Database, Transaction, connect_blocking
from chaz.entries import Entry, safe_text
from chaz.errors import (
    ChazError,
    ConfigurationError,
    DatabaseUnavailable,
    LimitReached,
    ModelError,
    StaleAttempt,
    UnknownPrice,
)
from chaz.loops import LoopThread, loop_thread
from chaz.outcomes import RunOutcome
from chaz.runjournal import RunJournal
from chaz.runs import Attempt, Claim, Unclaimed
from chaz.runtime import engine
from chaz.runtime.agents import Agent, Agents
from chaz.runtime.compaction import LEAST, SYSTEM, NothingToSummarise, Prompt, Summarised, prompt_of
from chaz.runtime.context import Conversation, conversation_of, spoken
from chaz.runtime.egress import Egress
from chaz.runtime.models import ChatModel, UserMessage, resolve_model
from chaz.runtime.ownsecrets import own_secrets
from chaz.runtime.roommates import room_note
from chaz.runtime.running import Answered, CameTo, Failed, GivenBack, Parked, Record, RunContext
from chaz.runtime.threads import ToolThreads
from chaz.runtime.tokens import BYTES_OF_A_TOKEN, counter
from chaz.settings import Settings
from chaz.writes import LOST_PAUSE, surely

logger = logging.getLogger("chaz.worker")

T = TypeVar("T")


@dataclass(frozen=True)
class LetGo:
    """The run left this process before its end; ``why`` is for people."""

    why: str


@dataclass(frozen=True)
class Cancelled:
    """The run was cancelled; ``why`` says by whom."""

    why: str


@dataclass
class _Owned:
    attempt: int
    task: asyncio.Task[object]
    claimed_at: float


class WorkerProcess:
    """One per process, made lazily and after a fork. A Celery slot calls :meth:`execute` and waits."""

    def __init__(self, settings: Settings, agents: Agents, *, name: str, isolation: bool = False) -> None:
        self.id = uuid4()
        self.name = name
        self._isolation = isolation
        self._settings = settings
        self._agents = agents
        self._loop: LoopThread = loop_thread()
        self._database = Database(
            settings.require_database(),
            size=settings.database_pool,
            name="chaz-worker",
            silence=settings.database_silence,
        )
        self._audit = AuditPublisher(settings)
        self._models: dict[str, ChatModel] = {}
        self._threads = ToolThreads(settings.tool_threads)
        own = own_secrets(os.environ, settings.database_url, settings.listen_url, settings.broker_url)
        self._egress = Egress(settings.secrets, own)
        self._owned: dict[UUID, _Owned] = {}
        self._ear = AbortEar(settings, self._abort)
        self._unknown: set[Attempt] = set()
        self._stopping = asyncio.Event()
        # An isolation worker sees a run past the call that it was suspected for, and gives it back at the next turn.
        self._give_back_at = asyncio.Event() if isolation else self._stopping
        if isolation:
            self._give_back_at.set()
        self._ended = threading.Event()
        self._last_beat = 0.0
        self._beaten = asyncio.Event()
        self._beating = threading.Thread(target=self._beat, name="chaz-beat", daemon=True)
        self._first_beat = threading.Event()
        self._closing = threading.Lock()

    def start(self) -> None:
        """Open the database and take the lease. Raises DatabaseUnavailable."""
        self._loop.run(self._database.open())
        self._beating.start()
        # Beside the first claim. No daemon: the interpreter must not end inside a library that is not Python's.
        threading.Thread(target=self._egress.load, name="chaz-egress").start()
        if not self._first_beat.wait(CONNECT_TIMEOUT + 5):
            raise DatabaseUnavailable(self._database.address, "no lease could be taken")
        self._loop.loop.call_soon_threadsafe(self._ear.open)

    def execute(self, agent_name: str, run_id: UUID) -> LetGo | Cancelled | None:
        """Bring a delivered run as far as it goes; None once it has ended, or where there is nothing to do."""
        return self._loop.run(self._execute(self._agents[agent_name], run_id))

    def drain(self) -> None:
        """Claim nothing more, and let what runs come to the end of a step."""
        self._loop.loop.call_soon_threadsafe(self._stopping.set)

    def close(self) -> None:
        """Drain for ``shutdown_grace`` seconds, give back what still runs, end the lease. Again does nothing."""
        with self._closing:
            if self._ended.is_set():
                return
            self._close_once()

    def _close_once(self) -> None:
        self.drain()
        try:
            self._loop.run(self._let_go())
            # No beat may renew what is being given up.
            self._ended.set()
            self._beating.join(self._settings.beat)
            self._loop.run(self._leave())
        except ChazError as error:
            logger.warning("worker: stopping without PostgreSQL (%s); other workers take its runs over", error)
        finally:
            self._ended.set()
            self._audit.close()

    async def _let_go(self) -> None:
        ends = time.monotonic() + self._settings.shutdown_grace
        while self._owned and time.monotonic() < ends:
            await asyncio.sleep(0.05)
        for owned in list(self._owned.values()):
            owned.task.cancel()
        while self._owned and time.monotonic() < ends + 5:
            await asyncio.sleep(0.05)

    async def _leave(self) -> None:
        await self._ear.close()
        await self._database.transact(lambda tx: workers.leave(tx, self.id))
        await self._database.close()

    # The lease

    def _beat(self) -> None:
        connection: psycopg.Connection[DictRow] | None = None
        lease = timedelta(seconds=self._settings.lease)
        while not self._ended.is_set():
            asked = time.monotonic()
            try:
                if connection is None or connection.closed:
                    connection = connect_blocking(
                        self._settings.database_url,
                        "chaz-beat",
                        connect_timeout=max(2, int(self._settings.beat)),
                        silence=min(self._settings.lease / 2, self._settings.database_silence),
                    )
                    # A beat that waits for somebody who holds its row is no beat.
                    connection.execute("set lock_timeout = '1s'")
                owned = workers.beat(
                    connection, self.id, name=self.name, pid=os.getpid(), lease=lease, isolation=self._isolation
                )
                self._first_beat.set()
                self._loop.loop.call_soon_threadsafe(self._compare, owned, asked)
            except psycopg.Error as error:
                logger.warning("worker: the lease could not be renewed (%s)", " ".join(str(error).split()))
                if connection is not None:
                    connection.close()
                    connection = None
            self._ended.wait(self._settings.beat)
        if connection is not None:
            connection.close()

    def _compare(self, in_database: dict[UUID, int], asked: float) -> None:
        """On the loop: what the database gave to somebody else is aborted here, what nobody here runs is given back."""
        for run_id, owned in list(self._owned.items()):
            if owned.claimed_at < asked and in_database.get(run_id) != owned.attempt:
                logger.warning("worker: run=%s attempt=%d is no longer this worker's; aborted", run_id, owned.attempt)
                owned.task.cancel("lost")
        unknown = {Attempt(*pair) for pair in in_database.items() if pair[0] not in self._owned}
        # Twice, because a claim is committed a moment before it is known here.
        for attempt in unknown & self._unknown:
            logger.warning("worker: run=%s attempt=%d is not run here; given back", attempt.run_id, attempt.attempt)
            self._loop.submit(self._give_back(attempt, "its worker lost sight of it"))
        self._unknown = unknown
        # Only now: what was taken over is cancelled already, and does not take this beat for its own.
        self._last_beat = asked
        self._beaten.set()
        self._beaten = asyncio.Event()

    def _abort(self, run_id: UUID) -> None:
        """On the loop: a run was ended from outside. What it does here is cut off, a model call in its middle too."""
        owned = self._owned.get(run_id)
        if owned is not None:
            logger.warning("worker: run=%s attempt=%d was ended from outside; aborted", run_id, owned.attempt)
            owned.task.cancel("ended")

    async def wait_for_lease(self) -> None:
        """Wait until the last good beat is so fresh that the lease surely holds: at once, unless beats are lacking."""
        while not self._lease_is_fresh():
            await self._beaten.wait()

    def _lease_is_fresh(self) -> bool:
        return time.monotonic() - self._last_beat < self._settings.lease

    # One run

    async def _execute(self, agent: Agent, run_id: UUID) -> LetGo | Cancelled | None:
        if self._stopping.is_set():
            await self._database.transact(partial(runs.ring_again, run_id=run_id))
            return LetGo("its worker is stopping")
        try:
            # For a while only: another worker may have a lease.
            await asyncio.wait_for(self.wait_for_lease(), self._settings.beat)
        except TimeoutError:
            await self._database.transact(partial(runs.ring_again, run_id=run_id, wait=self._settings.beat))
            return LetGo("its worker cannot renew its lease")
        claim = await self._claim(agent, run_id)
        if isinstance(claim, Unclaimed):
            logger.log(
                logging.INFO if claim.why == "held" else logging.WARNING,
                *("delivery of run=%s for agent=%s came to nothing: %s %s", run_id, agent.name, claim.why, claim.state),
            )
            if claim.why == "cancelled":
                return await self._cancelled(run_id) or Cancelled("it is to be cancelled")
            if claim.why == "held":
                return LetGo(f"held: {claim.state}")
            if claim.why == "not yet":
                await self._database.transact(partial(runs.ring_again, run_id=run_id, wait=self._settings.beat))
                return LetGo(f"not yet: {claim.state}")
            # To return would tell Celery that a run which goes on elsewhere has succeeded.
            return LetGo(f"a second delivery: it is {claim.state}") if claim.goes_on else None
        logger.info(
            "claimed run=%s attempt=%d agent=%s session=%s", run_id, claim.attempt, agent.name, claim.session_id
        )
        task = asyncio.create_task(self._run(agent, claim))
        self._owned[run_id] = _Owned(claim.attempt, task, time.monotonic())
        try:
            return await task
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            return await self._after_cancel(claim)
        except StaleAttempt as error:
            logger.warning("worker: %s; nothing of it was written", error)
            return await self._cancelled(run_id) or LetGo(str(error))
        finally:
            self._owned.pop(run_id, None)

    async def _claim(self, agent: Agent, run_id: UUID) -> Claim | Unclaimed:
        claim = partial(runs.claim, run_id=run_id, agent=agent.name, worker_id=self.id, claim_id=uuid4())
        while True:
            try:
                return await self._database.transact(claim)
            except DatabaseUnavailable:
                if self._stopping.is_set() or not self._lease_is_fresh():
                    raise
            # If it was committed all the same, the same claim id finds it.
            await asyncio.sleep(LOST_PAUSE)

    async def _after_cancel(self, claim: Claim) -> LetGo | Cancelled:
        """The run was cut off: ended from outside, found lost by a beat, or by a stop that had waited long enough."""
        if not await self._give_back(claim, "its worker stopped during a step"):
            return await self._cancelled(claim.run_id) or LetGo("another worker has it")
        return LetGo("given back: its worker is stopping")

    async def _cancelled(self, run_id: UUID) -> Cancelled | None:
        """Why the run was cancelled, if it was."""
        row = (await runs.status(self._database, [run_id])).get(run_id)
        return Cancelled(row["result"]) if row is not None and row["state"] == "cancelled" else None

    async def _give_back(self, attempt: Attempt, reason: str) -> bool:
        try:
            await self._database.transact(lambda tx: runs.give_back(tx, attempt, reason=reason))
        except StaleAttempt:
            return False
        return True

    async def _run(self, agent: Agent, claim: Claim) -> LetGo | None:
        deadline = asyncio.timeout(max(0.0, claim.seconds_left))
        try:
            if claim.model is not None and not agent.may_run_with(claim.model):
                raise ModelError(claim.model, f"{agent.name!r} may not be run with it")
            async with deadline:
                came_to = await self._run_until_it_leaves(agent, claim)
        except TimeoutError:
            if not deadline.expired():
                raise
            came_to = Failed("deadline", "its deadline has passed")
        # A model of another's choosing may need what this machine lacks.
        except (ModelError, ConfigurationError) as error:
            came_to = Failed("model", str(error))
        except LimitReached as error:
            came_to = Failed("limit", str(error))
        except UnknownPrice as error:
            came_to = Failed("price", str(error))
        except (StaleAttempt, DatabaseUnavailable):
            raise
        except Exception as error:
            # The traceback as text, because what was raised may quote anything.
            what = await self._egress.text(traceback.format_exc())
            logger.error(
                "worker: run=%s failed by a fault of chaz or of its agent's definition\n%s", claim.run_id, what
            )
            came_to = Failed("internal", f"{type(error).__name__}: {error}")
        match came_to:
            case Parked():
                logger.info("parked run=%s waits for %s", claim.run_id, came_to.waits_for)
                return LetGo(f"parked: waits for {came_to.waits_for}")
            case GivenBack():
                reason = await self._egress.text(came_to.reason)
                how = {"wait": came_to.wait, "reason": reason, "cleared": self._isolation}
                await self._finish(claim, partial(runs.give_back, attempt=claim, **how), gave=None)
                logger.info("given back run=%s for %.1f s: %s", claim.run_id, came_to.wait, reason)
                return LetGo(f"given back: {reason}")
            case Answered():
                outcome = RunOutcome(state="succeeded", text=await self._egress.text(safe_text(came_to.text)))
            case Failed():
                text = await self._egress.text(safe_text(came_to.text))
                outcome = RunOutcome(state="failed", reason=came_to.reason, text=text)
            case Summarised():
                text = await self._egress.text(safe_text(came_to.text))
                covers = {"covers": came_to.covers}
                outcome = RunOutcome(state="succeeded", text=text, says="summary", metadata=covers)
            case NothingToSummarise():
                outcome = RunOutcome(state="succeeded", reason="too-few", text=came_to.text, says="note")
        full_from = None
        if agent.compact_at is not None:
            full_from = await asyncio.to_thread(agent.full_from, claim.model or agent.model)
        burst = self._settings.burst
        end = partial(compactions.end_run, claim=claim, outcome=outcome, full_from=full_from, burst=burst)
        # What a commit in doubt had to tell is told again from the journal.
        self._audit.tell(await self._finish(claim, end, gave=[]))
        logger.info("ended run=%s %s %s", claim.run_id, outcome.state, outcome.reason)
        return None

    async def _run_until_it_leaves(self, agent: Agent, claim: Claim) -> CameTo | Summarised | NothingToSummarise:
        run_journal = RunJournal(
            self._database,
            claim,
            agent.version,
            _model_name(agent, claim),
            agent.budget,
            self._settings.approving,
            self._audit.tell,
            self.wait_for_lease,
            self._settings.ceilings,
        )
        if claim.cause == "compaction":
            return await self._compact(agent, claim, run_journal)
        replay = claim.attempt > 1
        while True:
            came_to = await engine.run(await self._rebuild(agent, claim, run_journal, replay=replay))
            if not isinstance(came_to, Parked):
                return came_to
            park = partial(runs.park, attempt=claim, waits_for=came_to.waits_for)
            if await self._finish(claim, park, gave=True):
                return came_to
            # All was answered while it was parking: go on at once, from the journal.
            replay = True

    async def _compact(
        self, agent: Agent, claim: Claim, run_journal: RunJournal
    ) -> CameTo | Summarised | NothingToSummarise:
        """Have the session summarised: one step of a run that is shown no tools."""
        model_name = _model_name(agent, claim)
        model, room = self._model(model_name), await asyncio.to_thread(agent.room, model_name)

        async def read(tx: Transaction) -> tuple[list[journal.StoredStep], compactions.Uncovered]:
            steps, _ = await journal.load(tx, claim.run_id)
            return steps, await compactions.uncovered(tx, claim, room=room * BYTES_OF_A_TOKEN)

        steps, uncovered = await surely(self._database, claim.run_id, read)
        if steps:
            # What it covers is what the model had seen, whatever waits for an answer now.
            prompt = Prompt("", covers=steps[0].read_to)
        elif len(uncovered.entries) < LEAST:
            return NothingToSummarise(
                f"nothing to summarise: {len(uncovered.entries)} messages since the last summary are not waiting for "
                f"an answer, and a summary takes {LEAST}"
            )
        else:
            prompt = prompt_of(uncovered.so_far, uncovered.entries, room=room, count=counter(model))
        run_journal.seen = prompt.covers
        came_to = await engine.run(
            RunContext(
                run_id=claim.run_id,
                session_id=claim.session_id,
                agent=agent,
                model=model,
                model_name=model_name,
                journal=run_journal,
                threads=self._threads,
                conversation=Conversation((UserMessage(text=prompt.text),)),
                room=room,
                max_steps=1,
                depth_left=0,
                system=SYSTEM,
                limited=run_journal.limited,
                steps={stored.step: stored.turn for stored in steps},
                stopping=self._give_back_at,
                egress=self._egress,
                shutdown=self._stopping,
            )
        )
        if not isinstance(came_to, Answered):
            return came_to
        if not came_to.text.strip():
            return Failed("model", f"{model_name} gave an empty summary; the log is as it was")
        return Summarised(came_to.text, prompt.covers)

    async def _finish(self, claim: Claim, write: Callable[[Transaction], Awaitable[T]], *, gave: T) -> T:
        """Park, give back or end the run; ``gave`` stands for what a try in doubt gave that turns out to be written."""

        async def written(tx: Transaction) -> T | None:
            return gave if await runs.has_left(tx, claim) else None

        return await surely(self._database, claim.run_id, write, written)

    async def _rebuild(self, agent: Agent, claim: Claim, run_journal: RunJournal, *, replay: bool) -> RunContext:
        model_name = _model_name(agent, claim)
        # What is known of models is a large table, read from disk at first.
        room = await asyncio.to_thread(agent.room, model_name)

        async def read(
            tx: Transaction,
        ) -> tuple[Conversation, list[journal.StoredStep], list[journal.StoredCall], list[Entry], str]:
            steps, calls = await journal.load(tx, claim.run_id) if replay else ([], [])
            # Up to where its first step had read; what it heard later joins before the step that first saw it.
            read_to = steps[0].read_to if steps else claim.read_to
            conversation, triggers = await sessionlog.context_entries(
                tx,
                session_id=claim.session_id,
                run_id=claim.run_id,
                read_to=read_to,
                room=room * BYTES_OF_A_TOKEN,
            )
            if claim.prompt is not None:
                triggers = [*triggers, sessionlog.private_entry(claim.session_id, claim.agent, claim.prompt)]
            later = await steering.heard(tx, claim.run_id, claim.session_id, after=read_to) if steps else []
            attached = await rosters.roster(tx, claim.session_id)
            lead = next((attachment.agent for attachment in attached if attachment.lead), None)
            note = room_note(agent.name, [attachment.agent for attachment in attached], lead)
            return conversation_of(agent.name, conversation, triggers), steps, calls, later, note

        conversation, steps, calls, later, note = await surely(self._database, claim.run_id, read)
        heard = steering.by_step(later, [stored.read_to for stored in steps])
        # What the rows say can take away from what the agent's definition gives, and add nothing to it.
        return RunContext(
            run_id=claim.run_id,
            session_id=claim.session_id,
            agent=agent,
            model=self._model(model_name),
            model_name=model_name,
            journal=run_journal,
            threads=self._threads,
            conversation=conversation,
            room=room,
            room_note=note,
            max_steps=min(claim.max_steps or agent.max_steps, agent.max_steps),
            depth_left=agent.max_depth if claim.depth_left is None else min(claim.depth_left, agent.max_depth),
            scope=claim.scope or (),
            limited=run_journal.limited,
            steps={stored.step: stored.turn for stored in steps},
            calls={
                (call.step, call.ordinal): Record(call.outcome, call.answer, call.waiting, call.started, call.digest)
                for call in calls
            },
            heard={step: list(spoken(entries)) for step, entries in heard.items()},
            stopping=self._give_back_at,
            egress=self._egress,
            shutdown=self._stopping,
        )

    def _model(self, name: str) -> ChatModel:
        """One per process and name, so that its clients are shared."""
        if name not in self._models:
            self._models[name] = resolve_model(name)
        return self._models[name]


def _model_name(agent: Agent, claim: Claim) -> str:
    """The model that the run asks."""
    own = agent.model if claim.model is None else claim.model
    return own if claim.cause != "compaction" or agent.compaction_model is None else agent.compaction_model
