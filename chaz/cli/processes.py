"""``chaz listener``, ``chaz worker`` and ``chaz audit``: the processes of a deployment.

Celery, and with it the application, is imported only by the commands that need it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import signal
import sys
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

from chaz.channels import ISOLATION, broker_name
from chaz.cli.options import add_command, print_json, producer_of, session_target, settings_of
from chaz.database import Database
from chaz.errors import ConfigurationError
from chaz.schema import require_current
from chaz.settings import Settings, without_secrets

if TYPE_CHECKING:
    from chaz.cli.options import Commands

logger = logging.getLogger("chaz")


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the commands."""
    listener = add_command(
        commands, common, "listener", run_listener, "place entries, make runs and publish them; run two or more"
    )
    worker = add_command(
        commands, common, "worker", run_worker, "serve agents: `celery -A chaz worker` by another name"
    )
    audit = add_command(
        commands, common, "audit", run_audit, "record what tools did (run any number); `verify` proves the record"
    )
    audit.add_argument("verb", nargs="?", choices=("verify",), help="count and hash what is recorded, and end")
    audit.add_argument("--session", help="verify this session only: a name or an id")
    audit.add_argument("--json", action="store_true", help="print JSON (verify)")
    for command in (listener, worker, audit):
        command.add_argument("--broker", metavar="URL", help="RabbitMQ, Redis or Valkey (CHAZ_BROKER_URL)")
        command.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    worker.add_argument("--agents", metavar="MODULE", help="module that defines the agents (CHAZ_AGENTS)")
    worker.add_argument("--concurrency", "-c", type=int, metavar="N", help="runs at once (default 100)")
    worker.add_argument("--pool", "-P", choices=("threads", "prefork", "solo"), help="Celery's pool (default threads)")
    worker.add_argument(
        "--isolation", action="store_true", help="serve the runs that may have taken a worker down, one at a time"
    )
    worker.add_argument("--name", "-n", help="Celery's node name, such as worker1@%%h")


def log_to_stderr(level: str) -> None:
    """One line per thing that happens."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("amqp").setLevel("WARNING")
    logging.getLogger("psycopg.pool").setLevel("ERROR")


def export(settings: Settings) -> None:
    """Hand the command line's settings to the Celery application, which reads the environment."""
    os.environ["CHAZ_DATABASE_URL"] = settings.database_url
    os.environ["CHAZ_BROKER_URL"] = settings.broker_url
    os.environ["CHAZ_AGENTS"] = settings.agents


def need_worker_extra() -> None:
    """Raise ConfigurationError unless Celery is installed."""
    try:
        import celery  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ModuleNotFoundError:
        raise ConfigurationError("this process needs Celery; install it with: pip install 'chaz[worker]'") from None


def run_listener(options: argparse.Namespace) -> int:
    """Run until SIGTERM or Ctrl-C."""
    need_worker_extra()
    settings = settings_of(options)
    log_to_stderr(options.log_level)
    asyncio.run(_listen(settings))
    return 0


def listener_database(settings: Settings) -> Database:
    """A listener waits for nobody's lock: what is held now is done in a later round."""
    return Database(
        settings.require_database(),
        size=4,
        name="chaz-listener",
        rings=False,
        lock_timeout="200ms",
        retries=3,
        silence=settings.database_silence,
    )


async def _listen(settings: Settings) -> None:
    database = await listener_database(settings).open()
    try:
        await require_current(database)
        from chaz.audit.publisher import AuditPublisher
        from chaz.broker import check
        from chaz.celery import RunPublisher, make_app
        from chaz.listener import Listener
        from chaz.revoking import RevokeEar, cancel_revoked

        check(settings)
        audit = AuditPublisher(settings)
        app = make_app(settings)
        publisher = RunPublisher(app, settings)
        listener = Listener(settings, database, publisher.publish, audit)
        revokes = RevokeEar(app, settings, partial(cancel_revoked, settings))
        await asyncio.to_thread(revokes.open)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, listener.stop)
        await listener.run(lambda: _say_ready("listener", settings))
        revokes.close()
        publisher.close()
        audit.close()
        logger.info("chaz listener stopped")
    finally:
        await database.close()


def run_audit(options: argparse.Namespace) -> int:
    """Run until SIGTERM or Ctrl-C; or verify."""
    if options.verb == "verify":
        return run_verify(options)
    need_worker_extra()
    settings = settings_of(options)
    log_to_stderr(options.log_level)
    asyncio.run(_check_schema(settings))
    from chaz.audit.consumer import AuditConsumer
    from chaz.broker import check

    check(settings)

    consumer = AuditConsumer(settings)

    def stop(*_: Any) -> None:
        consumer.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    consumer.run(lambda: _say_ready("audit", settings))
    logger.info("chaz audit stopped")
    return 0


def run_verify(options: argparse.Namespace) -> int:
    """Prove that the audit trail is complete and unaltered; exit code 1 unless it is."""
    from chaz.audit import trail

    with producer_of(options) as chaz:
        session_id = None
        if options.session:
            name, id = session_target(options.session)
            session_id = chaz.session(name, id=id).id
        found = chaz.loop.run(trail.verify(chaz.inner.database, session_id))
    if options.json:
        print_json({**dataclasses.asdict(found), "proven": found.proven})
    else:
        print(
            f"{found.runs} ended runs told {found.expected} events: {found.recorded} are recorded, {found.missing} are "
            f"missing, {found.altered} runs' are altered; {found.open_runs} runs are still going"
        )
        for run in found.bad_runs or []:
            print(f"  not proven: run {run}")
    return 0 if found.proven else 1


async def _check_schema(settings: Settings) -> None:
    database = await Database(settings.require_database(), size=1).open()
    try:
        await require_current(database)
    finally:
        await database.close()


def run_worker(options: argparse.Namespace) -> int:
    """Run a Celery worker until SIGTERM or Ctrl-C; its start checks agents, database and broker."""
    need_worker_extra()
    settings = settings_of(options)
    export(settings)
    from chaz.celery import app

    # Celery warns of a worker that runs as root, for the sake of pickle; this one takes JSON only.
    warnings.filterwarnings("ignore", message="You're running the worker with superuser privileges")
    # Quiet: without the banner; one line says what is served.
    arguments = ["--quiet", "worker", "--loglevel", options.log_level]
    if options.isolation:
        # A process of its own for each run, which can be taken down without taking others along.
        options.pool, options.concurrency = "prefork", 1
        arguments += ["--queues", broker_name(settings.broker_prefix, ISOLATION)]
    if options.pool is not None:
        # Celery takes "prefork" on its command line for its default, and the configured pool over it.
        app.conf.worker_pool = options.pool
    for flag, value in (
        ("--concurrency", options.concurrency),
        ("--hostname", options.name),
    ):
        if value is not None:
            arguments += [flag, str(value)]
    app.worker_main(arguments)
    return 0


def _say_ready(process: str, settings: Settings) -> None:
    logger.info(
        "chaz %s ready: PostgreSQL %s; broker %s",
        process,
        without_secrets(settings.database_url),
        without_secrets(settings.broker_url),
    )
