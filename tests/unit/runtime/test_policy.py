"""A tool's policy: what it may say, how agents and deployments change it, and which mistakes are told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from chaz import Agent, tool
from chaz.errors import AgentsError, ConfigurationError
from chaz.runtime.agents import load_agents
from chaz.runtime.policy import Overrides, Rate, ToolPolicy, parse_rate, policy_of


@tool(
    name="web.send",
    risk="medium",
    approval="always",
    approval_timeout=30,
    timeout=5,
    rate_limit="10/m",
    idempotent=True,
    sensitive_params=["token"],
    retries=2,
)
def web_send(to: str, token: str, password: str) -> str:
    """Send something."""
    return to + token + password


@tool
def look(at: str) -> str:
    """Look at something."""
    return at


def agent(**changes: Any) -> Agent:
    definition: dict[str, Any] = {"instructions": "", "model": "scripted", "tools": [web_send, look], **changes}
    return Agent("mailer", **definition)


SENDS = ToolPolicy(
    risk="medium",
    approval="always",
    approval_timeout=30,
    timeout=5,
    rate_limit="10/m",
    idempotent=True,
    sensitive_params=("token",),
    retries=2,
)


def test_a_tool_says_its_policy_and_has_defaults() -> None:
    assert agent().policy("web.send") == SENDS
    assert agent().policy("look") == ToolPolicy()
    assert (ToolPolicy().timeout, ToolPolicy().approval, ToolPolicy().rate) == (60, "never", None)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("10/m", Rate(10, 6)),
        ("1/s", Rate(1, 1)),
        ("100/h", Rate(100, 36)),
        ("4", Rate(4, 0.25)),
        ("0.5/s", Rate(1, 2)),
        ("2.5/m", Rate(2, 24)),
    ],
)
def test_a_rate_is_in_celerys_notation(text: str, rate: Rate) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["", "0/s", "-1/s", "10/d", "10 /m", "ten/m", "10/m\n", "1e3/s", "inf", "/s", "9999999/s"]
)
def test_what_is_no_rate_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="write a number more than 0"):
        parse_rate(text)
    with pytest.raises(ValueError, match=r"^rate_limit is "):
        policy_of({"rate_limit": text})


def test_an_override_changes_only_what_it_names() -> None:
    changed = agent(policies={"web.*": {"approval": "never", "timeout": 9}}).policy("web.send")
    assert changed == SENDS.model_copy(update={"approval": "never", "timeout": 9})
    assert agent(policies={"web.*": {}}).policy("web.send") == SENDS


def test_none_is_a_value_too() -> None:
    assert agent(policies={"*": {"rate_limit": None, "approval_timeout": None}}).policy("web.send").rate is None


def test_later_globs_win_and_the_very_name_wins_over_all() -> None:
    policies = {
        "look": {"risk": "high"},
        "*": {"risk": "low", "timeout": 1},
        "l??k": {"timeout": 2, "approval_timeout": 2},
    }
    found = agent(policies=policies).policy("look")
    assert (found.risk, found.timeout, found.approval_timeout) == ("high", 2, 2)


def test_the_deployment_has_the_last_word() -> None:
    mailer = agent(policies={"web.send": {"risk": "low", "timeout": 7}, "look": {"timeout": 8}})
    mailer.govern(Overrides({"*": {"risk": "high", "timeout": 3}}))
    found = mailer.policy("web.send")
    assert found == SENDS.model_copy(update={"risk": "high", "timeout": 3})
    assert mailer.policy("look").timeout == 3
    # Of a deployment that says something else, nothing is left.
    mailer.govern(Overrides({}))
    assert (mailer.policy("web.send").timeout, mailer.policy("look").timeout) == (7, 8)


def test_sensitive_parameters_are_only_ever_added() -> None:
    mailer = agent(policies={"web.send": {"sensitive_params": []}})
    assert mailer.policy("web.send").sensitive_params == ("token",)
    mailer.govern(Overrides({"*": {"sensitive_params": ["password", "at"]}}))
    assert mailer.policy("web.send").sensitive_params == ("token", "password")
    assert mailer.policy("look").sensitive_params == ("at",)


def test_built_in_tools_are_asked_for_and_not_otherwise_called() -> None:
    lead = agent(tools=[look, "spawn_agent"], policies={"*": {"idempotent": True, "retries": 1, "risk": "high"}})
    assert lead.policy("look").retries == 1
    assert lead.policy("spawn_agent") == ToolPolicy(risk="high")
    with pytest.raises(AgentsError, match="'spawn_agent': it is built in, and takes no 'timeout'"):
        agent(tools=["spawn_agent"], policies={"spawn_agent": {"timeout": 3}})


def test_a_tool_that_it_lacks_has_the_default() -> None:
    assert agent(policies={"*": {"idempotent": True}}).policy("other") == ToolPolicy()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"colour": "red"}, "a policy has no 'colour'; it has risk, approval"),
    ({"risk": "huge"}, "risk is 'huge': input should be 'low', 'medium' or 'high'"),
    ({"approval": True}, "approval is True"),
    ({"timeout": 0}, "timeout is 0"),
    ({"timeout": float("inf")}, "timeout is inf"),
    ({"approval_timeout": -1}, "approval_timeout is -1"),
    ({"rate_limit": 10}, "rate_limit is 10"),
    ({"rate_limit": "10/d"}, "rate_limit is '10/d'; write a number more than 0"),
    ({"idempotent": "yes"}, "idempotent is 'yes'"),
    ({"retries": -1, "idempotent": True}, "retries is -1"),
    ({"retries": 1.5, "idempotent": True}, r"retries is 1\.5"),
    ({"retries": 1}, "retries is 1, but the tool is not idempotent"),
    ({"sensitive_params": "at"}, "sensitive_params is 'at'"),
    ({"sensitive_params": ["att"]}, "sensitive_params names 'att', which is none of its parameters: at"),
]


@pytest.mark.parametrize(("fields", "told"), WRONG)
def test_a_mistake_is_told_where_it_is_made(fields: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(AgentsError, match=f"tool 'look': {told}") as error:
        tool(**fields)(look.function)
    assert error.value.args[0] == look.place
    with pytest.raises(AgentsError, match=f"agent 'mailer': policies: 'look': {told}") as error:
        agent(policies={"look": fields})
    assert error.value.args[0].startswith(f"{__file__}:")


SHOP = """
from chaz import Agent, tool
@tool
def look(at: str) -> str:
    "Look."
    return at
