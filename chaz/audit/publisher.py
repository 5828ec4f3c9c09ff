"""Tells audit events to the broker; no run waits for it.

The journal holds every event, so what is dropped on the way is sent again from there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from chaz.broker import audit_queue
from chaz.deliveries import AuditBatch, AuditEvent
from chaz.sender import BUFFER, Link, Sender
from chaz.settings import Settings

BATCH = 50


def _size(event: AuditEvent) -> int:
    return sys.getsizeof(event.content)


class AuditPublisher:
    """One per process. ``tell`` never blocks."""

    def __init__(self, settings: Settings, *, buffer: int = BUFFER) -> None:
        self._queue = audit_queue(settings.broker_prefix)
        self._sender = Sender("audit", settings, self._send, batch=BATCH, buffer=buffer, size=_size)

    @property
    def dropped(self) -> int:
        """Events for which the buffer had no room."""
        return self._sender.dropped

    def tell(self, events: Sequence[AuditEvent]) -> None:
        """Hand the events over. With the buffer full they are dropped, to be sent again from the journal."""
        self._sender.put(events)

    def close(self, timeout: float = 5.0) -> None:
        """Send what is buffered, for ``timeout`` seconds at most, and stop."""
        self._sender.close(timeout)

    def _send(self, link: Link, events: Sequence[AuditEvent]) -> None:
        link.publish(AuditBatch(events=tuple(events)).model_dump(mode="json"), self._queue)
