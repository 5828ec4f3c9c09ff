"""The names under which chaz's processes find each other, in PostgreSQL and on the broker."""

from __future__ import annotations

BELL = "chaz"
"""NOTIFY channel of the doorbell: something is to be placed or published. No payload."""

DONE = "chaz_done"
"""NOTIFY channel of ends; the payload is the id of the run that ended."""

ABORT = "chaz_abort"
"""NOTIFY channel to workers: the run whose id is the payload was ended from outside."""

AUDIT = "audit"
AUDIT_DEAD = "audit.dead"
ISOLATION = "isolation"
"""Queue of the runs that may have taken their worker down; served by a process of its own."""

RUNS = "runs"
"""Exchange of the agents' queues."""


def broker_name(prefix: str, name: str) -> str:
    """The broker's name of a queue or exchange: two deployments with two prefixes share a broker."""
    return f"{prefix}.{name}"


def task_name(agent: str) -> str:
    """The Celery task of an agent, so that Flower and its metrics group by agent."""
    return f"chaz.agent.{agent}"
