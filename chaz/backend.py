"""Celery's view of runs: a result backend that only reads, so that ``AsyncResult(run_id, app=chaz.celery.app)`` works.

It is the application's backend unless ``celeryconfig.py`` names another; beside another one it is
``AsyncResult(run_id, backend=chaz.backend.Backend(app))``. Nothing can be stored in it: a run's row is its result, and
what other tasks of the application return is dropped. Tasks that need their results, and chords, need a backend of
their own.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn
from uuid import UUID

from celery import Celery, states
from celery.backends.base import BaseBackend
from celery.exceptions import TaskRevokedError
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult

from chaz.channels import task_name
from chaz.database import Row
from chaz.errors import ChazError, DatabaseUnavailable, RunCancelled, RunFailed, UnknownRun, WaitTimeout
from chaz.outcomes import RunState
from chaz.producer import Chaz
from chaz.result import AgentResult, outcome_of
from chaz.settings import Settings, without_secrets
from chaz.waiter import NOBODY

STATES: dict[RunState, str] = {
    "pending": states.PENDING,
    "queued": states.PENDING,
    "running": states.STARTED,
    "parked": states.RETRY,
    "succeeded": states.SUCCESS,
    "failed": states.FAILURE,
    "cancelled": states.REVOKED,
    "superseded": states.PENDING,
}
"""A run's state in Celery's words. A superseded run answers with the one that took it."""

LOOK_UP = 1.0
"""Seconds after which a wait looks whether Celery has another reason to end it: an earlier task that failed, say."""


class RunRevoked(RunCancelled, TaskRevokedError):
    """The run was cancelled, for code that expects Celery's error. Args: the run's id, the reason, the text."""


class _Here:
    """This process's producer, whichever thread asks. It finds its way over a fork by itself."""

    chaz: Chaz | None = None
    lock = threading.Lock()


def producer() -> Chaz:
    """The producer of Celery's side of this process, by the ``CHAZ_*`` variables."""
    with _Here.lock:
        if _Here.chaz is None:
            _Here.chaz = Chaz.from_env()
            atexit.register(_Here.chaz.close)
        return _Here.chaz


class Backend(BaseBackend):
    """Answers from the runs' rows. An unknown id is PENDING, as everywhere in Celery: its run may be still to come."""

    app: Celery
    persistent = True
    connection_errors = (DatabaseUnavailable,)

    def as_uri(self, include_password: bool = False) -> str:
        """Where the results are, for Celery's banner and report."""
        del include_password
        return without_secrets(Settings.from_env().database_url) or "disabled://"

    def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
        handle = _handle(task_id)
        if handle is not None:
            chaz = producer()
            source = chaz.inner.handle(handle.id)

            async def ask() -> tuple[Row, list[UUID]]:
                return await source.status(), [child.id for child in await source.children()]

            with contextlib.suppress(UnknownRun):
                row, children = chaz.loop.run(ask())
                return _meta(task_id, row) | {
                    "children": [AsyncResult(str(child), backend=self, app=self.app) for child in children]
                }
        return {"task_id": task_id, "status": states.PENDING, "result": None}

    def wait_for(
        self,
        task_id: str,
        timeout: float | None = None,
        interval: float = 0.5,
        no_ack: bool = True,
        on_interval: Callable[[], object] | None = None,
    ) -> dict[str, Any]:
        """Wait as the handle does, on the process's one LISTEN. Raises Celery's TimeoutError, and WaitInsideRun."""
        del interval, no_ack
        handle = _handle(task_id)
        ends = None if timeout is None else time.monotonic() + timeout
        while True:
            left = LOOK_UP if ends is None else max(0.0, min(LOOK_UP, ends - time.monotonic()))
            try:
                if handle is not None:
                    handle.wait(left)
                    return self.get_task_meta(task_id)
                time.sleep(left)
            except WaitTimeout:
                pass
            if on_interval is not None:
                on_interval()
            if ends is not None and time.monotonic() >= ends:
                raise CeleryTimeoutError(f"task {task_id} is not ready after {timeout:g} s; it goes on")

    def store_result(self, task_id: str, result: Any, state: str, *args: Any, **kwargs: Any) -> Any:
        """Do nothing: a run's end is written by its worker, in one transaction."""
        del task_id, state, args, kwargs
        return result

    def _forget(self, task_id: str) -> None:
        """A run's row stays; Celery drops what it has cached of it."""

    def ensure_chords_allowed(self) -> NoReturn:
        """Refuse a chord: it counts results that nobody stores."""
        raise NotImplementedError(
            "a chord needs a result backend that stores results; set result_backend in celeryconfig.py"
        )

    def _save_group(self, group_id: str, result: Any) -> NoReturn:
        raise NotImplementedError(
            "chaz's result backend stores no groups; set result_backend in celeryconfig.py to one that does"
        )


def _handle(task_id: str) -> AgentResult | None:
    """The handle of a task that may be a run, now or later; None for an id that no run ever has."""
    try:
        return producer().handle(UUID(task_id), uncommitted=True)
    except ValueError:
        return None


def _meta(task_id: str, row: Row) -> dict[str, Any]:
    """What Celery knows of a task, of a row of :func:`chaz.runs.status`."""
    state = states.SUCCESS if row["state"] == NOBODY else STATES[row["state"]]
    result: object = None
    traceback: str | None = None
    try:
        if state in states.READY_STATES:
            result = outcome_of(row)
        elif state == states.RETRY:
            result = f"parked: waits for {row['waits_for']}"
    except RunFailed as error:
        result, traceback = error, _as_traceback(error)
    except RunCancelled as error:
        result = RunRevoked(*error.args)
        traceback = _as_traceback(result)
    return {
        "task_id": task_id,
        "status": state,
        "result": result,
        "traceback": traceback,
        "name": task_name(row["agent"]) if row["agent"] else None,
        "date_done": row["ended_at"],
        "retries": max(0, row["attempt"] - 1),
    }


def _as_traceback(error: ChazError) -> str:
    """The error's text, as Python ends a traceback. What was raised where is in the worker's log."""
    return f"{type(error).__module__}.{type(error).__qualname__}: {error}"
