"""Tools: functions that a model may call, with a schema from their type hints and docstring."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import logging
import re
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Union, Unpack, get_args, get_origin, get_type_hints, overload
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import PydanticSerializationError, to_json

from chaz.errors import AgentsError
from chaz.outcomes import CallOutcome
from chaz.runtime.models import ToolSchema
from chaz.runtime.policy import PolicyFields, check_sensitive, policy_of
from chaz.runtime.threads import ToolThreads

logger = logging.getLogger("chaz.worker")

_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
MAX_SHOWN = 64
"""The longest name that models take."""


@dataclass(frozen=True)
class CallContext:
    """What a tool may know of its call: a parameter annotated with this class gets it, and no model sees it."""

    run_id: UUID
    session_id: UUID
    agent: str
    step: int
    ordinal: int
    _abandoned: threading.Event = field(default_factory=threading.Event, init=False, repr=False, compare=False)

    @property
    def cancelled(self) -> bool:
        """Whether nobody takes the result any more: the run was cancelled or lost, or the call's time is over.

        A synchronous tool cannot be stopped from outside. One that takes long looks at this and stops by itself.
        """
        return self._abandoned.is_set()

    def abandon(self) -> None:
        """Tell the tool that its result is not wanted any more."""
        self._abandoned.set()

    @property
    def idempotency_key(self) -> str:
        """The same whenever this call is made again; hand it to services that take one."""
        return f"{self.run_id}:{self.step}:{self.ordinal}"


current_call: contextvars.ContextVar[CallContext | None] = contextvars.ContextVar("chaz_current_call", default=None)
"""The call that this code runs in, so that a blocking wait in a tool can be refused."""


class Tool:
    """A function as a model sees it. Made by :func:`tool`."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        **policy: Unpack[PolicyFields],
    ) -> None:
        self.function = function
        self.name = name or getattr(function, "__name__", "")
        self.place = place_of(function)
        if not _NAME.fullmatch(self.name) or len(self.shown) > MAX_SHOWN:
            raise AgentsError(
                self.place,
                f"tool {self.name!r}: a name has letters, digits, '_' and '-', and '.' between groups of them, which "
                f"models see as '__'; {MAX_SHOWN} in all",
            )
        self.description = inspect.getdoc(function) or ""
        if not self.description:
            raise AgentsError(
                self.place, f"tool {self.name!r} has no docstring; the model reads it to know what the tool is for"
            )
        self._context_parameter, self._arguments = _arguments_model(function, self.name, self.place)
        try:
            self.policy = policy_of(policy)
            check_sensitive(self.policy.sensitive_params, self.parameters)
        except ValueError as error:
            raise AgentsError(self.place, f"tool {self.name!r}: {error}") from None

    @property
    def parameters(self) -> list[str]:
        """The names that a model gives values to."""
        return [name.removeprefix("p_") for name in self._arguments.model_fields]

    @property
    def shown(self) -> str:
        """Its name for models, which take no dots: ``web__search`` for ``web.search``."""
        return self.name.replace(".", "__")

    @property
    def schema(self) -> ToolSchema:
        """The tool as it is shown to a model."""
        parameters = self._arguments.model_json_schema()
        parameters.pop("title", None)
        return ToolSchema(name=self.shown, description=self.description, parameters=parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The plain function, for tests and other code."""
        return self.function(*args, **kwargs)

    def parse(self, arguments: str) -> dict[str, Any]:
        """The arguments of a call by name. Raises ValueError, in words for the model."""
        try:
            parsed = self._arguments.model_validate_json(arguments or "{}")
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(str(part) for part in item['loc']) or 'arguments'}: {item['msg']}"
                for item in error.errors(include_url=False, include_input=False)
            )
            raise ValueError(f"bad arguments for {self.name}: {problems}") from None
        return {name.removeprefix("p_"): getattr(parsed, name) for name in self._arguments.model_fields}

    def refusal(self, arguments: str) -> CallOutcome | None:
        """What the model is told of arguments that the function cannot be called with; None if it can."""
        try:
            self.parse(arguments)
        except ValueError as error:
            return CallOutcome(kind="error", content=str(error))
        return None

    async def call(
        self, arguments: str, context: CallContext, threads: ToolThreads, *, timeout: float | None = None
    ) -> CallOutcome:
        """Call the function; every mistake becomes an error result for the model, and is never raised.

        ``timeout`` is the tool's own, if not given. A synchronous function runs in a thread; past it, it is left there.
        What it gives is whole: to be scanned before it is cut.
        """
        timeout = self.policy.timeout if timeout is None else timeout
        try:
            values = self.parse(arguments)
        except ValueError as error:
            return CallOutcome(kind="error", content=str(error))
        if self._context_parameter:
            values[self._context_parameter] = context
        is_async = inspect.iscoroutinefunction(self.function)
        if not is_async and not await self._thread_is_free(threads, timeout):
            return CallOutcome(
                kind="error",
                content=f"{self.name} was not started: all {threads.limit} threads for tools are busy",
            )
        token = current_call.set(context)
        deadline = asyncio.timeout(timeout)
        try:
            async with deadline:
                if is_async:
                    result: object = as_text(await self.function(**values))
                else:
                    bound = contextvars.copy_context()
                    result = await threads.run(lambda: bound.run(_text_or_error, self.function, values))
                    if inspect.isawaitable(result):
                        result = as_text(await result)
        # A tool may raise anything, SystemExit and its own TimeoutError included; none of it is the run's end, nor,
        # as KeyboardInterrupt would be, the loop's.
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                context.abandon()
                raise
            if isinstance(error, TimeoutError) and deadline.expired():
                context.abandon()
                if not is_async:
                    logger.warning(
                        "tool %s hangs past its %g s in a thread; %d of %d threads for tools are busy",
                        self.name,
                        timeout,
                        threads.busy,
                        threads.limit,
                    )
                return CallOutcome(
                    kind="error", content=f"{self.name} did not end within {timeout:g} s; it may still take effect"
                )
            result = error
        finally:
            current_call.reset(token)
        if isinstance(result, BaseException):
            return CallOutcome(kind="error", content=f"{self.name} raised {_described(result)}")
        return CallOutcome(kind="ok", content=str(result))

    async def _thread_is_free(self, threads: ToolThreads, timeout: float) -> bool:
        """Wait for a thread, as long as the function may take."""
        try:
            async with asyncio.timeout(timeout):
                await threads.reserve()
        except TimeoutError:
            logger.error("tool %s was not started: all %d threads for tools are busy", self.name, threads.limit)
            return False
        return True


def _text_or_error(function: Callable[..., Any], values: dict[str, Any]) -> object:
    """On a thread: the result as text, or what was raised, or what is to be awaited on the loop.

    Given back and not raised, because a future takes no StopIteration, and takes a CancelledError for its own.
    """
    try:
        result = function(**values)
        return result if inspect.isawaitable(result) else as_text(result)
    except BaseException as error:
        return error


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def as_text(result: Any) -> str:
    """A tool's result as the model reads it: text as it is, anything else as JSON, or as ``repr`` where it has none."""
    if isinstance(result, str):
        return result
    try:
        return to_json(result, inf_nan_mode="strings").decode()
    except (PydanticSerializationError, UnicodeError, ValueError):
        try:
            return json.dumps(result)
        except (TypeError, ValueError):
            return repr(result)


def place_of(function: Callable[..., Any]) -> str:
    """``file:line`` of a function."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


def _arguments_model(function: Callable[..., Any], name: str, place: str) -> tuple[str | None, type[BaseModel]]:
    """The parameter that takes the call's context, if any, and a model of the others."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:
        raise AgentsError(place, f"tool {name!r} has a type hint that names nothing: {error}") from error
    context_parameter: str | None = None
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY}:
            raise AgentsError(place, f"tool {name!r} takes {parameter}; a model calls by name, so name each parameter")
        if parameter.name not in hints:
            raise AgentsError(
                place,
                f"tool {name!r} has no type hint for {parameter.name!r}; write one, its schema is made of them",
            )
        hint = hints[parameter.name]
        if hint is CallContext or (get_origin(hint) in {Union, types.UnionType} and CallContext in get_args(hint)):
            context_parameter = parameter.name
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        # By alias, so that a parameter may have the name of a method of pydantic's models.
        fields[f"p_{parameter.name}"] = (Annotated[hint, Field(alias=parameter.name)], default)
    try:
        model = create_model(
            f"{name}_arguments", __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields
        )
        model.model_json_schema()
    except Exception as error:
        raise AgentsError(place, f"tool {name!r} has a parameter that JSON cannot carry: {error}") from error
    return context_parameter, model


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(*, name: str | None = None, **policy: Unpack[PolicyFields]) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    **policy: Unpack[PolicyFields],
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a function a tool: ``@tool`` or ``@tool(timeout=10)``.

    Its type hints become the schema, its docstring the description. ``name`` may have groups, as in ``web.search``, so
    that globs such as ``web.*`` stand for all of one. The rest is its policy
    (:class:`~chaz.runtime.policy.ToolPolicy`), which agents and deployments may change. ``timeout`` is in seconds.
    ``idempotent`` says that a call may be made again when its worker was lost during it; otherwise the model is told
    that it may have run. Raises AgentsError with file and line when a model could not call it.
    """
    if function is not None:
        return Tool(function)

    def make(function: Callable[..., Any]) -> Tool:
        return Tool(function, name=name, **policy)

    return make
