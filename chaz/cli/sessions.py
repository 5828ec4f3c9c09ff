"""``chaz session``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, get_args

from chaz.cli.options import add_command, print_json, producer_of, session_target
from chaz.entries import OnMessage

if TYPE_CHECKING:
    from chaz.cli.options import Commands


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    session = add_command(
        commands, common, "session", run_session, "say what a message does that comes while a session is busy"
    )
    session.add_argument("session", help="its name (made if new) or id")
    session.add_argument(
        "--on-message",
        choices=get_args(OnMessage),
        required=True,
        help="coalesce: one run answers all that came by its start; each: a run of its own; reject: refused; "
        "interrupt: the run at work ends in its favour; steer: the run at work hears it between two steps",
    )
    session.add_argument("--json", action="store_true", help="print JSON")


def run_session(options: argparse.Namespace) -> int:
    """Configure the session; print its id."""
    with producer_of(options) as chaz:
        name, id = session_target(options.session)
        session = chaz.session(name, id=id)
        session.configure(on_message=options.on_message)
        if options.json:
            print_json({"session": session.id, "on_message": options.on_message})
        else:
            print(session.id)
    return 0
