"""``chaz tree``: what a person sees of a tree, line by line."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from chaz.cli.tree import drawing, line_of

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)


def a_run(number: int, parent: int | None = None, **fields: Any) -> dict[str, Any]:
    """A run that has ended well after three seconds, unless ``fields`` say otherwise."""
    run: dict[str, Any] = {
        "id": UUID(int=number),
        "parent_run_id": None if parent is None else UUID(int=parent),
        "agent": f"a{number}",
        "state": "succeeded",
        "attempt": 1,
        "steps": 1,
        "usage": {"prompt": 30, "completion": 10},
        "waits_for": None,
        "not_before": None,
        "reason": None,
        "result": "done",
        "started_at": NOW - timedelta(seconds=3),
        "ended_at": NOW,
        "calls": {},
    }
    return run | fields


def lines(*runs: dict[str, Any], asked: int = 1, colour: bool = False) -> list[str]:
    return list(drawing(runs, UUID(int=asked), NOW, colour=colour))


def test_each_stands_below_its_parent_and_the_one_asked_for_is_marked() -> None:
    used = "succeeded  3.0 s  1 step, 40 tokens  done"
    assert lines(a_run(1), a_run(2, 1), a_run(3, 1), a_run(4, 2), a_run(5, 4), asked=4) == [
        f"a1  {used}",
        f"├─ a2  {used}",
        f"│  └─ a4  {used} ◂",
        f"│     └─ a5  {used}",
        f"└─ a3  {used}",
        "5 runs: 5 succeeded; 5 steps, 200 tokens",
    ]


def test_what_others_asked_a_childs_session_is_drawn_too() -> None:
    drawn = lines(a_run(1), a_run(2, 1), a_run(3, parent=9), a_run(4))
    assert [line.split()[0] for line in drawn] == ["a1", "└─", "a3", "a4", "4"]


def test_a_run_alone_has_no_mark_and_no_totals() -> None:
    assert lines(a_run(1)) == ["a1  succeeded  3.0 s  1 step, 40 tokens  done"]


def test_costs_are_shown_and_summed() -> None:
    drawn = lines(
        a_run(1, usage={"prompt": 30, "completion": 10, "known_cost": 0.25}),
        a_run(2, 1, steps=2, usage={"known_cost": 0.5}),
    )
    assert "1 step, 40 tokens, cost 0.25" in drawn[0]
    assert "2 steps, cost 0.5" in drawn[1]
    assert drawn[2] == "2 runs: 2 succeeded; 3 steps, 40 tokens, cost 0.75"


def test_a_cost_that_is_not_known_is_said_so() -> None:
    part = {"prompt": 40, "calls": 5, "known_cost": 0.12, "unpriced_calls": 3}
    drawn = lines(a_run(1, usage=part), a_run(2, 1, usage={"prompt": 2, "calls": 1, "unpriced_calls": 1}))
    assert "1 step, 40 tokens, cost ≥ 0.12, 3 calls unknown" in drawn[0]
    assert "1 step, 2 tokens, cost unknown" in drawn[1]
    assert drawn[2] == "2 runs: 2 succeeded; 2 steps, 42 tokens, cost ≥ 0.12, 4 calls unknown"


FRESH: dict[str, Any] = {"started_at": None, "ended_at": None, "steps": 0, "usage": {}, "result": None}
OPEN: dict[str, Any] = {"ended_at": None, "steps": 0, "usage": {}, "result": None}
SHOWN: list[tuple[dict[str, Any], str]] = [
    (FRESH | {"state": "pending"}, "pending  waits for its turn"),
    (FRESH | {"state": "pending", "not_before": NOW}, "pending  waits until 12:00:00"),
    (FRESH | {"state": "queued"}, "queued"),
    (OPEN | {"state": "running", "calls": {"read": 1, "write": 2}}, "running  3.0 s  read(), write() x 2"),
    (OPEN | {"state": "parked", "waits_for": "solo"}, "parked  3.0 s  waits for solo"),
    (
        OPEN | {"state": "parked", "waits_for": "solo", "calls": {"spawn_agent": 1}},
        "parked  3.0 s  waits for solo (spawn_agent())",
    ),
    (
        {"state": "failed", "reason": "model", "result": "too\n bad"},
        "failed  3.0 s  1 step, 40 tokens  model: too bad",
    ),
    ({"result": None}, "succeeded  3.0 s  1 step, 40 tokens"),
    ({"started_at": NOW - timedelta(seconds=61)}, "succeeded  1 min 1 s  1 step, 40 tokens  done"),
    ({"started_at": NOW - timedelta(hours=2, minutes=3)}, "succeeded  2 h 3 min  1 step, 40 tokens  done"),
]


@pytest.mark.parametrize(("fields", "shown"), SHOWN)
def test_a_run_in_a_line(fields: dict[str, Any], shown: str) -> None:
    assert line_of(a_run(1, **fields), NOW) == f"a1  {shown}"


def test_a_long_answer_is_cut() -> None:
    line = line_of(a_run(1, result="x" * 100), NOW)
    assert "x" * 50 in line
    assert "x" * 61 not in line
