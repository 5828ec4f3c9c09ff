"""``chaz usage``: what calls of models used and cost."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, get_args

from chaz.cli.options import add_command, print_json, producer_of, since
from chaz.cli.render import one_line, whole_cost_text
from chaz.outcomes import Spent
from chaz.usage import By

if TYPE_CHECKING:
    from chaz.cli.options import Commands

_KINDS: tuple[By, ...] = get_args(By)


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    usage = add_command(commands, common, "usage", run_usage, "tokens and cost of the calls of models")
    usage.add_argument(
        "--by", type=_by, default=["agent", "model"], metavar="KINDS", help=f"by commas, any of {', '.join(_KINDS)}"
    )
    usage.add_argument(
        "--since", type=since, metavar="SPAN|TIME", help="since so long ago (24h, 7d) or this time; all, if not given"
    )
    usage.add_argument("--agent", help="of this agent only")
    usage.add_argument("--session", help="of this session only: a name or an id")
    usage.add_argument("--tree", metavar="ID", help="of this run's tree only")
    usage.add_argument("--tz", default="UTC", metavar="ZONE", help="the time zone of a day (default UTC)")
    usage.add_argument(
        "--json", action="store_true", help="one JSON object per row; its cost is null where a price is not known"
    )


def _by(text: str) -> list[str]:
    kinds = text.split(",")
    for kind in kinds:
        if kind not in _KINDS:
            raise argparse.ArgumentTypeError(f"{kind!r} is none of {', '.join(_KINDS)}")
    return list(dict.fromkeys(kinds))


def run_usage(options: argparse.Namespace) -> int:
    """Print a row for each group, and the total."""
    with producer_of(options) as chaz:
        found = chaz.usage(
            options.by,
            since=options.since,
            agent=options.agent,
            session=options.session,
            tree=options.tree,
            tz=options.tz,
        )
    if options.json:
        for row in found:
            print_json(row)
        return 0
    rows = [([one_line(str(row[kind])) for kind in options.by], Spent.model_validate(row)) for row in found]
    total = sum((spent for _, spent in rows), Spent())
    lines = [_line([*options.by], "calls", "prompt", "cached", "completion", "reasoning", "cost")]
    lines += [_spent(names, spent) for names, spent in rows]
    if len(rows) != 1:
        lines.append(_spent(["total", *[""] * (len(options.by) - 1)], total))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        names, numbers = line[: len(options.by)], line[len(options.by) : -1]
        cells = [f"{name:{width}}" for name, width in zip(names, widths, strict=False)]
        cells += [f"{number:>{width}}" for number, width in zip(numbers, widths[len(names) :], strict=False)]
        print("  ".join([*cells, line[-1]]).rstrip())
    return 0


def _line(names: list[str], *cells: Any) -> list[str]:
    return [*names, *map(str, cells)]


def _spent(names: list[str], spent: Spent) -> list[str]:
    cost = whole_cost_text(spent)
    return _line(names, spent.calls, spent.prompt, spent.cached, spent.completion, spent.reasoning, cost)
