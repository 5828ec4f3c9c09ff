"""``chaz pause``, ``chaz resume`` and ``chaz paused``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from chaz.cli.options import add_command, print_json, producer_of

if TYPE_CHECKING:
    from chaz.cli.options import Commands

_WHAT = "agent:NAME, session:NAME (or its id), or all"


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the commands."""
    pause = add_command(
        commands,
        common,
        "pause",
        run_pause,
        "start nothing new of an agent, a session or everything; what runs goes on",
    )
    pause.add_argument("what", nargs="?", help=_WHAT)
    pause.add_argument("--reason", default="", help="why, for whoever looks")
    pause.add_argument("--list", action="store_true", help="show what is paused, as `chaz paused` does")
    pause.add_argument("--json", action="store_true", help="one JSON object per pause (with --list)")
    pause.set_defaults(refuse=pause.error)
    resume = add_command(commands, common, "resume", run_resume, "let it start again")
    resume.add_argument("what", help=_WHAT)
    paused = add_command(commands, common, "paused", run_paused, "show what is paused")
    paused.add_argument("--json", action="store_true", help="one JSON object per pause")


def run_pause(options: argparse.Namespace) -> int:
    """Pause, or list what is paused."""
    if options.list:
        if options.what is not None:
            options.refuse("--list takes nothing to pause")
        return run_paused(options)
    what: str = options.what or options.refuse(f"what is to be paused? {_WHAT}")
    with producer_of(options) as chaz:
        done = chaz.pause(what, reason=options.reason)
    print(f"{what} is paused" if done else f"{what} was paused already")
    return 0


def run_resume(options: argparse.Namespace) -> int:
    """Resume."""
    with producer_of(options) as chaz:
        done = chaz.resume(options.what)
    print(f"{options.what} goes on" if done else f"{options.what} was not paused")
    return 0


def run_paused(options: argparse.Namespace) -> int:
    """Print what is paused, the longest first."""
    with producer_of(options) as chaz:
        found = chaz.paused()
    for pause in found:
        if options.json:
            print_json(pause)
            continue
        what = pause["kind"] if pause["kind"] == "all" else f"{pause['kind']}:{pause['name']}"
        why = f": {pause['reason']}" if pause["reason"] else ""
        print(f"{what}  since {pause['since'].astimezone():%Y-%m-%d %H:%M:%S}, by {pause['paused_by']}{why}")
    if not found and not options.json:
        print("nothing is paused")
    return 0
