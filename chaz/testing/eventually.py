"""Wait for what other processes do, without sleeping longer than they need."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

__all__ = ["eventually", "eventually_async"]

T = TypeVar("T")


def eventually(check: Callable[[], T], *, within: float = 10.0, every: float = 0.02) -> T:
    """Call ``check`` every ``every`` seconds until it gives something truthy, and return that.

    A check may assert: an AssertionError means "not yet", any other exception is raised at once.
    After ``within`` seconds (and at least one call) raises the last AssertionError, or one that
    shows the last value.
    """
    deadline = time.monotonic() + within
    while True:
        # Read before the check, so that the last check begins no earlier than the deadline.
        last = time.monotonic() >= deadline
        try:
            if value := check():
                return value
            failure = AssertionError(f"not within {within:g} s; the last value is {value!r}")
        except AssertionError as error:
            failure = error
        if last:
            raise failure
        time.sleep(every)


async def eventually_async(check: Callable[[], Awaitable[T]], *, within: float = 10.0, every: float = 0.02) -> T:
    """Await ``check()`` until it gives something truthy; for the rest as :func:`eventually`."""
    deadline = time.monotonic() + within
    while True:
        last = time.monotonic() >= deadline
        try:
            if value := await check():
                return value
            failure = AssertionError(f"not within {within:g} s; the last value is {value!r}")
        except AssertionError as error:
            failure = error
        if last:
            raise failure
        await asyncio.sleep(every)