reader = Agent("reader", instructions="", model="scripted", tools=[look], policies={"look": {"timeout": 5}})
writer = Agent("writer", instructions="", model="scripted", tools=["spawn_agent"], may_spawn=["reader"])
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "policy_shop.py").write_text(SHOP)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "policy_shop", raising=False)
    return "policy_shop"


@pytest.mark.parametrize(("fields", "told"), WRONG)
def test_a_mistake_of_the_deployment_names_the_setting(fields: dict[str, Any], told: str, shop: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^CHAZ_TOOL_POLICIES: 'look': {told}"):
        load_agents(shop, {"look": fields})


@pytest.mark.parametrize("glob", ["nothing_*", "look"])
def test_of_a_glob_that_matches_nothing_the_fields_count_all_the_same(glob: str, shop: str) -> None:
    with pytest.raises(ConfigurationError, match="timeout is -1"):
        load_agents(shop, {glob: {"timeout": -1}})


def test_a_name_that_no_agent_here_has_is_a_mistake_and_a_glob_is_none(shop: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^CHAZ_TOOL_POLICIES: no agent here has a tool 'lok'; they have .*look"
    ):
        load_agents(shop, {"lok": {"timeout": 3}})
    with pytest.raises(AgentsError, match=r"policies: it has no tool 'lok'; it has web\.send, look"):
        agent(policies={"lok": {"timeout": 3}})
    load_agents(shop, {"lok*": {"timeout": 3}})
    assert agent(policies={"lok*": {"timeout": 3}}).policy("look").timeout == 60


def test_a_worker_loads_its_agents_under_the_deployments_policies(shop: str) -> None:
    agents = load_agents(shop, {"look": {"risk": "high"}, "spawn_agent": {"approval": "always"}})
    assert agents["reader"].policy("look") == ToolPolicy(timeout=5, risk="high")
    assert agents["writer"].policy("spawn_agent").approval == "always"
    governed = agents["reader"].version
    assert load_agents(shop)["reader"].version != governed
