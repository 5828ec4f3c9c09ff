"""``chaz session`` and ``chaz sessions``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, get_args

from chaz.cli.options import add_command, on_terminal, positive, print_json, producer_of, session_target
from chaz.cli.render import STATE_COLOURS, clipped, coloured, one_line, seconds_text, terminal_width
from chaz.entries import OnMessage
from chaz.listings import SessionFilter
from chaz.settings import names_of
from chaz.submitting import SessionOptions

if TYPE_CHECKING:
    from chaz.cli.options import Commands


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the commands."""
    listing = add_command(
        commands, common, "sessions", run_sessions, "list sessions, newest first: their agents, who is busy, what waits"
    )
    listing.add_argument("--agent", help="with this agent attached only")
    listing.add_argument("--name", metavar="TEXT", help="whose name holds this only, in any case")
    listing.add_argument("--busy", action="store_true", help="with a run at work, queued or parked only")
    listing.add_argument(
        "--waiting", action="store_true", help="where an entry, a run or a request to people waits only"
    )
    listing.add_argument("--children", action="store_true", help="those that runs opened by spawning, too")
    listing.add_argument("--limit", type=positive, default=50, metavar="N", help="so many at most (default 50)")
    listing.add_argument("--json", action="store_true", help="one JSON object per session")

    session = add_command(
        commands, common, "session", run_session, "say what messages do while a session is busy, and who may approve"
    )
    session.add_argument("session", help="its name (made if new) or id")
    session.add_argument(
        "--on-message",
        choices=get_args(OnMessage),
        help="coalesce: one run answers all that came by its start; each: a run of its own; reject: refused; "
        "interrupt: the run at work ends in its favour; steer: the run at work hears it between two steps",
    )
    session.add_argument(
        "--approvers", metavar="NAMES", help="who may approve and answer: names or globs, by commas; '' for nobody"
    )
    session.add_argument("--auto-approve", metavar="TOOLS", help="tools that need no approval: globs, by commas")
    session.add_argument("--approval-timeout", type=float, metavar="SECONDS", help="how long a word is waited for")
    session.add_argument(
        "--burst", type=int, metavar="N", help="so many answers of agents in a row may wake other agents by a mention"
    )
    session.add_argument("--json", action="store_true", help="print JSON")
    session.set_defaults(refuse=session.error)


def run_session(options: argparse.Namespace) -> int:
    """Configure the session; print its id."""
    with producer_of(options) as chaz:
        name, id = session_target(options.session)
        session = chaz.session(name, id=id)
        wanted = SessionOptions()
        if options.on_message is not None:
            wanted["on_message"] = options.on_message
        if options.approvers is not None:
            wanted["approvers"] = names_of(options.approvers)
        if options.auto_approve is not None:
            wanted["auto_approve"] = names_of(options.auto_approve)
        if options.approval_timeout is not None:
            wanted["approval_timeout"] = options.approval_timeout
        if options.burst is not None:
            wanted["burst"] = options.burst
        if not wanted:
            options.refuse("say what is to hold for the session, such as --on-message")
        session.configure(**wanted)
        if options.json:
            print_json({"session": session.id, **wanted})
        else:
            print(session.id)
    return 0


def run_sessions(options: argparse.Namespace) -> int:
    """Print the sessions."""
    wanted = SessionFilter(
        agent=options.agent,
        name=options.name,
        busy=options.busy,
        waiting=options.waiting,
        children=options.children,
        limit=options.limit,
    )
    with producer_of(options) as chaz:
        found = chaz.sessions(wanted)
    if options.json:
        for session in found:
            print_json(session)
        return 0
    now = datetime.now(UTC)
    print(f"{'session':36}  {'entries':>7}  {'last entry':19}  {'agents':24}  what")
    for session in found:
        last = session["last_at"] or session["created_at"]
        line = (
            f"{clipped(one_line(session['name'] or str(session['id'])), 36):36}  {session['entries']:>7}  "
            f"{last.astimezone():%Y-%m-%d %H:%M:%S}  {clipped(one_line(', '.join(session['agents'])), 24):24}  "
            f"{activity(session, now)}"
        )
        if on_terminal():
            line = clipped(line, terminal_width())
            state = session["state"] or ""
            line = line.replace(f" {state} ", f" {coloured(state, STATE_COLOURS.get(state, ''), on=True)} ", 1)
        print(line)
    return 0


def activity(session: Mapping[str, Any], now: datetime) -> str:
    """What is up in a session of :func:`chaz.listings.list_sessions`: who is busy, and what waits."""
    parts: list[str] = []
    if session["run"] is not None:
        since = seconds_text((now - session["since"]).total_seconds()) if session["since"] else ""
        waits_for = f" (waits for {one_line(session['waits_for'])})" if session["waits_for"] else ""
        parts.append(f"{one_line(session['agent'])} {session['state']} {since}{waits_for}")
    waiting = {
        "unplaced": "not placed",
        "pending": "pending",
        "asked": "to be decided",
    }
    parts += [f"{session[name]} {words}" for name, words in waiting.items() if session[name]]
    return "; ".join(parts) or "idle"
