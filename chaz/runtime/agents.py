"""Agents as a deployment defines them, and the registry of those that a worker serves."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from types import ModuleType
from typing import Any

from chaz.channels import AUDIT, AUDIT_DEAD, ISOLATION
from chaz.entries import Budget
from chaz.errors import AgentsError, ConfigurationError
from chaz.lineage import Scope, in_scope, matches
from chaz.outcomes import Usage
from chaz.planning import Schedule
from chaz.runtime.builtin import BUILT_IN, BUILT_IN_NAMES, SPAWN_AGENT
from chaz.runtime.limits import RESERVED_OUTPUT, known_window
from chaz.runtime.models import ToolSchema, check_model_name
from chaz.runtime.policy import Overrides, PolicyFields, ToolPolicy
from chaz.runtime.prices import listed_cost
from chaz.runtime.tools import Tool

RESERVED_QUEUES = frozenset({ISOLATION, AUDIT, AUDIT_DEAD, "default"})
BUILT_IN_FIELDS = frozenset({"risk", "approval", "approval_timeout"})
"""What a policy may say of a built-in tool; there is no function to be called otherwise."""
Prices = tuple[float, float] | tuple[float, float, float]
"""Of a million tokens: of prompts, of completions, and of cached ones in prompts."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,99}")


class Agent:
    """An agent: who it is, what it may use, how far it may go. Define it at the top level of an agents module.

    ``model`` is a name such as ``openai:gpt-5-mini``, or ``scripted``; ``models`` are others (globs too) that whoever
    spawns it may choose. ``tools`` holds functions made by :func:`chaz.tool`; ``"spawn_agent"`` among them gives the
    built-in tools ``spawn_agent`` and ``agent_result``, ``"schedules"`` those for its schedules. ``policies`` changes
    how they may be called, by names and globs: ``{"web.*": {"approval": "always"}}``.

    Limits of a run: ``max_steps`` is the most turns of its model, ``timeout`` the seconds from its making to its
    deadline, ``model_timeout`` those of one turn. Limits of all that it spawns: ``may_spawn`` names the agents (globs
    such as ``web.*`` too, but itself only by its very name), ``max_depth`` says how many levels deep, ``child_tools``
    which tools at most (globs; None: all that they have), ``budget`` what a run that nobody spawned and all below it
    may use together. ``prices`` are those of a million tokens, prompt and completion, and cached ones of the prompt (as
    the others, if not given), of its model, or by a model's name. What has none costs what ``genai-prices`` says, in
    dollars, where that is installed; else its cost is not known.

    ``context_window`` is how many tokens its model holds, or by a model's name, as ``prices`` are; what has none holds
    what ``genai-prices`` says where that is installed, else 128,000. Of those ``reserved_output`` are kept free for the
    answer (default 8,192, a quarter of the window at most). The rest is for its instructions, its tools and as much
    of the newest conversation as fits.

    ``compact_at`` is a share of what its model can be shown, such as 0.7: once a run has ended whose last prompt was
    that long, the session is summarised, by ``compaction_model``, if not by its own model. None: only when it is
    asked for; the built-in tool ``"compact"`` lets the agent ask.

    ``max_concurrent`` caps the runs of it that are running at once, on all machines together; the definition that a
    worker registered last holds. ``queue`` is the broker's queue it is served from, its own by default. ``schedules``
    say when it wakes by itself; a worker's start brings those that there are in line with them. Raises
    :class:`~chaz.errors.AgentsError` with file and line.
    """

    def __init__(
        self,
        name: str,
        *,
        instructions: str,
        model: str,
        models: Sequence[str] = (),
        tools: Sequence[Tool | str] = (),
        policies: Mapping[str, PolicyFields] | None = None,
        may_spawn: Sequence[str] = (),
        max_depth: int = 16,
        child_tools: Sequence[str] | None = None,
        budget: Budget | None = None,
        prices: Prices | Mapping[str, Prices] | None = None,
        context_window: int | Mapping[str, int] | None = None,
        reserved_output: int | None = None,
        max_steps: int = 30,
        timeout: float = 3600.0,
        model_timeout: float = 300.0,
        compact_at: float | None = None,
        compaction_model: str | None = None,
        max_concurrent: int | None = None,
        queue: str | None = None,
        schedules: Sequence[Schedule] = (),
    ) -> None:
        frame = traceback.extract_stack(limit=2)[0]
        self.place = f"{frame.filename}:{frame.lineno}"
        self.name = name
        self.instructions = instructions
        self.model = model
        self.models = self._names("models", models)
        self.may_spawn = self._names("may_spawn", may_spawn)
        self.max_depth = max_depth
        self.child_tools = None if child_tools is None else self._names("child_tools", child_tools)
        self.budget = budget or Budget()
        self.prices: Mapping[str, Prices] = {model: prices} if isinstance(prices, tuple) else prices or {}
        self.context_window: Mapping[str, int] = (
            {model: context_window} if isinstance(context_window, int) else context_window or {}
        )
        self.reserved_output = reserved_output
        self.max_steps = max_steps
        self.timeout = timeout
        self.model_timeout = model_timeout
        self.compact_at = compact_at
        self.compaction_model = compaction_model
        self.max_concurrent = max_concurrent
        self.queue = queue or name
        self.schedules = tuple(schedules)
        self.tools: dict[str, Tool] = {}
        self._built_in: dict[str, ToolSchema] = {}
        self._shown: dict[str, str] = {}
        self._check()
        for item in tools:
            self._add(item)
        if self.may_spawn and SPAWN_AGENT not in self._built_in:
            raise self._error("may_spawn is set, but 'spawn_agent' is not among its tools; add it")
        self._policies = self._own_policies(policies or {})
        self._in_force = self._policies

    def _names(self, what: str, names: Sequence[str]) -> tuple[str, ...]:
        if isinstance(names, str):
            raise self._error(f"{what} is the text {names!r}; write a list: [{names!r}]")
        return tuple(names)

    def _check(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise self._error("its name must be a letter, then letters, digits, '_', '.' or '-', 100 at most")
        if not _NAME.fullmatch(self.queue):
            raise self._error(f"its queue {self.queue!r} must be named like an agent")
        if self.queue in RESERVED_QUEUES:
            raise self._error(f"the queue {self.queue!r} is chaz's own; give it another with queue=…")
        for limit in ("max_steps", "timeout", "model_timeout"):
            if getattr(self, limit) <= 0:
                raise self._error(f"{limit} is {getattr(self, limit)}; use more than 0")
        if self.max_concurrent is not None and self.max_concurrent < 1:
            raise self._error(f"max_concurrent is {self.max_concurrent}; use 1 or more, or None for no cap")
        if self.compact_at is not None and not 0 < self.compact_at <= 1:
            raise self._error(f"compact_at is {self.compact_at}; use a share such as 0.7, or None for never")
        if self.max_depth < 0:
            raise self._error(f"max_depth is {self.max_depth}; use 0 for no children at all, or more")
        for prices in self.prices.values():
            if len(prices) not in (2, 3) or any(price < 0 for price in prices):
                raise self._error(
                    f"its prices are {dict(self.prices)}; write prompt and completion, and if need be cached, 0 or more"
                )
        reserved = self.reserved_output or 0
        if reserved < 0 or any(window <= reserved for window in self.context_window.values()):
            raise self._error(
                f"its context_window is {dict(self.context_window)}, its reserved_output {reserved}; "
                "use more than 0, and a larger window than what is reserved of it"
            )
        ids = [schedule.id for schedule in self.schedules]
        if repeated := [id for id in ids if ids.count(id) > 1]:
            raise self._error(f"it has two schedules {repeated[0]!r}; rename one")
        try:
            check_model_name(self.model)
            if self.compaction_model is not None:
                check_model_name(self.compaction_model)
        except ConfigurationError as error:
            raise self._error(str(error)) from None

    def _add(self, item: object) -> None:
        if isinstance(item, str):
            if item not in BUILT_IN:
                known = ", ".join(sorted(BUILT_IN))
                raise self._error(f"there is no built-in tool {item!r}; there are: {known}")
            if item in self._built_in:
                raise self._error(f"it has two tools named {item!r}; name it once")
            for schema in BUILT_IN[item]:
                self._show(schema.name, schema.name)
                self._built_in[schema.name] = schema
            return
        if not isinstance(item, Tool):
            raise self._error(f"{item!r} is not a tool; decorate the function with @tool")
        if item.name in BUILT_IN_NAMES:
            raise self._error(f"it has two tools named {item.name!r}, which is built in; rename one with @tool(name=…)")
        self._show(item.name, item.shown)
        self.tools[item.name] = item

    def _show(self, name: str, shown: str) -> None:
        other = self._shown.setdefault(shown, name)
        if other != name:
            raise self._error(
                f"models would see both {other!r} and {name!r} as {shown!r}; rename one with @tool(name=…)"
            )
        if name in self.tools or name in self._built_in:
            raise self._error(f"it has two tools named {name!r}; rename one with @tool(name=…)")

    def _error(self, what: str) -> AgentsError:
        return AgentsError(self.place, f"agent {self.name!r}: {what}")

    @property
    def tool_names(self) -> list[str]:
        """The names of its tools, the built-in ones included."""
        return [*self.tools, *self._built_in]

    def schemas(self, scope: Scope = ()) -> list[ToolSchema]:
        """Its tools that are in scope, as they are shown to a model."""
        own = [(name, tool.schema) for name, tool in self.tools.items()]
        return [schema for name, schema in [*own, *self._built_in.items()] if in_scope(scope, name)]

    def named(self, shown: str) -> str:
        """The name of the tool that a model calls by ``shown``; the same, if there is none."""
        return self._shown.get(shown, shown)

    def policy(self, name: str) -> ToolPolicy:
        """How its tool of this name may be called, in force here: the tool's word, its own, and the deployment's."""
        return self._in_force.get(name, ToolPolicy())

    def parameters(self, name: str) -> list[str]:
        """The names of the parameters of its tool of this name; none, if there is no such tool."""
        if name in self.tools:
            return self.tools[name].parameters
        built_in = [schema for schemas in BUILT_IN.values() for schema in schemas if schema.name == name]
        return [parameter for schema in built_in for parameter in schema.parameters["properties"]]

    def govern(self, deployment: Overrides) -> None:
        """Let the deployment have the last word on how its tools may be called. Raises ValueError."""
        self._in_force = self._changed(self._policies, deployment)

    def _own_policies(self, changes: Mapping[str, Any]) -> dict[str, ToolPolicy]:
        policies = {name: ToolPolicy() for name in self._built_in}
        policies |= {name: tool.policy for name, tool in self.tools.items()}
        try:
            overrides = Overrides(changes)
            for name in overrides.named:
                if name not in policies:
                    known = ", ".join(policies) or "none"
                    raise ValueError(f"it has no tool {name!r}; it has {known}, and a glob may match nothing")
            return self._changed(policies, overrides)
        except ValueError as error:
            raise self._error(f"policies: {error}") from None

    def _changed(self, policies: Mapping[str, ToolPolicy], overrides: Overrides) -> dict[str, ToolPolicy]:
        for name in self._built_in:
            if beyond := [field for field in overrides.named.get(name, ()) if field not in BUILT_IN_FIELDS]:
                known = ", ".join(sorted(BUILT_IN_FIELDS))
                raise ValueError(f"{name!r}: it is built in, and takes no {beyond[0]!r}; it takes {known}")
        changed: dict[str, ToolPolicy] = {}
        for name, policy in policies.items():
            if name in self._built_in:
                changed[name] = overrides.over(policy, name, (), BUILT_IN_FIELDS)
            else:
                changed[name] = overrides.over(policy, name, self.tools[name].parameters)
        return changed

    def may_spawn_agent(self, name: str) -> bool:
        """Whether it may spawn the agent of this name; itself only if its very name is listed, whatever globs match."""
        return name in self.may_spawn or (name != self.name and matches(name, self.may_spawn))

    def may_run_with(self, model: str) -> bool:
        """Whether its runs may be asked to use this model."""
        return model == self.model or matches(model, self.models)

    def cost(self, model: str, usage: Usage) -> Decimal | None:
        """What this usage of a model costs; None where neither ``prices`` nor the price list knows the model."""
        prices = self.prices.get(model)
        if prices is None:
            return listed_cost(model, usage)
        prompt, completion, cached = (Decimal(str(price)) for price in (*prices, prices[0])[:3])
        reused = min(usage.cached, usage.prompt)
        return (prompt * (usage.prompt - reused) + cached * reused + completion * usage.completion) / 1_000_000

    def check_budget(self) -> None:
        """Raise AgentsError where its budget limits a cost that could not be counted."""
        if self.budget.cost is not None and self.cost(self.model, Usage()) is None:
            raise self._error(
                f"its budget limits the cost, and the price of {self.model!r} is not known; say it with prices=…"
            )

    def room(self, model: str) -> int:
        """Tokens that a model can be shown: its window less what is kept free for the answer."""
        window = self.context_window.get(model) or known_window(model)
        reserved = min(RESERVED_OUTPUT, window // 4) if self.reserved_output is None else self.reserved_output
        return window - reserved

    def full_from(self, model: str) -> int | None:
        """Tokens of a model's prompt from which on the session is to be summarised; None: from none on."""
        return None if self.compact_at is None else int(self.compact_at * self.room(model))

    @property
    def version(self) -> str:
        """Changes with the definition; recorded with each step."""
        facts: list[object] = [
            self.instructions,
            self.model,
            self.models,
            self.may_spawn,
            self.max_steps,
            self.max_depth,
            self.compact_at,
            self.compaction_model,
        ]
        facts += [dict(self.context_window), self.reserved_output]
        facts += [self.child_tools, self.budget.model_dump(), dict(self.prices)]
        facts += [schema.model_dump() for schema in self.schemas()]
        facts += [[name, policy.model_dump()] for name, policy in self._in_force.items()]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]

    def __repr__(self) -> str:
        return f"<Agent {self.name} at {self.place}>"


class Agents(Mapping[str, Agent]):
    """The agents of a worker, by name."""

    def __init__(self, agents: Sequence[Agent]) -> None:
        self._agents: dict[str, Agent] = {}
        for agent in agents:
            other = self._agents.setdefault(agent.name, agent)
            if other is not agent:
                raise AgentsError(agent.place, f"agent {agent.name!r} is defined already at {other.place}; rename one")

    def __getitem__(self, name: str) -> Agent:
        return self._agents[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._agents)

    def __len__(self) -> int:
        return len(self._agents)


def load_agents(modules: str, policies: Mapping[str, Mapping[str, Any]] | None = None) -> Agents:
    """Import the modules named (comma-separated) and gather the agents at their top level, under these policies.

    Raises ConfigurationError where none is named or a policy is wrong, AgentsError with file and line for a mistake
    inside one.
    """
    names = [name.strip() for name in modules.split(",") if name.strip()]
    if not names:
        raise ConfigurationError(
            "no agents module: set CHAZ_AGENTS=package.module (or use --agents) to the module that defines your agents"
        )
    found: dict[int, Agent] = {}
    for name in names:
        module = _import(name)
        mine = [value for value in vars(module).values() if isinstance(value, Agent)]
        if not mine:
            raise AgentsError(
                getattr(module, "__file__", None) or name,
                f'module {name!r} defines no agent; write one at its top level: Agent("name", …)',
            )
        found |= {id(agent): agent for agent in mine}
    agents = Agents(list(found.values()))
    _govern(agents, policies or {})
    for agent in agents.values():
        agent.check_budget()
    return agents


def _govern(agents: Agents, policies: Mapping[str, Mapping[str, Any]]) -> None:
    try:
        overrides = Overrides(policies)
        known = sorted({name for agent in agents.values() for name in agent.tool_names})
        for name in overrides.named:
            if name not in known:
                tools = ", ".join(known) or "none"
                raise ValueError(f"no agent here has a tool {name!r}; they have {tools}, and a glob may match nothing")
        for agent in agents.values():
            agent.govern(overrides)
    except ValueError as error:
        raise ConfigurationError(f"CHAZ_TOOL_POLICIES: {error}") from None


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except AgentsError:
        raise
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigurationError(
                f"CHAZ_AGENTS names the module {name!r}, and there is no module {error.name!r} "
                f"in {', '.join(path or '.' for path in sys.path[:3])} …; is it installed, or in this folder?"
            ) from error
        raise AgentsError(_place(error, name), f"importing {name!r} failed: {error}") from error
    except SyntaxError as error:
        raise AgentsError(f"{error.filename}:{error.lineno}", f"importing {name!r} failed: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise AgentsError(_place(error, name), f"importing {name!r} failed: {type(error).__name__}: {error}") from error


def _place(error: BaseException, name: str) -> str:
    """``file:line`` of the last frame before the error that is not the import system's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else name
