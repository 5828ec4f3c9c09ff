"""The Celery tasks ``chaz.agent.<name>``, one per agent that this worker serves, and the worker's start and stop."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from datetime import timedelta
from functools import partial
from typing import Any

from celery import Task, signals
from celery.exceptions import Ignore, Retry
from pydantic import ValidationError

from chaz import schedules
from chaz.broker import check, declare, run_queue
from chaz.celery import app, end_program, settings
from chaz.channels import ISOLATION, broker_name, task_name
from chaz.database import Database, Transaction
from chaz.deliveries import RunDelivery
from chaz.errors import ChazError, DatabaseUnavailable
from chaz.revoking import cancel_revoked, hear_in_worker
from chaz.runs import Served, register_agents
from chaz.runtime.agents import Agents, load_agents
from chaz.runtime.egress import Egress
from chaz.runtime.models import resolve_model
from chaz.schema import require_current
from chaz.settings import without_secrets
from chaz.worker import Cancelled, LetGo, WorkerProcess

logger = logging.getLogger("chaz.worker")


class LeftTheWorker(Retry):
    """The run is parked or was given back, and comes again by itself. Flower shows RETRY and this repr."""

    def __repr__(self) -> str:
        return self.message or ""


class _Here:
    """What this process has: the agents it loaded at its start, and its worker process, made when first needed."""

    agents: Agents | None = None
    process: WorkerProcess | None = None
    pid = 0
    name = "worker"
    draining: threading.Thread | None = None
    lock = threading.Lock()
    parent_pipe: tuple[int, int] | None = None
    """Made before a prefork pool's children; they read its end when the parent is asked to stop, or has gone.

    A ``multiprocessing.Event`` would hang in its ``set`` over a child that was killed in its ``wait``.
    """

    @classmethod
    def worker(cls) -> WorkerProcess:
        with cls.lock:
            if cls.process is None or cls.pid != os.getpid():
                assert cls.agents is not None
                process = WorkerProcess(settings, cls.agents, name=cls.name, isolation=serves_isolation())
                process.start()
                cls.process, cls.pid = process, os.getpid()
            return cls.process


def serves_isolation() -> bool:
    """Whether this worker consumes the queue of suspect runs."""
    return broker_name(settings.broker_prefix, ISOLATION) in app.amqp.queues.consume_from


class AgentTask(Task[Any, None]):
    """One delivery of a run. The delivery's run id alone is believed."""

    abstract = True
    agent: str

    def run(self, *positional: Any, **delivery: Any) -> None:
        """Claim the run and bring it as far as it goes."""
        try:
            run_id = RunDelivery.model_validate(positional[0] if positional else delivery).run
        except ValidationError as error:
            logger.warning("a delivery for agent=%s is not a run's: %s", self.agent, str(error).splitlines()[0])
            return
        try:
            came_to = _Here.worker().execute(self.agent, run_id)
        except DatabaseUnavailable as error:
            # Nothing is lost: the run is queued still, or its lease is read back at the next beat.
            came_to = LetGo(str(error))
        if isinstance(came_to, LetGo):
            # Committed already. This only says so to Flower; nothing is published by it.
            raise LeftTheWorker(came_to.why)
        if isinstance(came_to, Cancelled):
            # So that Flower shows REVOKED, and neither SUCCESS nor STARTED for ever.
            self.send_event("task-revoked", terminated=True, signum=None, expired=False)
            raise Ignore(came_to.why)


@signals.celeryd_init.connect
def load(sender: str, conf: Any, **_: object) -> None:
    """Load the agents, check what they need, and consume their queues. A mistake ends the worker with one line."""
    # As for `chaz worker`; Celery itself has the working directory on the path only while it imports the application.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        database_url = settings.require_database()
        agents = load_agents(settings.agents, settings.tool_policies)
        for agent in agents.values():
            resolve_model(agent.model)
            if agent.compaction_model is not None:
                resolve_model(agent.compaction_model)
        Egress(settings.secrets)
        check(settings)
        asyncio.run(_register(database_url, agents))
    except ChazError as error:
        # Celery swallows what a signal's receiver raises, but for a SystemExit.
        end_program(error)
    _Here.agents, _Here.name = agents, sender
    _Here.parent_pipe = os.pipe()
    for agent in agents.values():
        task = type(f"AgentTask_{agent.name}", (AgentTask,), {"name": task_name(agent.name), "agent": agent.name})
        app.register_task(task())
    queues = sorted({agent.queue for agent in agents.values()} | {ISOLATION})
    # Besides what Celery's own tasks are on: chaz's default queue, or what celeryconfig.py names.
    conf.task_queues = [*conf.task_queues, *(run_queue(settings.broker_prefix, queue) for queue in queues)]
    hear_in_worker(partial(cancel_revoked, settings))
    # The isolation queue is served by who names it with -Q, and by nobody else.
    app.amqp.queues.deselect([broker_name(settings.broker_prefix, ISOLATION)])


