"""Tells of ends: a listener takes what is due from the outbox and hands it to threads, so that no round waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

from chaz import outbox, webhooks
from chaz.callbacks import Webhook
from chaz.database import Database
from chaz.errors import ChazError
from chaz.outbox import End
from chaz.settings import Settings

logger = logging.getLogger("chaz.listener")

THREADS = 8
"""Webhooks at once: a receiver that hangs holds one of them until its time is over."""

Settled = Callable[[End, str | None], None]
"""Says, from any thread, that an end has been told, or with what error it has not."""
SendTasks = Callable[[Sequence[End], Settled], None]
"""Hands over ends whose targets are Celery tasks. Never blocks."""


def send_nothing(ends: Sequence[End], settled: Settled) -> None:
    """For a listener without a Celery application."""
    for end in ends:
        settled(end, "this listener sends no tasks")


class Teller:
    """Of one listener, on its loop."""

    def __init__(self, settings: Settings, database: Database, send_tasks: SendTasks) -> None:
        self._secret = settings.webhook_secret
        self._database = database
        self._send_tasks = send_tasks
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="chaz-webhook")
        self._on_their_way: set[UUID] = set()
        self._settling: set[asyncio.Task[None]] = set()

    async def tell(self) -> bool:
        """Take what is due and send it on its way; whether there was anything."""
        ends = await outbox.take(self._database, without=self._on_their_way)
        self._on_their_way |= {end.entry for end in ends}
        loop = asyncio.get_running_loop()

        def settled(end: End, error: str | None) -> None:
            loop.call_soon_threadsafe(self._start_settling, end, error)

        for end in ends:
            if isinstance(end.target, Webhook):
                self._threads.submit(self._post, end, settled)
        if tasks := [end for end in ends if not isinstance(end.target, Webhook)]:
            self._send_tasks(tasks, settled)
        return bool(ends)

    def close(self) -> None:
        """Start nothing more; what is on its way is told again by another listener."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _post(self, end: End, settled: Settled) -> None:
        try:
            webhooks.post(end, self._secret)
        except (ChazError, OSError, ValueError) as error:
            settled(end, f"{type(error).__name__}: {error}")
        except Exception as error:
            logger.exception("listener: the webhook of run=%s cannot be sent", end.entry)
            settled(end, f"{type(error).__name__}: {error}")
        else:
            settled(end, None)

    def _start_settling(self, end: End, error: str | None) -> None:
        task = asyncio.create_task(self._settle(end, error))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(self, end: End, error: str | None) -> None:
        try:
            if error is None:
                await outbox.told(self._database, end.entry)
                logger.info("told of the end of run=%s by %s", end.entry, end.target.kind)
            elif await outbox.not_told(self._database, end.entry, error):
                logger.error("listener: nobody could be told of the end of run=%s, given up: %s", end.entry, error)
            else:
                logger.warning("listener: nobody could be told of the end of run=%s yet: %s", end.entry, error)
        except Exception as lost:
            # It is told again when its time has come.
            logger.warning("listener: whether run=%s has been told of is not stored (%s)", end.entry, lost)
        finally:
            self._on_their_way.discard(end.entry)
