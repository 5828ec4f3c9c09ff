"""``chaz session``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, get_args

from chaz.cli.options import add_command, print_json, producer_of, session_target
from chaz.entries import OnMessage
from chaz.settings import names_of
from chaz.submitting import SessionOptions

if TYPE_CHECKING:
    from chaz.cli.options import Commands


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command."""
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
        if not wanted:
            options.refuse("say what is to hold for the session, such as --on-message")
        session.configure(**wanted)
        if options.json:
            print_json({"session": session.id, **wanted})
        else:
            print(session.id)
    return 0
