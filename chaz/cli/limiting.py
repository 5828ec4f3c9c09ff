"""``chaz limit`` and ``chaz limits``."""

from __future__ import annotations

import argparse
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from chaz.cli.options import add_command, positive, print_json, producer_of, span
from chaz.cli.render import one_line
from chaz.limits import period_text

if TYPE_CHECKING:
    from chaz.cli.options import Commands

_WHAT = "agent:NAME, session:NAME (or its id), or all"
_DAY = timedelta(days=1)


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the commands."""
    limit = add_command(
        commands,
        common,
        "limit",
        run_limit,
        "let an agent, a session or everything use so much in a period; once it has, runs fail and no model is asked",
    )
    limit.add_argument("what", help=_WHAT)
    limit.add_argument("--tokens", type=positive, metavar="N", help="so many tokens, of prompts and completions")
    limit.add_argument("--cost", type=_cost, metavar="SUM", help="so much, in what prices are in (dollars)")
    limit.add_argument("--period", type=span, metavar="SPAN", help="as in 1h, 1d (the default) or 30d; begun in UTC")
    limit.add_argument("--remove", action="store_true", help="remove its limit of this period, or all of its limits")
    limit.set_defaults(refuse=limit.error)
    limits = add_command(commands, common, "limits", run_limits, "show the limits, and what is used of them")
    limits.add_argument("--json", action="store_true", help="one JSON object per limit")


def _cost(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def run_limit(options: argparse.Namespace) -> int:
    """Set a limit, or remove it."""
    given = options.tokens is not None or options.cost is not None
    if options.remove and given:
        options.refuse("--remove takes neither --tokens nor --cost")
    if not options.remove and not given:
        options.refuse("how much? --tokens, --cost, or both")
    with producer_of(options) as chaz:
        if options.remove:
            removed = chaz.unlimit(options.what, period=options.period)
            print(f"{options.what} is limited no more" if removed else f"{options.what} had no such limit")
            return 0
        chaz.limit(options.what, tokens=options.tokens, cost=options.cost, period=options.period or _DAY)
    print(f"{options.what} is limited")
    return 0


def run_limits(options: argparse.Namespace) -> int:
    """Print the limits."""
    with producer_of(options) as chaz:
        found = chaz.limits()
    for limit in found:
        if options.json:
            print_json(limit)
        else:
            print(_line(limit))
    if not found and not options.json:
        print("nothing is limited")
    return 0


def _line(limit: dict[str, Any]) -> str:
    what = "all" if limit["kind"] == "all" else one_line(f"{limit['kind']}:{limit['name']}")
    used: list[str] = []
    if limit["max_tokens"] is not None:
        used.append(f"{limit['tokens']:,} of {limit['max_tokens']:,} tokens")
    if limit["max_cost"] is not None:
        least = "≥ " if limit["unpriced"] else ""
        used.append(f"cost {least}{limit['cost']:.4g} of {limit['max_cost']:.4g}")
    period = period_text(timedelta(seconds=limit["period"]))
    reached = "  reached" if limit["reached"] else ""
    ends = f"till {limit['ends_at'].astimezone():%Y-%m-%d %H:%M:%S}"
    return f"{what}  {', '.join(used)}  each {period}, {ends}, set by {limit['set_by']}{reached}"
