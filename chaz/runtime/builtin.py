"""The tools that are named by a string: what a model may say to them. The engine does what they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from chaz.entries import MAX_TIMEOUT
from chaz.runtime.models import ToolSchema
from chaz.runtime.scheduletools import SCHEDULES, schedule_schemas

Text = Annotated[str, StringConstraints(pattern=r"\S")]
Glob = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class SpawnArguments(BaseModel):
    """The arguments of ``spawn_agent``. Models that fill every field in write null for what they leave open."""

    model_config = ConfigDict(extra="forbid")

    agent: Text
    instruction: Text
    context: str | None = None
    wait: bool | None = True
    model: str | None = None
    max_steps: int | None = Field(default=None, ge=1, lt=2**31)
    timeout: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT)
    tools: list[Glob] | None = Field(default=None, max_length=100)
    detached: bool | None = False


class ResultArguments(BaseModel):
    """The arguments of ``agent_result``."""

    model_config = ConfigDict(extra="forbid")

    id: UUID


class QuestionArguments(BaseModel):
    """The arguments of ``ask_human``."""

    model_config = ConfigDict(extra="forbid")

    question: Text
    options: list[Text] | None = Field(default=None, min_length=1, max_length=100)
    timeout: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT)


class CompactArguments(BaseModel):
    """The arguments of ``compact``: none."""

    model_config = ConfigDict(extra="forbid")


SPAWN_AGENT = "spawn_agent"
ASK_HUMAN = "ask_human"
AGENT_RESULT = "agent_result"
COMPACT = "compact"

SPAWN_SCHEMA = ToolSchema(
    name=SPAWN_AGENT,
    description="Give an instruction to another agent and get its answer. Several in one turn run at the same time.",
    parameters={
        "type": "object",
        "properties": {
            "agent": {"type": "string", "description": "The agent's name."},
            "instruction": {"type": "string", "description": "What it shall do, complete in itself."},
            "context": {"type": "string", "description": "What it needs to know besides."},
            "wait": {
                "type": "boolean",
                "description": "Whether to wait for its answer, as is usual. If false, the result is the agent's id at "
                "once, and agent_result gets the answer later.",
            },
            "model": {"type": "string", "description": "Another model than its own, if it may be run with it."},
            "max_steps": {"type": "integer", "minimum": 1, "description": "The most turns that it may take."},
            "timeout": {"type": "number", "exclusiveMinimum": 0, "description": "The most seconds that it may take."},
            "tools": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Its tools, if not all that it has: names, or patterns such as web.*; [] for none.",
            },
            "detached": {"type": "boolean", "description": "Whether it goes on should you be cancelled (default: no)."},
        },
        "required": ["agent", "instruction"],
        "additionalProperties": False,
    },
)
RESULT_SCHEMA = ToolSchema(
    name=AGENT_RESULT,
    description="Get the answer of an agent that was spawned with wait=false; waits for it, if need be.",
    parameters={
        "type": "object",
        "properties": {"id": {"type": "string", "description": "The id that spawn_agent gave."}},
        "required": ["id"],
        "additionalProperties": False,
    },
)
QUESTION_SCHEMA = ToolSchema(
    name=ASK_HUMAN,
    description="Ask a person, and wait for the answer. Only what you cannot find out or decide yourself.",
    parameters={
        "type": "object",
        "properties": {
            "question": {"type": "string", "description": "The question, complete in itself."},
            "options": {
                "type": "array",
                "items": {"type": "string"},
                "minItems": 1,
                "description": "The answers to choose from; if left out, any text.",
            },
            "timeout": {"type": "number", "exclusiveMinimum": 0, "description": "The most seconds to wait."},
        },
        "required": ["question"],
        "additionalProperties": False,
    },
)
COMPACT_SCHEMA = ToolSchema(
    name=COMPACT,
    description="Have this session summarised once you have answered: from then on you see the summary in place of "
    "what was said so far. Use it when the session has become long.",
    parameters={"type": "object", "properties": {}, "additionalProperties": False},
)
SCHEDULE_SCHEMAS = schedule_schemas()
BUILT_IN: Mapping[str, tuple[ToolSchema, ...]] = {
    SPAWN_AGENT: (SPAWN_SCHEMA, RESULT_SCHEMA),
    ASK_HUMAN: (QUESTION_SCHEMA,),
    COMPACT: (COMPACT_SCHEMA,),
    SCHEDULES: SCHEDULE_SCHEMAS,
    **{schema.name: (schema,) for schema in SCHEDULE_SCHEMAS},
}
"""What an agent names, and the tools that it gets by it."""
BUILT_IN_NAMES = frozenset(schema.name for schemas in BUILT_IN.values() for schema in schemas)
