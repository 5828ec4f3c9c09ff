"""What models cost by the price list."""

from __future__ import annotations

import sys
from decimal import Decimal

import pytest

from chaz.outcomes import Usage
from chaz.runtime.prices import listed_cost

USED = Usage(prompt=1_000_000, completion=1_000_000, cached=500_000)


@pytest.fixture(autouse=True)
def openai_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


def test_a_known_model_has_its_price() -> None:
    cost = listed_cost("openai:gpt-5-mini", USED)
    assert cost is not None
    assert cost > 0
    # The same model by the name of one of its versions, and cached tokens for less.
    assert listed_cost("openai:gpt-5-mini-2025-08-07", USED) == cost
    uncached = listed_cost("openai:gpt-5-mini", USED.model_copy(update={"cached": 0}))
    assert uncached is not None
    assert uncached > cost


@pytest.mark.parametrize("model", ["openai:no-such-model", "elsewhere:gpt-5-mini", "scripted", "scripted:gpt-5-mini"])
def test_another_has_none(model: str) -> None:
    assert listed_cost(model, USED) is None


def test_behind_another_endpoint_it_is_that_endpoint_s_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    assert listed_cost("openai:gpt-5-mini", USED) is None
    monkeypatch.setenv("OPENAI_BASE_URL", "https://openrouter.ai/api/v1")
    assert listed_cost("openai:openai/gpt-5-mini", USED) is not None


def test_what_a_provider_counts_wrongly_is_priced_all_the_same() -> None:
    assert listed_cost("openai:gpt-5-mini", Usage(prompt=10, cached=20)) is not None


def test_without_the_list_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    assert listed_cost("openai:gpt-5-mini", USED) is None


def test_nothing_used_costs_nothing() -> None:
    assert listed_cost("openai:gpt-5-mini", Usage()) == Decimal(0)
