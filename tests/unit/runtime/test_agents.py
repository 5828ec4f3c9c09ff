"""Agents: what a definition may say, and where a wrong one is reported."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from chaz.entries import Budget
from chaz.errors import AgentsError, ConfigurationError
from chaz.outcomes import Usage
from chaz.runtime.agents import Agent, Agents, load_agents
from chaz.runtime.limits import DEFAULT_WINDOW, known_window
from chaz.runtime.models import check_model_name, register_provider, resolve_model
from chaz.runtime.models.scripted import ScriptedModel, model
from chaz.runtime.tools import tool


@tool
def word_count(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())


def agent(name: str = "reader", **changes: Any) -> Agent:
    definition: dict[str, Any] = {"instructions": "Read.", "model": "scripted", **changes}
    return Agent(name, **definition)


def here() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


# A definition


def test_a_definition_is_kept_with_its_place() -> None:
    line = here() + 1
    reader = Agent("reader", instructions="Read.", model="scripted:x", tools=[word_count, "spawn_agent"], max_steps=3)
    assert reader.place == f"{__file__}:{line}"
    assert (reader.name, reader.instructions, reader.model, reader.max_steps) == ("reader", "Read.", "scripted:x", 3)
    assert reader.queue == "reader"
    assert [schema.name for schema in reader.schemas()] == ["word_count", "spawn_agent", "agent_result"]
    assert reader.tool_names == ["word_count", "spawn_agent", "agent_result"]
    assert repr(reader) == f"<Agent reader at {reader.place}>"


@pytest.mark.parametrize("name", ["a", "A", "reader", "web.search-2_x", "a" * 100])
def test_a_name_may_be(name: str) -> None:
    assert agent(name).name == name
    assert agent(queue=name).queue == name


@pytest.mark.parametrize("name", ["", " ", "2nd", "_x", ".x", "-x", "two words", "a/b", "a@b", "a\n", "é", "a" * 101])
def test_a_name_may_not_be(name: str) -> None:
    with pytest.raises(AgentsError, match="must be a letter"):
        agent(name)
    if name:
        with pytest.raises(AgentsError, match="queue"):
            agent(queue=name)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "gpt-5-mini"}, r"unknown provider 'gpt-5-mini'; known are .*openai,.* scripted"),
        ({"model": "opnai:gpt-5-mini"}, "unknown provider 'opnai'"),
        ({"model": ""}, "unknown provider ''"),
        ({"model": "openai"}, "names no model; write it as 'openai:MODEL'"),
        ({"model": "openai:"}, "names no model"),
        ({"tools": ["spawn_agnt"]}, r"no built-in tool 'spawn_agnt'; there are: .*spawn_agent"),
        ({"tools": [len]}, "decorate the function with @tool"),
        ({"tools": [word_count, word_count]}, "two tools named 'word_count'"),
        ({"tools": ["spawn_agent", "spawn_agent"]}, "two tools named 'spawn_agent'"),
        ({"may_spawn": ["writer"]}, "may_spawn is set, but 'spawn_agent' is not among its tools"),
        ({"may_spawn": "writer", "tools": ["spawn_agent"]}, "may_spawn is the text 'writer'"),
        ({"models": "scripted"}, "models is the text 'scripted'"),
        ({"child_tools": "web.*"}, "child_tools is the text"),
        ({"max_depth": -1}, "max_depth is -1"),
        ({"prices": (-1, 0)}, "its prices are"),
        ({"context_window": 0}, "its context_window is"),
        ({"context_window": 100, "reserved_output": 100}, "a larger window than what is reserved"),
        ({"reserved_output": -1}, "its reserved_output -1"),
        ({"compact_at": 0}, "compact_at is 0; use a share such as 0.7"),
        ({"compact_at": 70}, "compact_at is 70"),
        ({"compaction_model": "nobody:x"}, "unknown provider 'nobody'"),
        ({"tools": ["compact", "compact"]}, "two tools named 'compact'"),
        ({"prices": {"scripted": (1,)}}, "its prices are"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"max_concurrent": 0}, "max_concurrent is 0; use 1 or more, or None for no cap"),
        ({"timeout": -1}, "timeout is -1"),
        ({"model_timeout": 0.0}, r"model_timeout is 0\.0"),
    ],
)
def test_a_mistake_is_told_with_its_place(changes: dict[str, Any], told: str) -> None:
    arguments: dict[str, Any] = {"instructions": "Read.", "model": "scripted", **changes}
    line = here() + 2
    with pytest.raises(AgentsError, match=told) as error:
        Agent("reader", **arguments)
    assert error.value.args[0] == f"{__file__}:{line}"
    assert "'reader'" in error.value.args[1]


def test_a_tool_may_not_take_the_name_of_a_built_in_one() -> None:
    @tool(name="spawn_agent")
    def mine(text: str) -> str:
        """Do something else."""
        return text

    with pytest.raises(AgentsError, match="two tools named 'spawn_agent'"):
        agent(tools=[mine])
    with pytest.raises(AgentsError, match="two tools named 'spawn_agent'"):
        agent(tools=["spawn_agent", mine])


def test_may_spawn_takes_names_and_globs() -> None:
    lead = agent(tools=["spawn_agent"], may_spawn=["reader", "web.*"])
    names = ["reader", "Reader", "readers", "web.search", "web", "lead"]
    assert [name for name in names if lead.may_spawn_agent(name)] == ["reader", "web.search"]
    assert not agent(tools=["spawn_agent"]).may_spawn_agent("reader")


def test_an_agent_may_spawn_itself_only_by_its_very_name() -> None:
    assert not agent("web.lead", tools=["spawn_agent"], may_spawn=["web.*", "*"]).may_spawn_agent("web.lead")
    assert agent("web.lead", tools=["spawn_agent"], may_spawn=["web.lead"]).may_spawn_agent("web.lead")


def test_a_dotted_tool_is_shown_in_letters_that_models_take() -> None:
    @tool(name="web.search")
    def search(text: str) -> str:
        """Search."""
        return text

    reader = agent(tools=[search, word_count])
    assert [schema.name for schema in reader.schemas()] == ["web__search", "word_count"]
    assert reader.tool_names == ["web.search", "word_count"]
    assert [reader.named(shown) for shown in ("web__search", "web.search", "word_count", "other")] == [
        "web.search",
        "web.search",
        "word_count",
        "other",
    ]

    @tool(name="web__search")
    def twin(text: str) -> str:
        """Search."""
        return text

    with pytest.raises(AgentsError, match=r"models would see both 'web\.search' and 'web__search' as"):
        agent(tools=[search, twin])


def test_a_scope_takes_tools_away() -> None:
    reader = agent(tools=[word_count, "spawn_agent"])
    assert [schema.name for schema in reader.schemas([["*_*"], ["word_*", "agent_result"]])] == [
        "word_count",
        "agent_result",
    ]
    assert reader.schemas([["*"], []]) == []


def test_the_room_of_a_model_is_its_window_less_what_is_reserved() -> None:
    assert agent().room("scripted") == 128_000 - 8_192
    assert agent(context_window=8_000).room("scripted") == 6_000
    assert agent(context_window=8_000, reserved_output=1_000).room("scripted") == 7_000
    assert agent(context_window={"openai:small": 4_000}, reserved_output=100).room("openai:small") == 3_900
    assert agent(context_window={"openai:small": 4_000}, reserved_output=0).room("scripted") == 128_000


def test_the_window_of_a_known_model_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_window("openai:gpt-4o") == 128_000
    assert known_window("anthropic:claude-sonnet-4-5") == 200_000
    assert known_window("openai:nobody-knows-it") == DEFAULT_WINDOW
    assert known_window("unknown:model") == DEFAULT_WINDOW
    known_window.cache_clear()
    monkeypatch.setitem(sys.modules, "genai_prices.data_snapshot", None)
    assert known_window("anthropic:claude-sonnet-4-5") == DEFAULT_WINDOW
    known_window.cache_clear()


def test_what_tokens_cost_is_as_the_prices_say() -> None:
    usage = Usage(prompt=2_000_000, completion=500_000)
    priced = agent(prices=(0.1, 2))
    assert priced.cost(priced.model, usage) == Decimal("1.2")
    assert priced.cost("scripted:dear", usage) is None
    assert agent(prices={"scripted:dear": (1, 0)}).cost("scripted:dear", usage) == 2
    assert agent().cost("scripted", usage) is None
    assert agent(prices=(0, 0)).cost("scripted", usage) == 0


def test_cached_tokens_have_a_price_of_their_own_if_one_is_said() -> None:
    usage = Usage(prompt=3_000_000, cached=2_000_000, completion=1_000_000, reasoning=500_000)
    assert agent(prices=(1, 10, 0.25)).cost("scripted", usage) == Decimal("11.5")
    assert agent(prices=(1, 10)).cost("scripted", usage) == 13


def test_which_models_it_may_be_run_with() -> None:
    reader = agent(model="scripted:own", models=["scripted:other", "openai:gpt-5*"])
    names = ["scripted:own", "scripted:other", "scripted:third", "openai:gpt-5-mini", "openai:o3"]
    assert [name for name in names if reader.may_run_with(name)] == [
        "scripted:own",
        "scripted:other",
        "openai:gpt-5-mini",
    ]


def test_the_version_is_that_of_the_definition() -> None:
    @tool(name="word_count")
    def other(text: str) -> int:
        """Count the words of a text, again."""
        return len(text)

    definition: dict[str, Any] = {"tools": [word_count, "spawn_agent"], "may_spawn": ["writer"], "max_steps": 3}
    version = agent(**definition).version
    assert agent("other", **definition).version == version
    changes: list[dict[str, Any]] = [
        {"instructions": "Write."},
        {"model": "scripted:other"},
        {"max_steps": 4},
        {"max_depth": 4},
        {"models": ["scripted:other"]},
        {"child_tools": []},
        {"budget": Budget(steps=5)},
        {"prices": (1, 2)},
        {"context_window": 8000},
        {"reserved_output": 1000},
        {"compact_at": 0.7},
        {"compaction_model": "scripted:small"},
        {"may_spawn": ["writer", "chef"]},
        {"tools": ["spawn_agent"]},
        {"tools": [other, "spawn_agent"]},
        {"policies": {"word_count": {"timeout": 5}}},
    ]
    versions = {agent(**{**definition, **change}).version for change in changes}
    assert len(versions - {version}) == len(changes)


def test_a_share_of_what_the_model_can_be_shown_is_full() -> None:
    assert agent(context_window=8_000, reserved_output=1_000, compact_at=0.5).full_from("scripted") == 3_500
    assert agent(context_window=8_000).full_from("scripted") is None


# A model's name


def test_a_providers_model_is_made_by_its_factory() -> None:
    register_provider("test-provider", model)
    check_model_name("test-provider:x")
    assert isinstance(resolve_model("test-provider:x"), ScriptedModel)
    with pytest.raises(ConfigurationError, match="names no model"):
        check_model_name("test-provider")


def test_a_model_whose_package_is_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> None:
        raise ModuleNotFoundError(f"No module named 'openai', wanted by {name}", name="openai")

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(ConfigurationError, match=r"needs the package 'openai'; .*pip install 'chaz\[openai\]'"):
        resolve_model("openai:gpt-5-mini")


# The agents of a worker


def test_agents_are_had_by_name() -> None:
    reader, writer = agent("reader"), agent("writer")
    agents = Agents([reader, writer, reader])
    assert (dict(agents), len(agents)) == ({"reader": reader, "writer": writer}, 2)


def test_two_agents_of_one_name_are_told_with_both_places() -> None:
    first, second = agent("reader"), Agent("reader", instructions="", model="scripted")
    with pytest.raises(AgentsError, match="'reader' is defined already at ") as error:
        Agents([first, second])
    assert error.value.args[0] == second.place
    assert first.place in error.value.args[1]


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write an agents module that can be imported in this test."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)

    def write(name: str, *lines: str) -> Path:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
        importlib.invalidate_caches()
        return path

    yield write
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def defined(name: str) -> tuple[str, str]:
    return "from chaz import Agent, tool", f'{name} = Agent("{name}", instructions="", model="scripted")'


def test_agents_are_gathered_from_all_modules(write: Write) -> None:
    write("shop_a", *defined("reader"), *defined("writer"))
    write("shop_b.agents", "from shop_a import writer", *defined("chef"), "other_name = chef")
    assert list(load_agents("shop_a")) == ["reader", "writer"]
    assert list(load_agents(" shop_a , shop_b.agents,")) == ["reader", "writer", "chef"]


@pytest.mark.parametrize("modules", ["", " ", ",", " , "])
def test_no_module_is_an_error_that_names_the_variable(modules: str) -> None:
    with pytest.raises(ConfigurationError, match=r"CHAZ_AGENTS=package\.module"):
        load_agents(modules)


@pytest.mark.parametrize(
    ("name", "missing"),
    [("nowhere_x", "nowhere_x"), ("nowhere_x.agents", "nowhere_x"), ("shop_c.agents", "shop_c.agents")],
)
def test_a_module_that_does_not_exist(write: Write, name: str, missing: str) -> None:
    write("shop_c.other", *defined("reader"))
    with pytest.raises(ConfigurationError, match=f"module '{name}', and there is no module '{missing}'") as error:
        load_agents(name)
    assert not isinstance(error.value, AgentsError)


def test_a_module_without_agents(write: Write) -> None:
    path = write("shop_d", "from chaz import Agent", "agents = [Agent]")
    with pytest.raises(AgentsError, match="'shop_d' defines no agent") as error:
        load_agents("shop_d")
    assert error.value.args[0] == str(path)


def test_a_budget_that_limits_a_cost_nobody_knows(write: Write) -> None:
    budget = "budget=Budget(cost=1)"
    path = write(
        "shop_costly", "from chaz import Agent, Budget", f"x = Agent('x', instructions='', model='scripted', {budget})"
    )
    with pytest.raises(AgentsError, match="limits the cost, and the price of 'scripted' is not known") as error:
        load_agents("shop_costly")
    assert error.value.args[0] == f"{path}:2"
    priced = f"x = Agent('x', instructions='', model='scripted', prices=(0, 1), {budget})"
    write("shop_priced", "from chaz import Agent, Budget", priced)
    assert list(load_agents("shop_priced")) == ["x"]


def test_two_modules_that_define_the_same_agent(write: Write) -> None:
    first, second = write("shop_e", *defined("reader")), write("shop_f", "", *defined("reader"))
    with pytest.raises(AgentsError, match=f"defined already at {first}:2") as error:
        load_agents("shop_e,shop_f")
    assert error.value.args[0] == f"{second}:3"


@pytest.mark.parametrize(
    ("lines", "line", "told"),
    [
        (["", "import nowhere_y"], 2, "importing 'shop_g' failed: No module named 'nowhere_y'"),
        (["import chaz.nowhere"], 1, "No module named 'chaz.nowhere'"),
        (["from chaz import Agnt"], 1, "ImportError: cannot import name 'Agnt'"),
        (["", "", "1 / 0"], 3, "importing 'shop_g' failed: ZeroDivisionError"),
        (["def broken(:"], 1, "importing 'shop_g' failed: invalid syntax"),
        (["from chaz import Agent", "Agent('x', instructions='', model='scripted', max_steps='3')"], 2, "TypeError"),
        (["from chaz import Agent", "", "Agent('x', instructions='', model='nope')"], 3, "unknown provider 'nope'"),
        (["from chaz import tool", "@tool", "def f(x):", "    'Do.'"], 2, "no type hint for 'x'"),
    ],
)
def test_a_mistake_in_a_module_is_told_with_file_and_line(write: Write, lines: list[str], line: int, told: str) -> None:
    path = write("shop_g", *lines)
    with pytest.raises(AgentsError, match=told) as error:
        load_agents("shop_g")
    assert error.value.args[0] == f"{path}:{line}"


@pytest.mark.parametrize(("lines", "line"), [(["", "1 / 0"], 2), (["import nowhere_z"], 1), (["x = 1", "", "if:"], 3)])
def test_a_mistake_in_what_a_module_imports_is_told_there(write: Write, lines: list[str], line: int) -> None:
    culprit = write("shop_helper", *lines)
    write("shop_h", "import shop_helper", *defined("reader"))
    with pytest.raises(AgentsError, match="importing 'shop_h' failed") as error:
        load_agents("shop_h")
    assert error.value.args[0] == f"{culprit}:{line}"
