"""Puts things on the broker from a thread of its own, so that nobody who hands them over waits for it.

Whoever uses it can send again what is lost here (a full buffer, a killed process): PostgreSQL has all of it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

from kombu import Connection, Producer, Queue

from chaz.broker import PERSISTENT_DELIVERY_MODE, SEND_WITHIN, connect, forgets_bindings, sender_options
from chaz.settings import Settings, without_secrets

T = TypeVar("T")

BUFFER = 10_000
BUFFER_BYTES = 64 * 2**20
BATCH_BYTES = 2**20
"""RabbitMQ 4 takes no delivery above 16 MiB."""
LONGEST_PAUSE = 5.0


class Link:
    """A connection to the broker, for as long as it lasts."""

    def __init__(self, connection: Connection, *, by_queue: bool) -> None:
        self.refusals = connection.channel_errors
        """What the broker raises when it refuses one thing, and goes on with others."""
        self.by_queue = by_queue
        """Whether to send to the queue itself, past its exchange: on Redis, whose bindings a flush takes away."""
        self.producer: Producer = connection.Producer(serializer="json")
        self._connection = connection

    def publish(self, body: object, queue: Queue) -> None:
        """Send one thing to a queue. Raises what the broker raises."""
        where: dict[str, Any] = (
            {"exchange": "", "routing_key": queue.name}
            if self.by_queue
            else {"exchange": queue.exchange, "routing_key": queue.routing_key, "declare": [queue]}
        )
        self.producer.publish(body, delivery_mode=PERSISTENT_DELIVERY_MODE, confirm_timeout=SEND_WITHIN, **where)

    def require(self, queue: str) -> None:
        """Raise a refusal where the queue is not there: RabbitMQ drops in silence what is sent to none."""
        cast("Any", self._connection.default_channel).queue_declare(queue, passive=True)

    def renew(self) -> None:
        """Go on after a refusal, which has closed the channel."""
        self.producer.revive(self._connection.channel())


class Sender(Generic[T]):
    """One per process and purpose; its thread starts with the first :meth:`put`, and again after a fork.

    ``send`` gets a link and what is to go over it, ``batch`` things at most. What it raises cuts the link; then the
    same things are sent over a new one. ``size`` says about how many bytes a thing has: batch and buffer are bounded in
    bytes too, whatever the things hold.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        send: Callable[[Link, Sequence[T]], None],
        *,
        batch: int,
        buffer: int = BUFFER,
        size: Callable[[T], int] = lambda _: 0,
    ) -> None:
        self.dropped = 0
        self._name = name
        self._logger = logging.getLogger(f"chaz.{name}")
        self._settings = settings
        self._send = send
        self._batch = batch
        self._buffer = buffer
        self._size = size
        self._waiting: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._bytes = 0
        self._counting = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._starting = threading.Lock()

    def put(self, things: Sequence[T]) -> None:
        """Hand things over. With the buffer full they are dropped. Never blocks."""
        if not things:
            return
        self._start()
        for thing in things:
            size = self._size(thing)
            with self._counting:
                if self._waiting.qsize() < self._buffer and self._bytes + size <= BUFFER_BYTES:
                    self._bytes += size
                    self._waiting.put(thing)
                    continue
            if not self.dropped:
                self._logger.warning("%s: the buffer is full; what is dropped is sent again later", self._name)
            self.dropped += 1

    def close(self, timeout: float = 5.0) -> None:
        """Send what is buffered, for ``timeout`` seconds at most, and stop."""
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():
            return
        self._stopped.set()
        # To wake it, should it wait for something.
        self._waiting.put(None)
        thread.join(timeout)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None or self._pid != os.getpid():
                self._pid = os.getpid()
                self._thread = threading.Thread(target=self._run, name=f"chaz-{self._name}", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        pause = 0.1
        things: list[T] = []
        while True:
            try:
                with connect(self._settings, sender_options(self._settings), heartbeat=0) as connection:
                    link = Link(connection, by_queue=forgets_bindings(self._settings))
                    while things or (things := self._next_batch()):
                        self._send(link, things)
                        things = []
                        pause = 0.1
                return
            except Exception as error:
                if self._stopped.is_set():
                    self._logger.warning("%s: %d are left to be sent again later (%s)", self._name, len(things), error)
                    return
                self._logger.warning(
                    "%s: the broker at %s takes nothing (%s); trying again",
                    self._name,
                    without_secrets(self._settings.broker_url),
                    error,
                )
                self._stopped.wait(pause)
                pause = min(pause * 2, LONGEST_PAUSE)

    def _next_batch(self) -> list[T]:
        """What there is, a batch at most; empty at the end."""
        if self._stopped.is_set() and self._waiting.empty():
            return []
        first = self._waiting.get()
        if first is None:
            return []
        things, size = [first], self._size(first)
        while len(things) < self._batch and size < BATCH_BYTES:
            try:
                thing = self._waiting.get_nowait()
            except queue.Empty:
                break
            if thing is None:
                break
            things.append(thing)
            size += self._size(thing)
        with self._counting:
            self._bytes -= size
        return things
