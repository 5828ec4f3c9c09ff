"""What a child inherits: scopes that only narrow, and answers that code can tell apart."""

from __future__ import annotations

import pytest

from chaz.lineage import Scope, answer_of, in_scope
from chaz.outcomes import MAX_RESULT, RunOutcome, RunState

NAMES = ["read", "web.search", "web.fetch", "spawn_agent"]


NARROWED: list[tuple[Scope, list[str]]] = [
    ([], NAMES),
    ([["*"]], NAMES),
    ([["web.*"]], ["web.search", "web.fetch"]),
    ([["read", "web.search"]], ["read", "web.search"]),
    ([["web.*"], ["*.search", "read"]], ["web.search"]),
    ([["web.*"], ["read"]], []),
    ([[]], []),
    ([[], ["*"]], []),
    ([["WEB.*"]], []),
]


@pytest.mark.parametrize(("scope", "left"), NARROWED)
def test_a_level_takes_tools_away_and_gives_none(scope: Scope, left: list[str]) -> None:
    assert [name for name in NAMES if in_scope(scope, name)] == left


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("model", "failed"),
        ("crashes", "failed"),
        ("internal", "failed"),
        ("deadline", "timed_out"),
        ("expired", "timed_out"),
        ("unknown-agent", "unknown_agent"),
        ("budget", "over_budget"),
    ],
)
def test_a_failed_child_is_an_error_of_its_kind(reason: str, word: str) -> None:
    answer = answer_of("reader", RunOutcome(state="failed", reason=reason, text="no luck"))
    assert (answer.kind, answer.error) == ("error", word)
    assert answer.content == f"{word}: agent reader failed ({reason}): no luck"


def test_a_cancelled_child_is_told_of_as_cancelled() -> None:
    answer = answer_of("reader", RunOutcome(state="cancelled", reason="cancelled", text="by ada"))
    assert (answer.kind, answer.error) == ("cancelled", "cancelled")
    assert answer.content.startswith("cancelled: agent reader was cancelled")


@pytest.mark.parametrize("text", ["42", "", " \n"])
def test_a_child_that_answers_is_well_even_if_it_says_nothing(text: str) -> None:
    answer = answer_of("reader", RunOutcome(state="succeeded", text=text))
    assert (answer.kind, answer.error, answer.content) == ("ok", "", text)


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
def test_an_answer_is_what_a_result_can_hold(state: RunState) -> None:
    outcome = RunOutcome.model_validate({"state": state, "reason": "model", "text": "a\0\ud800" + "x" * 300_000})
    content = answer_of("reader", outcome).content
    assert "\0" not in content
    content.encode()
    assert len(content) == MAX_RESULT
