"""The Celery application: ``celery -A chaz worker``, ``celery -A chaz flower``.

chaz's own settings are defaults; a ``celeryconfig`` module in the working directory (or named by
``CELERY_CONFIG_MODULE``, as for any Celery application) overrides them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from celery import Celery
from kombu.exceptions import OperationalError

from chaz.broker import run_queue, transport_options
from chaz.channels import broker_name, task_name
from chaz.errors import BrokerUnavailable, ChazError, ConfigurationError
from chaz.runs import Publication
from chaz.settings import Settings, without_secrets

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def make_app(settings: Settings) -> Celery:
    """The application of these settings."""
    prefix = settings.broker_prefix
    app = Celery("chaz", include=["chaz.tasks"], set_as_current=False)
    app.add_defaults(
        lambda: {
            "broker_url": settings.broker_url,
            "broker_transport_options": transport_options(settings),
            "broker_connection_retry_on_startup": True,
            # Agents wait on models and tools, not on the CPU.
            "worker_pool": "threads",
            "worker_concurrency": 100,
            # One per slot: a busy machine hoards nothing that an idle one could start.
            "worker_prefetch_multiplier": 1,
            "task_acks_late": True,
            # The run's row is its result; Celery stores none.
            "task_ignore_result": True,
            "task_serializer": "json",
            "accept_content": ["json"],
            "result_accept_content": ["json"],
            # One form of line for all processes of chaz.
            "worker_log_format": LOG_FORMAT,
            "worker_task_log_format": LOG_FORMAT,
            "worker_send_task_events": True,
            "worker_enable_remote_control": True,
            # Every name on the broker takes the prefix.
            "task_default_queue": broker_name(prefix, "default"),
            "task_default_exchange": broker_name(prefix, "default"),
            "task_default_exchange_type": "topic",
            "task_default_queue_type": "quorum",
            "control_exchange": broker_name(prefix, "control"),
            "event_exchange": broker_name(prefix, "events"),
            "event_queue_prefix": broker_name(prefix, "events"),
            "enable_utc": True,
        }
    )
    module = os.environ.get("CELERY_CONFIG_MODULE", "celeryconfig")
    if importlib.util.find_spec(module) is not None:
        app.config_from_object(module)
    return app


def publisher(app: Celery, settings: Settings) -> Callable[[Sequence[Publication]], None]:
    """A function that puts runs on their agents' queues; it blocks, and raises BrokerUnavailable."""

    def publish(publications: Sequence[Publication]) -> None:
        try:
            with app.producer_pool.acquire(block=True) as producer:
                for publication in publications:
                    _send(producer, publication)
        except (OperationalError, OSError) as error:
            raise BrokerUnavailable(without_secrets(settings.broker_url), str(error)) from error

    def _send(producer: Any, publication: Publication) -> None:
        delivery = publication.delivery
        app.send_task(
            task_name(delivery.agent),
            kwargs=delivery.model_dump(mode="json"),
            task_id=str(delivery.run),
            parent_id=str(delivery.parent) if delivery.parent else None,
            queue=cast("str", run_queue(settings.broker_prefix, publication.queue)),
            producer=producer,
            ignore_result=True,
            # What Flower shows: never a prompt, never a secret.
            argsrepr=f"{delivery.agent} {delivery.session}",
            kwargsrepr="",
            retry_policy={"max_retries": 2, "interval_start": 0.1, "interval_step": 0.2},
        )

    return publish


def end_program(error: ChazError) -> NoReturn:
    """Say what is wrong in one line, and end with the error's code."""
    print(f"chaz: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code)


def _settings() -> Settings:
    try:
        return Settings.from_env()
    except ConfigurationError as error:
        # Celery's command line would show a traceback of its own import machinery.
        if "celery" in Path(sys.argv[0]).parts[-2:]:
            end_program(error)
        raise


settings = _settings()
app = make_app(settings)
