"""A worker's ear for runs that were ended from outside, so that it stops them within moments.

Nothing relies on it: a beat finds what was missed, and no write of a run that is over is taken.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from uuid import UUID

from chaz.channels import ABORT
from chaz.database import Subscription
from chaz.errors import DatabaseUnavailable
from chaz.settings import Settings

logger = logging.getLogger("chaz.worker")

WAIT = 60.0
"""Seconds after which a silent connection is asked whether it still lives."""


class AbortEar:
    """Calls ``abort`` with the id of each run that was ended from outside, whoever ran it. On one loop."""

    def __init__(self, settings: Settings, abort: Callable[[UUID], None]) -> None:
        self._subscription = Subscription(
            settings.listen_url or settings.database_url,
            [ABORT],
            name="chaz-abort",
            silence=settings.database_silence,
        )
        self._pause = settings.beat
        self._abort = abort
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin to listen, and go on whenever the connection was lost."""
        self._task = asyncio.get_running_loop().create_task(self._listen())

    async def close(self) -> None:
        """Listen no more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        await self._subscription.close()

    async def _listen(self) -> None:
        while True:
            try:
                await self._subscription.connect()
                while True:
                    for payload in await self._subscription.wait(WAIT):
                        self._heard(payload)
                    await self._subscription.probe()
            except DatabaseUnavailable as error:
                logger.debug("worker: not told of ends from outside (%s); beats find them", error)
            except Exception:
                logger.exception("worker: not told of ends from outside; beats find them")
            await asyncio.sleep(self._pause)

    def _heard(self, payload: str) -> None:
        try:
            run_id = UUID(payload)
        except ValueError:
            # Anybody may notify anything.
            return
        self._abort(run_id)
