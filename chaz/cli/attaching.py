"""``chaz attach`` and ``chaz detach``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from chaz.cli.options import add_command, print_json, producer_of, session_target
from chaz.cli.render import one_line

if TYPE_CHECKING:
    from chaz.cli.options import Commands
    from chaz.producer import Session


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the commands."""
    attach = add_command(commands, common, "attach", run_attach, "attach an agent to a session, or make it the lead")
    detach = add_command(commands, common, "detach", run_detach, "detach an agent from a session; its runs go on")
    attach.add_argument("session", help="its name (made if new) or id")
    detach.add_argument("session", help="its name or id")
    for command in (attach, detach):
        command.add_argument("agent")
        command.add_argument("--json", action="store_true", help="print JSON")
    attach.add_argument("--lead", action="store_true", help="have it answer what is said to nobody by name")


def run_attach(options: argparse.Namespace) -> int:
    """Attach the agent; print who is attached then."""
    with producer_of(options) as chaz:
        name, id = session_target(options.session)
        session = chaz.session(name, id=id)
        done = session.attach(options.agent, lead=options.lead)
        as_what = "the lead" if options.lead else "attached"
        _tell(options, session, done, f"{options.agent} is {as_what}{'' if done else ' already'}")
    return 0


def run_detach(options: argparse.Namespace) -> int:
    """Detach the agent; print who is attached then. One that is not attached is no mistake."""
    with producer_of(options) as chaz:
        name, id = session_target(options.session)
        session = chaz.session(name, id=id)
        done = session.detach(options.agent)
        _tell(options, session, done, f"{options.agent} is {'detached' if done else 'not attached'}")
    return 0


def _tell(options: argparse.Namespace, session: Session, done: bool, what: str) -> None:
    agents = session.agents()
    if options.json:
        roster = [{"agent": attached.agent, "lead": attached.lead} for attached in agents]
        print_json({"session": session.id, "agent": options.agent, "done": done, "agents": roster})
        return
    names = ", ".join(f"{attached.agent}{' (lead)' if attached.lead else ''}" for attached in agents)
    print(one_line(f"{what}; the session's agents: {names or 'none'}"))
