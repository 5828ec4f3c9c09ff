"""What runs may spend and what they spent, as the command line is told and tells it."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from chaz.cli.tree import line_of
from chaz.listings import tree_of
from chaz.outcomes import Usage
from tests.fixtures.commands import command
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.stations import Stations

pytestmark = pytest.mark.anyio


async def test_a_budget_is_sent_along(
    stations: Stations, database: ScratchDatabase, capsys: pytest.CaptureFixture[str]
) -> None:
    sending = ("send", "s", "hello", "--to", "solo", "--database", database.url)
    code, id, _ = await asyncio.to_thread(command, capsys, *sending, "--budget", "steps=3, cost=0.25")
    assert code == 0
    await stations.place()
    (row,) = await stations.fetch("select * from chaz.tree_budgets")
    assert str(row["root_run_id"]) == id.strip()
    assert (row["max_steps"], row["max_tokens"], row["max_cost"]) == (3, None, Decimal("0.25"))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("steps=many", "steps: Input should be a valid integer"),
        ("steps=0", "steps: Input should be greater than 0"),
        ("time=5", "time: Extra inputs are not permitted"),
        ("5", "5: Extra inputs are not permitted"),
        ("steps=1,steps=2", "names a kind twice"),
    ],
)
def test_what_is_no_budget_is_refused(capsys: pytest.CaptureFixture[str], wrong: str, why: str) -> None:
    code, out, said = command(capsys, "send", "s", "hello", "--budget", wrong)
    assert (code, out) == (2, "")
    assert f"argument --budget: {wrong!r}" in said
    assert why in said


async def test_runs_and_their_trees_show_what_was_used(
    stations: Stations, database: ScratchDatabase, capsys: pytest.CaptureFixture[str]
) -> None:
    dear, free = await stations.claimed("dear"), await stations.claimed("free")
    used = Usage(prompt=1200, completion=34, cached=1000)
    await stations.step(dear, text="done", usage=used, cost="0.0123456")
    here = ("--database", database.url)

    _, listed, _ = await asyncio.to_thread(command, capsys, "runs", *here)
    head, *lines = listed.splitlines()
    columns = slice(head.index("steps"), head.index("created"))
    assert head[columns].split() == ["steps", "tokens", "cost"]
    shown = {line[:36]: line[columns].split() for line in lines}
    assert shown == {str(dear.run_id): ["1", "1234", "0.01235"], str(free.run_id): ["0"]}

    _, printed, _ = await asyncio.to_thread(command, capsys, "runs", "--json", *here)
    costs = {run["id"]: run["usage"]["cost"] for run in map(json.loads, printed.splitlines())}
    assert costs == {str(dear.run_id): 0.0123456, str(free.run_id): 0}

    (run,) = await tree_of(stations.database, dear.run_id)
    assert "1 step, 1234 tokens, cost 0.01235" in line_of(run, datetime.now(UTC))
