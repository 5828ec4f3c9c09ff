"""``chaz tree``: a tree of runs, as it is or live."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from chaz.cli.options import add_command, on_terminal, print_json, producer_of
from chaz.cli.render import (
    STATE_COLOURS,
    clipped,
    coloured,
    one_line,
    seconds_text,
    terminal_width,
    tokens_text,
    whole_cost_text,
)
from chaz.errors import UnknownRun
from chaz.listings import tree_of
from chaz.outcomes import ACTIVE_STATES, Spent
from chaz.producer import Chaz

if TYPE_CHECKING:
    from chaz.cli.options import Commands

LOOK_EVERY = 0.2
Run = dict[str, Any]


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    tree = add_command(commands, common, "tree", run_tree, "draw a run's tree: states, agents, times, tokens, waits")
    tree.add_argument("id", help="a run of the tree; the whole tree is drawn, and this one marked")
    tree.add_argument(
        "--follow", "-f", action="store_true", help="until all of it is over: drawn anew, or a line for each change"
    )
    tree.add_argument("--json", action="store_true", help="one JSON object per run (with --follow: per change of one)")


def run_tree(options: argparse.Namespace) -> int:
    """Draw the tree, once or until it is over."""
    with producer_of(options) as chaz:
        asked = chaz.result(options.id).id
        if options.json or (options.follow and not on_terminal()):
            _print_changes(chaz, asked, options)
        else:
            _draw_until_over(chaz, asked, follow=options.follow)
    return 0


def _look(chaz: Chaz, asked: UUID) -> list[Run]:
    runs = chaz.loop.run(tree_of(chaz.inner.database, asked))
    if not runs:
        # Its entry has woken nobody.
        raise UnknownRun(asked)
    return runs


def _is_over(runs: Sequence[Run]) -> bool:
    return not any(run["state"] in ACTIVE_STATES or run["state"] == "pending" for run in runs)


def _print_changes(chaz: Chaz, asked: UUID, options: argparse.Namespace) -> None:
    """A line for each run, and with ``--follow`` for each change of one."""
    shown: dict[UUID, tuple[Any, ...]] = {}
    while True:
        runs = _look(chaz, asked)
        for run in runs:
            key = (run["state"], run["waits_for"], run["steps"], run["attempt"])
            if shown.get(run["id"]) == key:
                continue
            shown[run["id"]] = key
            if options.json:
                print_json(run)
            else:
                at = datetime.now().astimezone()
                print(f"{at:%H:%M:%S}  {run['id']}  {'  ' * run['depth']}{line_of(run, at)}", flush=True)
        if not options.follow or _is_over(runs):
            return
        time.sleep(LOOK_EVERY)


def _draw_until_over(chaz: Chaz, asked: UUID, *, follow: bool) -> None:
    drawn = 0
    while True:
        runs = _look(chaz, asked)
        on = on_terminal()
        lines = list(drawing(runs, asked, datetime.now(UTC), colour=on))
        if follow:
            # What is longer than the screen could not be drawn over.
            lines = [*lines[: _rows() - 2], *(["…"] if len(lines) > _rows() - 2 else [])]
        # Up to where it began, and away with what is below.
        sys.stdout.write(f"\033[{drawn}F\033[J" if drawn else "")
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
        drawn = len(lines)
        if not follow or _is_over(runs):
            return
        time.sleep(LOOK_EVERY)


def _rows() -> int:
    return max(4, shutil.get_terminal_size((120, 24)).lines)


def drawing(runs: Sequence[Run], asked: UUID, now: datetime, *, colour: bool) -> Iterator[str]:
    """The tree in lines, the totals last."""
    children: dict[UUID | None, list[Run]] = defaultdict(list)
    known = {run["id"] for run in runs}
    for run in runs:
        children[run["parent_run_id"] if run["parent_run_id"] in known else None].append(run)
    width = terminal_width() if colour else None

    def below(parent: UUID | None, indent: str) -> Iterator[str]:
        for number, run in enumerate(children[parent], 1):
            last = number == len(children[parent])
            stem = "" if parent is None else ("└─ " if last else "├─ ")
            mark = " ◂" if run["id"] == asked and len(runs) > 1 else ""
            line = indent + stem + line_of(run, now) + mark
            if width:
                line = clipped(line, width)
            yield line.replace(run["state"], coloured(run["state"], STATE_COLOURS.get(run["state"], ""), on=colour), 1)
            yield from below(run["id"], indent + ("" if parent is None else "   " if last else "│  "))

    yield from below(None, "")
    if len(runs) > 1:
        counts: dict[str, int] = defaultdict(int)
        for run in runs:
            counts[run["state"]] += 1
        spent = sum((Spent.model_validate(run["usage"]) for run in runs), Spent())
        states = ", ".join(f"{count} {state}" for state, count in counts.items())
        steps = sum(run["steps"] for run in runs)
        yield f"{len(runs)} runs: {states}; {_steps(steps)}{_spent(spent)}"


def line_of(run: Run, now: datetime) -> str:
    """A run in a line: agent, state, time, what it has used, and what it waits for or came to."""
    parts = [run["agent"], run["state"]]
    if run["started_at"] is not None:
        parts.append(seconds_text(((run["ended_at"] or now) - run["started_at"]).total_seconds()))
    if run["steps"]:
        parts.append(_steps(run["steps"]) + _spent(Spent.model_validate(run["usage"])))
    if run["state"] in {"queued", "parked", "running"} and (run["waits_for"] or run["calls"]):
        parts.append(("waits for " if run["state"] == "parked" else "") + _what(run))
    elif run["state"] == "pending":
        parts.append("waits for its turn" if run["not_before"] is None else f"waits until {run['not_before']:%H:%M:%S}")
    elif run["ended_at"] is not None:
        text = " ".join((run["result"] or "").split())
        parts.append(clipped(f"{run['reason']}: {text}" if run["reason"] else text, 60))
    return "  ".join(one_line(part) for part in parts if part)


def _what(run: Run) -> str:
    """What it waits for, with the tools that are at work."""
    calls = ", ".join(f"{tool}()" if count == 1 else f"{tool}() x {count}" for tool, count in run["calls"].items())
    if run["state"] == "parked" and run["waits_for"]:
        return f"{run['waits_for']} ({calls})" if calls else run["waits_for"]
    return calls or run["waits_for"]


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def _spent(spent: Spent) -> str:
    tokens, price = tokens_text(spent), whole_cost_text(spent)
    return (f", {tokens} tokens" if tokens else "") + (f", cost {price}" if price else "")
