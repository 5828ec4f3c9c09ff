"""What a model says to the tools that are built in, held against what its run may do. Pure.

What only the database knows (deadlines, budgets, the other agent's own limits) is for the store to refuse.
"""

from __future__ import annotations

from typing import TypeVar
from uuid import UUID

from pydantic import BaseModel, ValidationError

from chaz.asking import Ask, digest_of
from chaz.errors import ConfigurationError
from chaz.lineage import Scope, Spawn
from chaz.outcomes import CallOutcome, ToolCall, typed_error
from chaz.runtime.agents import Agent
from chaz.runtime.builtin import CompactArguments, QuestionArguments, ResultArguments, SpawnArguments
from chaz.runtime.models import check_model_name

A = TypeVar("A", bound=BaseModel)


def wanted_spawn(call: ToolCall, agent: Agent, scope: Scope, depth_left: int) -> Spawn | CallOutcome:
    """The child that the call asks for, or why there can be none."""
    arguments = _arguments(call, SpawnArguments)
    if isinstance(arguments, CallOutcome):
        return arguments
    if not agent.may_spawn_agent(arguments.agent):
        allowed = ", ".join(agent.may_spawn) or "no agent"
        return typed_error("not_allowed", f"you may not spawn {arguments.agent!r}; you may spawn: {allowed}")
    if depth_left < 1:
        return typed_error("too_deep", "you are as deep as agents may be spawned; do it yourself")
    if arguments.model is not None:
        try:
            check_model_name(arguments.model)
        except ConfigurationError as error:
            return typed_error("bad_arguments", str(error))
    narrowed = [*scope]
    if agent.child_tools is not None:
        narrowed.append(agent.child_tools)
    if arguments.tools is not None:
        narrowed.append(arguments.tools)
    return Spawn(
        agent=arguments.agent,
        instruction=arguments.instruction + (f"\n\nContext:\n{arguments.context}" if arguments.context else ""),
        wait=arguments.wait is not False,
        model=arguments.model,
        max_steps=arguments.max_steps,
        timeout=arguments.timeout,
        tools=arguments.tools,
        detached=bool(arguments.detached),
        scope=tuple(narrowed),
        depth_left=depth_left - 1,
    )


def wanted_result(call: ToolCall) -> UUID | CallOutcome:
    """The run whose answer the call asks for, or what is wrong with it."""
    arguments = _arguments(call, ResultArguments)
    return arguments if isinstance(arguments, CallOutcome) else arguments.id


def wanted_question(call: ToolCall) -> Ask | CallOutcome:
    """The question that the call asks people, or what is wrong with it."""
    arguments = _arguments(call, QuestionArguments)
    if isinstance(arguments, CallOutcome):
        return arguments
    return Ask(
        kind="question",
        tool=call.tool,
        shown=arguments.question,
        digest=digest_of(call),
        timeout=arguments.timeout,
        choices=arguments.options,
    )


def wanted_compaction(call: ToolCall) -> CompactArguments | CallOutcome:
    """That the session be summarised, or what is wrong with the call."""
    return _arguments(call, CompactArguments)


def spawned_agent(call: ToolCall) -> str:
    """What a call waits for that waits for a child, in a word: its child agent's name, if it says."""
    arguments = _arguments(call, SpawnArguments)
    return call.tool if isinstance(arguments, CallOutcome) else arguments.agent


def _arguments(call: ToolCall, model: type[A]) -> A | CallOutcome:
    try:
        return model.model_validate_json(call.arguments or "{}")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "arguments"
        return typed_error("bad_arguments", f"{call.tool}: {where}: {first['msg']}")
