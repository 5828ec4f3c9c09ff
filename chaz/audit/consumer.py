"""The audit consumer: takes batches of events, records them, and acknowledges after the commit. Any number may run.

What cannot be decoded or recorded goes to the dead-letter queue with the reason, and never holds up its neighbours.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import psycopg
from kombu import Connection, Consumer, Message
from psycopg.rows import DictRow
from pydantic import ValidationError

from chaz.audit import recorder
from chaz.broker import (
    PERSISTENT_DELIVERY_MODE,
    audit_options,
    audit_queue,
    connect,
    dead_letter_queue,
    forgets_bindings,
)
from chaz.database import connect_blocking
from chaz.deliveries import AuditBatch, AuditEvent
from chaz.settings import Settings, without_secrets

logger = logging.getLogger("chaz.audit")

PREFETCH = 200
BATCH_DELIVERIES = 100
LINGER = 0.02
"""Seconds to wait for more deliveries before a batch is recorded."""
LONGEST_PAUSE = 5.0
BRPOP_LASTS = 1.2


class AuditConsumer:
    """One consumer process. :meth:`run` until :meth:`stop`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._queue = audit_queue(settings.broker_prefix)
        self._dead = dead_letter_queue(settings.broker_prefix)
        self._stopping = False
        self._waiting: list[Message] = []
        self._database: psycopg.Connection[DictRow] | None = None
        self._database_pause: float | None = None
        """Seconds until PostgreSQL, which is away, is tried again; None while it is there."""
        self._try_again = 0.0

    def stop(self) -> None:
        """Record what is at hand and return from :meth:`run`."""
        self._stopping = True

    def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Consume until stopped. While broker or PostgreSQL are away it waits, and acknowledges nothing."""
        pause = 0.1
        # RabbitMQ closes a channel, and not its connection, over a delivery that waits too long for PostgreSQL.
        lost = connect(self._settings)
        while not self._stopping:
            try:
                with connect(self._settings, audit_options(self._settings)) as connection:
                    channel = connection.channel()
                    self._dead.bind(channel).declare()
                    consumer = Consumer(
                        channel,
                        [self._queue],
                        callbacks=[self._received],
                        on_decode_error=self._undecodable,
                        accept=["json"],
                        prefetch_count=PREFETCH,
                    )
                    with contextlib.suppress(psycopg.OperationalError):
                        self._connect_database()
                    with consumer:
                        if on_ready is not None:
                            on_ready()
                            on_ready = None
                        pause = 0.1
                        self._consume(connection)
                        consumer.cancel()
                        self._read_what_is_on_its_way(connection)
            except (OSError, *lost.connection_errors, *lost.channel_errors) as error:
                logger.warning(
                    "audit: the broker at %s is not available (%s); trying again",
                    without_secrets(self._settings.broker_url),
                    error,
                )
                # Unacknowledged, so the broker delivers them again.
                self._waiting.clear()
                ends = time.monotonic() + pause
                while time.monotonic() < ends and not self._stopping:
                    time.sleep(0.05)
                pause = min(pause * 2, LONGEST_PAUSE)
        if self._database is not None:
            self._database.close()

    def _consume(self, connection: Connection) -> None:
        while not self._stopping:
            try:
                connection.drain_events(timeout=LINGER if self._waiting and self._database_pause is None else 0.2)
            except TimeoutError:
                connection.heartbeat_check()
                self._flush()
            if len(self._waiting) >= BATCH_DELIVERIES:
                self._flush()
        self._flush()

    def _read_what_is_on_its_way(self, connection: Connection) -> None:
        """On Redis a delivery may be taken from its list and not read yet; with the connection it would be lost.

        Kombu asks for one with a BRPOP of a second, and gives back what comes for a consumer that has gone.
        """
        if not forgets_bindings(self._settings):
            return
        ends = time.monotonic() + BRPOP_LASTS
        while time.monotonic() < ends:
            try:
                connection.drain_events(timeout=0.1)
            except TimeoutError:
                continue

    def _received(self, body: Any, message: Message) -> None:
        self._waiting.append(message)

    def _undecodable(self, message: Message, error: Exception) -> None:
        # Kombu's own handler would acknowledge and forget it.
        self._bury(message, f"cannot be decoded: {error}")

    def _connect_database(self) -> None:
        if self._database is None or self._database.closed:
            self._database = connect_blocking(
                self._settings.database_url, "chaz-audit", silence=self._settings.database_silence
            )

    def _flush(self) -> None:
        """Record the waiting deliveries, then acknowledge them; while PostgreSQL is away they are kept in hand."""
        if not self._waiting or (self._database_pause is not None and time.monotonic() < self._try_again):
            return
        try:
            self._connect_database()
            self._record_waiting()
            self._database_pause = None
        except psycopg.OperationalError as error:
            self._database = None
            self._database_pause = min((self._database_pause or 0.05) * 2, LONGEST_PAUSE)
            self._try_again = time.monotonic() + self._database_pause
            logger.warning(
                "audit: PostgreSQL at %s is not available (%s); trying again",
                without_secrets(self._settings.database_url),
                " ".join(str(error).split()),
            )
        self._waiting = [message for message in self._waiting if not message.acknowledged]

    def _record_waiting(self) -> None:
        decoded: list[tuple[Message, tuple[AuditEvent, ...]]] = []
        for message in self._waiting:
            try:
                decoded.append((message, AuditBatch.model_validate(message.payload).events))
            except (ValidationError, TypeError) as error:
                self._bury(message, f"not an audit delivery of version 1: {_first_line(error)}")
        if not decoded:
            return
        try:
            refused = self._record([event for _, events in decoded for event in events])
            self._settle(decoded, refused)
            logger.info("recorded %d events of %d deliveries", sum(len(e) for _, e in decoded), len(decoded))
        except psycopg.OperationalError:
            raise
        except psycopg.Error:
            self._flush_one_by_one(decoded)

    def _flush_one_by_one(self, decoded: list[tuple[Message, tuple[AuditEvent, ...]]]) -> None:
        """One of them cannot be stored: find it, and record its neighbours."""
        for message, events in decoded:
            try:
                self._settle([(message, events)], self._record(list(events)))
            except psycopg.OperationalError:
                raise
            except psycopg.Error as error:
                self._bury(message, f"cannot be recorded: {_first_line(error)}")

    def _record(self, events: list[AuditEvent]) -> set[int]:
        assert self._database is not None
        return recorder.record(self._database, events)

    def _settle(self, decoded: list[tuple[Message, tuple[AuditEvent, ...]]], refused: set[int]) -> None:
        numbers = count()
        for message, events in decoded:
            if not refused.isdisjoint([next(numbers) for _ in events]):
                self._bury(message, "holds an event that no run of its session told")
            else:
                message.ack()

    def _bury(self, message: Message, reason: str) -> None:
        """Move a delivery to the dead-letter queue, then acknowledge it."""
        logger.error("audit: a delivery goes to %s: %s", self._dead.name, reason)
        with connect(self._settings) as connection:
            connection.Producer().publish(
                message.body,
                exchange=self._dead.exchange,
                routing_key=self._dead.routing_key,
                declare=[self._dead],
                content_type=message.content_type or "application/octet-stream",
                content_encoding=message.content_encoding or "binary",
                headers={
                    "x-chaz-reason": reason[:500],
                    "x-chaz-consumer": socket.gethostname(),
                    "x-chaz-headers": str(message.headers)[:500],
                },
                delivery_mode=PERSISTENT_DELIVERY_MODE,
            )
        message.ack()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
