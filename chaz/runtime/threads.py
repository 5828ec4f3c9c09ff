"""Threads for synchronous tools. One that hangs is left behind and counted, and keeps no process from ending."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class ToolThreads:
    """So many threads at once, for one loop. Each call has a daemon thread of its own.

    A ``ThreadPoolExecutor`` would do, but for the end: the interpreter waits for its threads, hung ones too.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.busy = 0
        """Threads that have not come back, hung ones among them."""
        self._slots = asyncio.Semaphore(limit)

    async def reserve(self) -> None:
        """Wait for a thread to be free, and keep it for one :meth:`run`."""
        await self._slots.acquire()
        self.busy += 1

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function that does not raise, on the reserved thread; cancelling the future leaves it running."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def come_back(result: T) -> None:
            self.busy -= 1
            self._slots.release()
            if not future.done():
                future.set_result(result)

        def work() -> None:
            result = function()
            # The loop may have ended long before a function that hung.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(come_back, result)

        threading.Thread(target=work, name="chaz-tool", daemon=True).start()
        return future
