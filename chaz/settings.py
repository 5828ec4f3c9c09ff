"""The settings of every process, from ``CHAZ_*`` environment variables; each is read here and nowhere else.

Celery's own settings (pool, prefetch, limits) are in ``celeryconfig.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast
from urllib.parse import SplitResult, quote, unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError, from_json

from chaz.asking import Approving
from chaz.entries import SecretsPolicy
from chaz.errors import ConfigurationError
from chaz.planning import Ceilings
from chaz.routing import BURST

# libpq takes several, separated by commas.
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\[\]:]*)(:\d{0,5})?")


class Settings(BaseModel):
    """What a deployment says about itself. Times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)

    database_url: str = Field(default="", repr=False)
    """``postgresql://user:password@host:port/database``; libpq's parameters may follow a ``?``."""
    listen_url: str = Field(default="", repr=False)
    """The same database past a transaction pooler, which cannot LISTEN. Default: ``database_url``."""
    broker_url: str = Field(default="amqp://guest:guest@127.0.0.1:5672//", repr=False)
    """RabbitMQ (``amqp://``), or Redis or Valkey (``redis://``)."""
    broker_prefix: str = Field(default="chaz", pattern=r"^[A-Za-z0-9_.-]{1,60}$")
    """Starts every name on the broker, so that two deployments share one."""
    agents: str = ""
    """The modules that define agents and tools, separated by commas."""
    default_agent: str = ""
    """Who answers a message in a session that has no agent."""
    burst: int = Field(default=BURST, ge=0, lt=2**31)
    """How many answers of agents in a row may wake other agents, in sessions that do not say."""
    tool_policies: dict[str, dict[str, Any]] = {}
    """How tools may be called, as JSON: policies that change those of tools and agents, by tools' names or globs."""
    tenant: str = ""
    """The tenant that a producer writes for."""

    webhook_secret: str = Field(default="", repr=False)
    """What listeners sign webhooks with."""

    approvers: str = ""
    """Who may approve calls and answer questions in sessions that name nobody: names or globs, separated by commas."""
    auto_approve: str = ""
    """Tools that need no approval in sessions that do not say (globs, separated by commas), unless they always do."""
    approval_timeout: float = Field(default=300.0, gt=0, le=86_400 * 365)
    """How long a person's word is waited for."""

    max_schedules: int = Field(default=100, ge=0)
    """How many schedules an agent may have."""
    shortest_schedule: float = Field(default=60.0, gt=0, le=86_400 * 365)
    """The shortest time between two firings of a schedule."""
    schedules_of_others: bool = False
    """Whether agents' tools may touch the schedules of other agents."""
    schedule_grace: float = Field(default=60.0, ge=0, le=86_400 * 365)
    """How late a slot of a schedule may fire; later it was missed."""

    beat: float = Field(default=3.0, gt=0)
    """How often a worker process renews its lease."""
    lease: float = Field(default=15.0, gt=0)
    """How long a lease lasts without a beat; then its runs go to another worker."""
    sweep: float = Field(default=5.0, gt=0)
    """How often listeners look for what no doorbell announces, and the first wait before a run is published again."""
    short_poll: float = Field(default=0.05, gt=0)
    """How often a listener looks while it proves that it may sleep."""
    long_poll: float = Field(default=1.0, gt=0)
    """How often a sleeping listener looks all the same."""
    unknown_agent_grace: float = Field(default=10.0, ge=0)
    """How long a run waits for somebody to register its agent."""
    shutdown_grace: float = Field(default=20.0, ge=0)
    """How long a stopping worker lets its runs come to the end of a step."""
    database_pool: int = Field(default=10, ge=1)
    """Connections of a process to PostgreSQL, at most."""
    database_silence: float = Field(default=30.0, ge=1)
    """How long PostgreSQL may owe an answer before a connection counts as lost."""
    secrets: SecretsPolicy = "redact"
    """What workers do with secrets in tools' arguments and results: ``redact``, ``block``, or ``off`` for nothing."""
    tool_threads: int = Field(default=64, ge=1)
    """Threads for synchronous tools in a worker process."""

    @property
    def approving(self) -> Approving:
        """What holds of approvals in sessions that say nothing."""
        return Approving(names_of(self.approvers), names_of(self.auto_approve), self.approval_timeout)

    @property
    def ceilings(self) -> Ceilings:
        """What is allowed of schedules."""
        shortest = timedelta(seconds=self.shortest_schedule)
        return Ceilings(self.max_schedules, shortest, self.schedules_of_others)

    @field_validator("tool_policies", mode="before")
    @classmethod
    def _from_json(cls, value: object) -> object:
        try:
            policies: object = from_json(value) if isinstance(value, str) else value
        except ValueError as error:
            raise PydanticCustomError("json", "no JSON: {why}", {"why": str(error)}) from None
        by_tool = cast("dict[object, object]", policies) if isinstance(policies, dict) else None
        if by_tool is None or not all(isinstance(fields, dict) for fields in by_tool.values()):
            raise PydanticCustomError(
                "policies",
                "no JSON object of objects; write it like {example}",
                {"example": '{"delete_*": {"approval": "always"}}'},
            )
        return by_tool

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: object) -> Settings:
        """Read ``CHAZ_*`` variables; ``overrides`` that are not None win.

        Raises :class:`~chaz.errors.ConfigurationError` naming the variable. Empty variables count as unset.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, object] = {
            name: environ[variable] for name in cls.model_fields if environ.get(variable := f"CHAZ_{name.upper()}")
        }
        values |= {name: value for name, value in overrides.items() if value is not None}
        try:
            settings = cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            variable = f"CHAZ_{str(first['loc'][0]).upper()}"
            raise ConfigurationError(f"{variable}: {first['msg']}") from None
        if settings.beat * 2 > settings.lease:
            raise ConfigurationError(
                f"CHAZ_LEASE is {settings.lease:g} s and CHAZ_BEAT {settings.beat:g} s; "
                "a lease must outlast two beats, or a healthy worker loses its runs"
            )
        return settings

    def require_database(self) -> str:
        """The database's URL. Raises ConfigurationError where none is set or it is no PostgreSQL URL."""
        if not self.database_url:
            raise ConfigurationError(
                "no database: set CHAZ_DATABASE_URL to postgresql://user:password@host:port/database"
            )
        scheme, separator, _ = self.database_url.partition("://")
        if scheme not in {"postgresql", "postgres"}:
            # Without "://" it may be anything, such as libpq's own "host=… password=…".
            found = f", not {scheme!r}" if separator else ""
            raise ConfigurationError(f"CHAZ_DATABASE_URL must start with postgresql://{found}")
        if _split(self.database_url) is None:
            raise ConfigurationError(
                "CHAZ_DATABASE_URL is no URL; in a user's name or password write / as %2F, @ as %40, # as %23, ? as %3F"
            )
        return self.database_url


def names_of(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name for part in text.split(",") if (name := part.strip()))


def without_secrets(url: str) -> str:
    """The URL as it may be printed: its password and its query are left out."""
    parts = _split(url)
    if parts is None:
        return "(not a URL)"
    user = f"{quote(unquote(parts.username))}@" if parts.username else ""
    return f"{parts.scheme}://{user}{parts.netloc.rpartition('@')[2]}{parts.path}"


def _split(url: str) -> SplitResult | None:
    """The parts of a URL; None where it is none, or a "/" in a password makes the rest of it the path."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    hosts = parts.netloc.rpartition("@")[2].split(",")
    whole = "://" in url and "@" not in parts.path and all(_HOST.fullmatch(host) for host in hosts)
    return parts if whole else None
