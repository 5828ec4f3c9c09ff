"""One asyncio loop in a thread of its own, per process, for code that is not async itself.

Made when first asked for, and again after a fork: neither a thread nor a socket of the loop survives one.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """A running loop and its daemon thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="chaz-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine to its end; an interrupt (Ctrl-C) cancels it. Not callable on the loop itself."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("this would wait for the loop on the loop; use AsyncChaz in async code")
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


_lock = threading.Lock()
_current: LoopThread | None = None


def _forget_after_fork() -> None:
    global _lock, _current
    _lock, _current = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_after_fork)


def loop_thread() -> LoopThread:
    """This process's loop thread."""
    global _current
    with _lock:
        if _current is None:
            _current = LoopThread()
        return _current
