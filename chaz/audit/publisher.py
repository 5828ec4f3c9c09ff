"""Tells audit events to the broker, from a thread of its own: no run waits for it.

The journal holds every event, so what is dropped here (a broker long away, a killed process) is sent again from there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Sequence

from kombu import Producer

from chaz.broker import PERSISTENT_DELIVERY_MODE, audit_queue, connect
from chaz.deliveries import AuditBatch, AuditEvent
from chaz.settings import Settings, without_secrets

logger = logging.getLogger("chaz.audit")

BATCH = 50
BUFFER = 10_000
LONGEST_PAUSE = 5.0


class AuditPublisher:
    """One per process; made lazily and after a fork. ``tell`` never blocks."""

    def __init__(self, settings: Settings) -> None:
        self.dropped = 0
        self._settings = settings
        self._queue = audit_queue(settings.broker_prefix)
        self._events: queue.Queue[AuditEvent | None] = queue.Queue(BUFFER)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._starting = threading.Lock()

    def tell(self, events: Sequence[AuditEvent]) -> None:
        """Hand the events over. With the buffer full they are dropped, to be sent again from the journal."""
        if not events:
            return
        self._start()
        for event in events:
            try:
                self._events.put_nowait(event)
            except queue.Full:
                if not self.dropped:
                    logger.warning(
                        "audit: the buffer of %d events is full; further ones are sent from the journal", BUFFER
                    )
                self.dropped += 1

    def close(self, timeout: float = 5.0) -> None:
        """Send what is buffered, for ``timeout`` seconds at most, and stop."""
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():
            return
        self._stopped.set()
        # It only wakes a thread that waits for events; with a full buffer none does.
        with contextlib.suppress(queue.Full):
            self._events.put_nowait(None)
        thread.join(timeout)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None or self._pid != os.getpid():
                self._pid = os.getpid()
                self._thread = threading.Thread(target=self._run, name="chaz-audit", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        pause = 0.1
        batch: list[AuditEvent] = []
        while True:
            try:
                with connect(self._settings) as connection:
                    producer = connection.Producer(serializer="json")
                    pause = 0.1
                    while batch or (batch := self._next_batch()):
                        self._send(producer, batch)
                        batch = []
                return
            except Exception as error:
                if self._stopped.is_set():
                    logger.warning("audit: %d events are left to the journal (%s)", len(batch), error)
                    return
                logger.warning(
                    "audit: the broker at %s does not take events (%s); trying again",
                    without_secrets(self._settings.broker_url),
                    error,
                )
                self._stopped.wait(pause)
                pause = min(pause * 2, LONGEST_PAUSE)

    def _next_batch(self) -> list[AuditEvent]:
        """What there is, a batch at most; empty at the end."""
        if self._stopped.is_set() and self._events.empty():
            return []
        first = self._events.get()
        if first is None:
            return []
        batch = [first]
        while len(batch) < BATCH:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                break
            if event is None:
                break
            batch.append(event)
        return batch

    def _send(self, producer: Producer, events: Sequence[AuditEvent]) -> None:
        producer.publish(
            AuditBatch(events=tuple(events)).model_dump(mode="json"),
            exchange=self._queue.exchange,
            routing_key=self._queue.routing_key,
            declare=[self._queue],
            delivery_mode=PERSISTENT_DELIVERY_MODE,
        )
