"""A listener's ear: its LISTEN on the doorbell, made again beside the rounds whenever it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from chaz.database import Subscription
from chaz.errors import ChazError, DatabaseUnavailable

logger = logging.getLogger("chaz.listener")


class Ear:
    """Hears the doorbell, or says that it does not. To connect may take long, and a listener's rounds need no bell."""

    def __init__(self, subscription: Subscription, *, pause: float, changed: Callable[[], None]) -> None:
        """``pause``: seconds between two tries to LISTEN. ``changed`` is called when :attr:`hears` has changed."""
        self._subscription = subscription
        self._pause = pause
        self._changed = changed
        self._listening: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._heard_anew = False

    @property
    def hears(self) -> bool:
        """Whether it listens, as far as it knows."""
        return self._subscription.connected and self._listening is not None and self._listening.done()

    async def open(self, stopped: asyncio.Task[bool]) -> None:
        """Try to LISTEN, and go on trying; return after the first try."""
        self._attend()
        tried = asyncio.create_task(self._tried.wait())
        await asyncio.wait({stopped, tried}, return_when=asyncio.FIRST_COMPLETED)
        tried.cancel()

    async def wait(self, stopped: asyncio.Task[bool], timeout: float) -> bool:
        """Wait for the bell for ``timeout`` seconds at most; whether to look at once.

        That is also when it has just begun to listen: what was committed before is found by looking.
        """
        if self._heard_anew:
            self._heard_anew = False
            return True
        waiting = asyncio.create_task(
            self._subscription.wait(timeout) if self.hears else self._until_listening(timeout)
        )
        await asyncio.wait({waiting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
        try:
            return bool(await waiting)
        except asyncio.CancelledError:
            return False
        except DatabaseUnavailable as error:
            await self._lose(error)
            return True

    async def probe(self) -> None:
        """Ask the server something, so that a connection that is dead without a word is noticed."""
        if self.hears:
            try:
                await self._subscription.probe()
            except DatabaseUnavailable as error:
                await self._lose(error)

    async def close(self) -> None:
        """Listen no more."""
        if self._listening is not None:
            self._listening.cancel()
        await self._subscription.close()

    def _attend(self) -> None:
        if not self._subscription.connected and (self._listening is None or self._listening.done()):
            self._listening = asyncio.create_task(self._listen_until_it_succeeds())

    async def _until_listening(self, timeout: float) -> list[str]:
        self._attend()
        assert self._listening is not None
        await asyncio.wait({self._listening}, timeout=timeout)
        return []

    async def _listen_until_it_succeeds(self) -> None:
        while True:
            try:
                await self.listen()
            except Exception as error:
                expected = isinstance(error, ChazError | OSError)
                logger.warning("listener: cannot listen (%s); polling until it can", error, exc_info=not expected)
                self._tried.set()
                self._changed()
                await asyncio.sleep(self._pause)
            else:
                self._heard_anew = True
                self._tried.set()
                self._changed()
                return

    async def listen(self) -> None:
        """LISTEN on a new connection. Raises DatabaseUnavailable."""
        await self._subscription.connect()
        logger.info("listener: listening at %s", self._subscription.address)

    async def _lose(self, error: DatabaseUnavailable) -> None:
        logger.warning("listener: no longer listening (%s)", error)
        await self._subscription.close()
        self._changed()
        self._attend()
