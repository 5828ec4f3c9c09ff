"""chaz runs LLM agents as Celery tasks: one INSERT into a session's log, one answer.

The way of an entry, file by file:

- ``producer.py``: ``send()`` is one INSERT and returns a handle
- ``sql/``: the row, and the doorbell
- ``listener.py``: hears it, places the entry, makes a run and publishes it
- ``celery.py``: the Celery application
- ``tasks.py``: the task ``chaz.agent.<name>``: claim, rebuild, run, end or park
- ``runtime/``: the ReAct loop
- ``audit/``: what tools did, told through the broker and recorded by consumers
- ``completion.py``: ends a run and answers its parent
- ``result.py``: the handle

Besides by entries, agents wake by schedules (``schedules.py``), which the listener fires (``firing.py``).

Importing this package loads neither Celery nor Kombu nor an LLM SDK.
"""

from chaz.deciding import Request
from chaz.entries import Budget, Entry
from chaz.errors import (
    ChazError,
    Conflict,
    DatabaseUnavailable,
    InvalidEntry,
    InvalidSchedule,
    NotPermitted,
    NotRequeueable,
    RunCancelled,
    RunFailed,
    UnknownAgent,
    UnknownRequest,
    UnknownRun,
    UnknownSchedule,
    UnknownSession,
    WaitTimeout,
)
from chaz.outcomes import Spent
from chaz.planning import Schedule
from chaz.producer import AsyncChaz, AsyncSession, Chaz, Session
from chaz.result import AgentResult, AsyncAgentResult, as_completed
from chaz.rosters import Attachment
from chaz.runtime.agents import Agent
from chaz.runtime.tools import CallContext, tool

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "AgentResult",
    "AsyncAgentResult",
    "AsyncChaz",
    "AsyncSession",
    "Attachment",
    "Budget",
    "CallContext",
    "Chaz",
    "ChazError",
    "Conflict",
    "DatabaseUnavailable",
    "Entry",
    "InvalidEntry",
    "InvalidSchedule",
    "NotPermitted",
    "NotRequeueable",
    "Request",
    "RunCancelled",
    "RunFailed",
    "Schedule",
    "Session",
    "Spent",
    "UnknownAgent",
    "UnknownRequest",
    "UnknownRun",
    "UnknownSchedule",
    "UnknownSession",
    "WaitTimeout",
    "as_completed",
    "tool",
]
