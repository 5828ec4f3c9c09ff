"""The Celery application: ``celery -A chaz worker``, ``celery -A chaz flower``.

chaz's own settings are defaults; a ``celeryconfig`` module in the working directory (or named by
``CELERY_CONFIG_MODULE``, as for any Celery application) overrides them.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast
from uuid import UUID

from celery import Celery
from celery.canvas import Signature
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError

from chaz.broker import SEND_WITHIN, default_queue, forgets_bindings, run_queue, transport_options
from chaz.callbacks import TaskCallback
from chaz.channels import DEFAULT, STEP, broker_name, task_name
from chaz.deliveries import RunDelivery
from chaz.entries import derived_id
from chaz.errors import ChazError, ConfigurationError
from chaz.outbox import End
from chaz.runs import Publication
from chaz.sender import Link, Sender
from chaz.settings import Settings
from chaz.teller import Settled

logger = logging.getLogger("chaz.listener")

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def make_app(settings: Settings) -> Celery:
    """The application of these settings."""
    prefix = settings.broker_prefix
    app = Celery("chaz", include=["chaz.tasks", "chaz.steps"], set_as_current=False)
    defaults: dict[str, Any] = {
        "broker_url": settings.broker_url,
        "broker_transport_options": transport_options(settings),
        "broker_connection_retry_on_startup": True,
        # RabbitMQ closes the channel of a delivery that is not acknowledged in time; the worker is to open another one.
        "broker_channel_error_retry": True,
        # Agents wait on models and tools, not on the CPU.
        "worker_pool": "threads",
        "worker_concurrency": 100,
        # One per slot: a busy machine hoards nothing that an idle one could start.
        "worker_prefetch_multiplier": 1,
        "task_acks_late": True,
        # The run's row is its result; Celery stores none, and reads it there.
        "task_ignore_result": True,
        "result_backend": "chaz.backend:Backend",
        "task_serializer": "json",
        "accept_content": ["json"],
        "result_accept_content": ["json"],
        # One form of line for all processes of chaz.
        "worker_log_format": LOG_FORMAT,
        "worker_task_log_format": LOG_FORMAT,
        "worker_send_task_events": True,
        "worker_enable_remote_control": True,
        # Every name on the broker takes the prefix.
        "task_default_queue": broker_name(prefix, DEFAULT),
        # A misspelt `-Q` is a mistake, not a new queue.
        "task_create_missing_queues": False,
        "task_default_exchange": broker_name(prefix, DEFAULT),
        "task_default_routing_key": broker_name(prefix, DEFAULT),
        "task_queues": [default_queue(prefix)],
        "task_default_exchange_type": "topic",
        "task_default_queue_type": "quorum",
        # Not exclusive: a worker may start under the name of one that still drains. Transient queues that are not are
        # deprecated.
        "control_queue_exclusive": False,
        "control_queue_durable": True,
        "control_exchange": broker_name(prefix, "control"),
        "event_exchange": broker_name(prefix, "events"),
        "event_queue_prefix": broker_name(prefix, "events"),
        "enable_utc": True,
    }
    module = os.environ.get("CELERY_CONFIG_MODULE", "celeryconfig")
    if _is_there(module):
        app.config_from_object(module)
        # Celery lets defaults that are added win over the module, so only what it leaves open is added.
        chosen = vars(importlib.import_module(module))
        # These one by one: without its key prefix, a worker would look for deliveries where nobody puts them.
        options = defaults["broker_transport_options"] | chosen.get("broker_transport_options", {})
        defaults = {name: value for name, value in defaults.items() if name not in chosen}
        defaults["broker_transport_options"] = options
    app.add_defaults(lambda: defaults)
    return app


def _is_there(module: str) -> bool:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found and "CELERY_CONFIG_MODULE" in os.environ:
        raise ConfigurationError(f"CELERY_CONFIG_MODULE names {module!r}, and there is no such module")
    return found


def outlive_lost_redis_connections() -> None:
    """Let what reaches for a Redis connection that has gone meet a ConnectionError, which Celery and Kombu expect.

    Celery 5.7 takes the transport from a lost connection, then closes its channels; those give back what is not
    acknowledged. Without this the AttributeError of Kombu 5.7 over the missing transport would end the consumer.
    """
    channel: Any = importlib.import_module("kombu.transport.redis").Channel
    connection_parameters = channel._connparams

    def checked(self: Any, asynchronous: bool = False) -> Any:
        if self.connection is None or self.connection.client is None:
            raise ConnectionError("the connection to the broker has gone") from None
        return connection_parameters(self, asynchronous)

    channel._connparams = checked


class RunPublisher:
    """Puts runs on their agents' queues, from a thread of its own: ``publish`` never blocks.

    A run whose delivery is lost on the way is published again when its bell is due.
    """

    def __init__(self, app: Celery, settings: Settings) -> None:
        self._app = app
        self._prefix = settings.broker_prefix
        self._sender = Sender("listener", settings, self._send, batch=100)

    def publish(self, publications: Sequence[Publication]) -> None:
        """Hand runs over."""
        self._sender.put(publications)

    def close(self, timeout: float = 5.0) -> None:
        """Send what was handed over, for ``timeout`` seconds at most, and stop."""
        self._sender.close(timeout)

    def _send(self, link: Link, publications: Sequence[Publication]) -> None:
        for publication in publications:
            delivery = publication.delivery
            try:
                self._send_one(link, delivery, run_queue(self._prefix, publication.queue))
            except link.refusals as error:
                # One agent's queue (declared by somebody else in another way, say) must not hold up the others.
                logger.error("agent %s cannot be published to: %s", delivery.agent, error)
                link.renew()
                continue
            logger.info("published run=%s agent=%s session=%s", delivery.run, delivery.agent, delivery.session)

    def _send_one(self, link: Link, delivery: RunDelivery, queue: Queue) -> None:
        # Celery takes a direct exchange for the queue itself.
        where: dict[str, Any] = {"exchange_type": "direct", "declare": []} if link.by_queue else {}
        self._app.send_task(
            task_name(delivery.agent),
            kwargs=delivery.model_dump(mode="json"),
            task_id=str(delivery.run),
            parent_id=str(delivery.parent) if delivery.parent else None,
            queue=cast("str", queue),
            producer=link.producer,
            ignore_result=True,
            # What Flower shows: never a prompt, never a secret.
            argsrepr=f"{delivery.agent} {delivery.session}",
            kwargsrepr="",
            retry=False,
            confirm_timeout=SEND_WITHIN,
            **where,
        )


class CallbackSender:
    """Sends the Celery tasks that are told of ends, from a thread of its own, on chaz's broker and under its prefix.

    Tasks are sent by name: to the queue that the signature names, else to Celery's default one.
    """

    def __init__(self, app: Celery, settings: Settings) -> None:
        self._app = app
        self._sender = Sender[tuple[End, Settled]]("listener", settings, self._send, batch=100)

    def send(self, ends: Sequence[End], settled: Settled) -> None:
        """Hand ends over."""
        self._sender.put([(end, settled) for end in ends])

    def close(self, timeout: float = 5.0) -> None:
        """Send what was handed over, for ``timeout`` seconds at most, and stop."""
        self._sender.close(timeout)

    def _send(self, link: Link, ends: Sequence[tuple[End, Settled]]) -> None:
        for end, settled in ends:
            try:
                for number, (signature, argument) in enumerate(_called(end)):
                    self._call(link, signature, argument, derived_id("callback", str(end.entry), str(number)))
            except link.refusals as error:
                link.renew()
                settled(end, f"the broker refuses it: {error}")
            except (OperationalError, OSError):
                # The connection, not this task: the same is sent again over a new one.
                raise
            except Exception as error:
                settled(end, f"{type(error).__name__}: {error}")
            else:
                settled(end, None)

    def _call(self, link: Link, signature: dict[str, Any], argument: str | None, id: UUID) -> None:
        called: Any = self._app.signature(signature)
        options: dict[str, Any] = {"producer": link.producer, "retry": False}
        if not signature["task"].startswith("celery."):
            # A second delivery has the same id.
            options |= {"task_id": called.options.get("task_id") or str(id), "confirm_timeout": SEND_WITHIN}
            options |= self._way(link, called.options.get("queue"))
        called.apply_async((argument,), **options)

    def _way(self, link: Link, queue: object) -> dict[str, Any]:
        """How to send to a queue that the application may not know: by its name, and only if it is there."""
        if not isinstance(queue, str) or queue in self._app.amqp.queues:
            # Celery takes a direct exchange for the queue itself.
            return {"exchange_type": "direct", "declare": []} if link.by_queue else {}
        if not link.by_queue:
            link.require(queue)
        return {"queue": Queue(queue, Exchange("")), "declare": []}


def _called(end: End) -> list[tuple[dict[str, Any], str | None]]:
    """The signatures to call, each with its argument."""
    assert isinstance(end.target, TaskCallback)
    if not end.succeeded:
        return [(signature, str(end.entry)) for signature in end.target.failure]
    return [] if end.target.success is None else [(end.target.success, end.result)]


def agent_step(
    agent: str, instruction: str | None = None, *, session: str | None = None, timeout: float | None = None
) -> Signature[Any]:
    """An agent's run as a step of a chain: ``chain(fetch.s(url), agent_step("reader", "Summarise this."), store.s())``.

    What the step before it returned is the instruction, or stands below it; the next step gets the answer. It holds no
    worker: the step sends a directive (to the session of this name, or to a fresh one) and the run takes its place in
    Celery, under the same task id; its end sends what follows. Where the run fails or is cancelled, the chain's
    ``link_error`` tasks are called with its id, and nothing follows. It cannot be a part of a chord's header.
    """
    options = {"agent": agent, "instruction": instruction, "session": session, "timeout": timeout}
    return app.signature(STEP, kwargs={name: value for name, value in options.items() if value is not None})


def end_program(error: ChazError) -> NoReturn:
    """Say what is wrong in one line, and end with the error's code."""
    print(f"chaz: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code)


try:
    settings = Settings.from_env()
    if forgets_bindings(settings):
        outlive_lost_redis_connections()
    app = make_app(settings)
    if "celery" in Path(sys.argv[0]).parts[-2:]:
        # Flower asks for results of the current application, from any thread.
        app.set_default()
except ConfigurationError as error:
    # Celery's command line would show a traceback of its own import machinery.
    if "celery" in Path(sys.argv[0]).parts[-2:]:
        end_program(error)
    raise
