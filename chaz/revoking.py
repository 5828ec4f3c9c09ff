"""Celery's revoke and terminate, heard on its control exchange by listeners and workers, as cancellations.

``celery control revoke ID`` and Flower's buttons only tell who is there at that moment. Whoever hears it writes the
cancellation, so that one is enough; from then on it holds, whatever stops.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast
from uuid import UUID, uuid4

from celery import Celery
from celery.utils.functional import maybe_list
from celery.worker import control

from chaz import cancelling
from chaz.broker import connect
from chaz.database import Database
from chaz.errors import ChazError, DatabaseUnavailable, UnknownRun
from chaz.loops import loop_thread
from chaz.settings import Settings, without_secrets

logger = logging.getLogger("chaz.revoke")

BY = "celery"
LONGEST_PAUSE = 5.0

Revoked = Callable[[Iterable[str], str], None]
"""Takes ids that Celery was told to revoke, and in which word."""


def cancel_revoked(settings: Settings, ids: Iterable[str], how: str) -> None:
    """Cancel the runs among these ids, for as long as it takes to reach PostgreSQL. Never blocks."""
    runs = [run for id in ids if (run := _run_id(id)) is not None]
    if runs:
        loop_thread().submit(_cancel(settings, runs, how))


def _run_id(id: str) -> UUID | None:
    try:
        return UUID(id)
    except ValueError:
        return None


async def _cancel(settings: Settings, runs: list[UUID], how: str) -> None:
    # Opened for this alone: it is rare, and a prefork pool's children must not inherit a connection.
    database = Database(settings.database_url, size=1, name="chaz-revoke", silence=settings.database_silence)
    pause = 0.1
    try:
        while runs:
            try:
                asked = await database.transact(partial(cancelling.request, run_id=runs[0], by=BY, reason=how))
                logger.info("revoke: run=%s %s (%s)", runs.pop(0), "is to be cancelled" if asked else "is over", how)
            except UnknownRun:
                logger.debug("revoke: %s is no run", runs.pop(0))
            except DatabaseUnavailable as error:
                logger.warning("revoke: run=%s cannot be cancelled yet (%s); trying again", runs[0], error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
    except Exception:
        logger.exception("revoke: %d runs could not be cancelled", len(runs))
    finally:
        await database.close()


def hear_in_worker(revoked: Revoked) -> None:
    """Have the worker's own commands ``revoke`` and ``terminate`` cancel runs.

    Celery still keeps the ids and drops their deliveries. Only a prefork pool has something to terminate: a process.
    """
    commands = cast("dict[str, Any]", control.Panel.data)
    celerys_own = commands["revoke"]

    def revoke(state: Any, task_id: Any, terminate: bool = False, signal: Any = None, **besides: Any) -> Any:
        revoked(_ids(task_id), "terminated" if terminate else "revoked")
        kills = terminate and "prefork" in type(state.consumer.pool).__module__
        return celerys_own(state, task_id, terminate=kills, signal=signal, **besides)

    def terminate(state: Any, signal: Any, task_id: Any, **besides: Any) -> Any:
        return revoke(state, task_id, terminate=True, signal=signal, **besides)

    commands.update(revoke=revoke, terminate=terminate)


def _ids(task_id: Any) -> list[str]:
    return [str(id) for id in maybe_list(task_id) or []]


class RevokeEar:
    """A listener's place on Celery's control exchange, in a thread. It answers to revoke and terminate only."""

    def __init__(self, app: Celery, settings: Settings, revoked: Revoked) -> None:
        self._app = app
        self._settings = settings
        self._revoked = revoked
        self._name = f"chaz-listener-{uuid4().hex[:8]}@{socket.gethostname()}"
        self._commands = {"revoke": self._revoke, "terminate": self._terminate}
        self._stopping = threading.Event()
        self._heard_once = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaz-revoke", daemon=True)

    def open(self, timeout: float = 5.0) -> None:
        """Begin to listen; wait ``timeout`` seconds at most until it does."""
        self._thread.start()
        self._heard_once.wait(timeout)

    def close(self, timeout: float = 3.0) -> None:
        """Listen no more."""
        self._stopping.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        pause = 0.1
        while not self._stopping.is_set():
            try:
                with connect(self._settings) as connection:
                    mailbox: Any = cast("Any", self._app.control).mailbox(connection)
                    node = mailbox.Node(self._name, channel=connection.channel(), handlers=self._commands)
                    consumer = node.listen(callback=partial(self._received, node))
                    self._heard_once.set()
                    pause = 0.1
                    while not self._stopping.is_set():
                        try:
                            connection.drain_events(timeout=0.5)
                        except TimeoutError:
                            connection.heartbeat_check()
                    consumer.cancel()
            except Exception as error:
                # Each transport has its own errors.
                expected = isinstance(error, (OSError, ChazError, *connect(self._settings).connection_errors))
                logger.warning(
                    "listener: not on the control exchange at %s (%s); trying again",
                    without_secrets(self._settings.broker_url),
                    error,
                    exc_info=not expected,
                )
                self._stopping.wait(pause)
                pause = min(pause * 2, LONGEST_PAUSE)

    def _received(self, node: Any, body: Any, message: Any) -> None:
        # To all others workers answer. This is none, and must not look like one.
        if isinstance(body, dict) and cast("dict[str, Any]", body).get("method") in self._commands:
            node.handle_message(body, message)

    def _revoke(self, _: Any, task_id: Any, terminate: bool = False, **besides: Any) -> dict[str, str]:
        ids = _ids(task_id)
        self._revoked(ids, "terminated" if terminate else "revoked")
        return {"ok": f"runs among {', '.join(ids)} are cancelled"}

    def _terminate(self, _: Any, task_id: Any, **besides: Any) -> dict[str, str]:
        return self._revoke(_, task_id, terminate=True)
