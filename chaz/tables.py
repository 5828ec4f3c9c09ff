"""The tables that listings read, for SQLAlchemy Core; a test compares them with the database.

State changes are SQL written by hand in the stores, where lock order and round trips matter; questions with many
optional conditions are put together here instead.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    Table,
    Text,
    Uuid,
)
from sqlalchemy.dialects.postgresql import JSONB

metadata = MetaData(schema="chaz")

sessions = Table(
    "sessions",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("name", Text),
    Column("parent_run_id", Uuid),
    Column("root_run_id", Uuid),
    Column("depth", Integer, nullable=False),
    Column("depth_left", Integer),
    Column("scope", JSONB),
    Column("model", Text),
    Column("max_steps", Integer),
    Column("deadline", DateTime(timezone=True)),
    Column("detached", Boolean, nullable=False),
    Column("schedule", Uuid),
    Column("on_message", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("session_id", Uuid, nullable=False),
    Column("agent", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("cause", Text, nullable=False),
    Column("trigger_position", BigInteger),
    Column("prompt", Text),
    Column("retry_of", Uuid),
    Column("superseded_by", Uuid),
    Column("interrupts", Uuid),
    Column("priority", Integer, nullable=False),
    Column("parent_run_id", Uuid),
    Column("root_run_id", Uuid, nullable=False),
    Column("depth", Integer, nullable=False),
    Column("depth_left", Integer),
    Column("scope", JSONB),
    Column("model", Text),
    Column("max_steps", Integer),
    Column("not_before", DateTime(timezone=True)),
    Column("expires_at", DateTime(timezone=True)),
    Column("deadline", DateTime(timezone=True), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("crashes", Integer, nullable=False),
    Column("suspect", Boolean, nullable=False),
    Column("lost_alone", Boolean, nullable=False),
    Column("worker_id", Uuid),
    Column("claim", Uuid),
    Column("ack_position", BigInteger),
    Column("read_to", BigInteger),
    Column("event_seq", Integer, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("audit_after", DateTime(timezone=True)),
    Column("publish_after", DateTime(timezone=True), nullable=False),
    Column("publishes", Integer, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("reserved_step", Integer),
    Column("reserved_tokens", BigInteger, nullable=False),
    Column("reserved_cost", Numeric, nullable=False),
    Column("waits_for", Text),
    Column("result", Text),
    Column("reason", Text),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("queued_at", DateTime(timezone=True)),
    Column("started_at", DateTime(timezone=True)),
    Column("ended_at", DateTime(timezone=True)),
)