@signals.celeryd_after_setup.connect
def declare_queues(**_: object) -> None:
    """Declare what is consumed. A broker that refuses a queue, for which Celery would try for ever, ends the worker."""
    # The isolation queue besides: Celery binds all queues that it knows, and calls one that is not there critical.
    isolation = run_queue(settings.broker_prefix, ISOLATION)
    try:
        declare(settings, [*app.amqp.queues.consume_from.values(), isolation])
    except ChazError as error:
        end_program(error)


async def _register(url: str, agents: Agents) -> None:
    database = Database(url, size=1, name="chaz-worker")
    try:
        await require_current(await database.open())

        async def work(tx: Transaction) -> None:
            await register_agents(
                tx,
                [
                    Served(
                        name=agent.name,
                        queue=agent.queue,
                        version=agent.version,
                        max_steps=agent.max_steps,
                        timeout=timedelta(seconds=agent.timeout),
                        tools=agent.tool_names,
                        models=[agent.model, *agent.models],
                        max_concurrent=agent.max_concurrent,
                    )
                    for agent in agents.values()
                ],
            )
            for name in sorted(agents):
                await schedules.declare(
                    tx, name, agents[name].schedules, tenant=settings.tenant, ceilings=settings.ceilings
                )

        await database.transact(work)
    finally:
        await database.close()


@signals.task_revoked.connect
def dropped(request: Any, terminated: bool = False, expired: bool = False, **_: object) -> None:
    """Celery drops deliveries of an id that was revoked, for hours: its run must not stay queued."""
    if not expired:
        cancel_revoked(settings, [str(request.id)], "terminated" if terminated else "revoked")


@signals.worker_ready.connect
def ready(sender: Any, **_: object) -> None:
    """Take the lease, and say what is served and from where; at Celery's own default level too, which is WARNING."""
    assert _Here.agents is not None
    # The children of a prefork pool take their own: threads and connections must not be forked.
    if "prefork" not in type(sender.pool).__module__:
        start()
    consumed = app.amqp.queues.consume_from
    served = [
        agent.name for agent in _Here.agents.values() if broker_name(settings.broker_prefix, agent.queue) in consumed
    ]
    logger.log(
        logging.INFO if logger.isEnabledFor(logging.INFO) else logging.WARNING,
        "chaz worker ready: agents %s; PostgreSQL %s; broker %s",
        "of suspect runs, alone" if serves_isolation() else ", ".join(served),
        without_secrets(settings.database_url),
        without_secrets(settings.broker_url),
    )


@signals.worker_shutting_down.connect
def drain(**_: object) -> None:
    """A warm shutdown has begun: claim nothing more, let runs come to the end of a step."""
    if _Here.parent_pipe is not None:
        os.close(_Here.parent_pipe[1])
        _Here.parent_pipe = None
    # Not here: this is a signal handler, and a lock may be held by the very thread that it interrupts.
    if _Here.process is not None and _Here.pid == os.getpid():
        _Here.draining = threading.Thread(target=_Here.process.close, name="chaz-drain")
        _Here.draining.start()


@signals.worker_shutdown.connect
def drained(**_: object) -> None:
    """Celery is done; the interpreter must not begin to end while the drain thread still needs its executors."""
    if _Here.draining is not None:
        _Here.draining.join(settings.shutdown_grace + 15)


def start() -> None:
    """Take this process's lease at once, so that others know that it is there."""
    try:
        _Here.worker()
    except DatabaseUnavailable as error:
        logger.warning("worker: %s; trying again with the first delivery", error)


@signals.worker_process_init.connect
def start_child(**_: object) -> None:
    """A child of the prefork pool begins."""
    assert _Here.parent_pipe is not None
    os.close(_Here.parent_pipe[1])
    start()
    threading.Thread(target=_close_with_the_parent, name="chaz-drain", daemon=True).start()


def _close_with_the_parent() -> None:
    """Celery tells children of a warm shutdown only after their task: what it runs would never come to stop."""
    assert _Here.parent_pipe is not None
    read_end, _ = _Here.parent_pipe
    while os.read(read_end, 1):
        pass
    close()


@signals.worker_process_shutdown.connect
def close(**_: object) -> None:
    """A child of the prefork pool ends."""
    if _Here.process is not None and _Here.pid == os.getpid():
        _Here.process.close()
