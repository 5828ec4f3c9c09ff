"""``chaz send``, ``chaz compact``, ``chaz wait`` and ``chaz cancel``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING
from uuid import UUID

from chaz.cli.options import add_command, budget, print_json, producer_of, session_target
from chaz.result import AgentResult
from chaz.submitting import SendOptions

if TYPE_CHECKING:
    from chaz.cli.options import Commands


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the commands."""
    send = add_command(commands, common, "send", run_send, "send a message, or with --to a directive, to a session")
    send.add_argument("session", help="its name (made if new) or id")
    send.add_argument("text")
    send.add_argument("--to", metavar="AGENT", help="instruct this agent")
    send.add_argument("--sender", help="who speaks (default: the user's name)")
    send.add_argument("--key", metavar="KEY", help="idempotency key: the same again is the same entry")
    send.add_argument(
        "--budget",
        type=budget,
        metavar="KIND=N,…",
        help="what the run and all that it spawns may use: steps=5,tokens=50000,cost=0.5, or some of it",
    )
    send.add_argument("--wait", action="store_true", help="wait for the answer and print it")
    _add_wait_options(send)

    compact = add_command(commands, common, "compact", run_compact, "summarise a long session, for its agents")
    compact.add_argument("session", help="its name or id")
    compact.add_argument("--agent", metavar="AGENT", help="who summarises, if attached (default: the lead)")
    compact.add_argument("--wait", action="store_true", help="wait for the summary and print it")
    _add_wait_options(compact)

    wait = add_command(commands, common, "wait", run_wait, "wait for a run and print its answer")
    wait.add_argument("id", help="the run's id, as `chaz send` printed it")
    _add_wait_options(wait)

    cancel = add_command(commands, common, "cancel", run_cancel, "end a run, with the runs that it spawned")
    cancel.add_argument("id", help="the run's id")
    cancel.add_argument("--reason", default="", metavar="TEXT", help="why, for the session's log")
    cancel.add_argument("--by", metavar="NAME", help="who cancels (default: the user's name)")
    cancel.add_argument("--json", action="store_true", help="print JSON")


def _add_wait_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--timeout", type=float, metavar="SECONDS", help="wait so long at most")
    command.add_argument("--json", action="store_true", help="print JSON")


def run_send(options: argparse.Namespace) -> int:
    """Send, and with ``--wait`` print the answer."""
    with producer_of(options) as chaz:
        name, id = session_target(options.session)
        session = chaz.session(name, id=id)
        besides: SendOptions = {"author": "human"}
        if options.sender:
            besides["sender"] = options.sender
        if options.key:
            besides["idempotency_key"] = options.key
        if options.budget:
            besides["budget"] = options.budget
        if options.to is not None:
            handle = session.direct(options.to, options.text, **besides)
        else:
            handle = session.say(options.text, **besides)
        return _print_sent(handle, session.id, options)


def run_compact(options: argparse.Namespace) -> int:
    """Ask for a summary, and with ``--wait`` print it, or why there is none."""
    with producer_of(options) as chaz:
        name, id = session_target(options.session)
        session = chaz.session(name, id=id)
        return _print_sent(session.compact(options.agent), session.id, options)


def run_wait(options: argparse.Namespace) -> int:
    """Wait for a run that exists."""
    with producer_of(options) as chaz:
        return _print_answer(chaz.result(options.id), options)


def run_cancel(options: argparse.Namespace) -> int:
    """Ask for a run's end. One that is over already is no mistake: it does not run any more."""
    with producer_of(options) as chaz:
        asked = chaz.cancel(options.id, by=options.by, reason=options.reason)
        state = chaz.result(options.id).state
    if options.json:
        print_json({"id": options.id, "asked": asked, "state": state})
    elif asked:
        print(f"run {options.id} is to be cancelled with the runs that it spawned; a listener ends them")
    elif state == "nobody":
        print(f"entry {options.id} woke nobody; there is nothing to cancel")
    else:
        print(f"run {options.id} is over already: {state}")
    return 0


def _print_sent(handle: AgentResult, session_id: UUID, options: argparse.Namespace) -> int:
    if options.wait:
        return _print_answer(handle, options)
    if options.json:
        print_json({"id": handle.id, "session": session_id})
    else:
        print(handle.id)
    return 0


def _print_answer(handle: AgentResult, options: argparse.Namespace) -> int:
    if not options.json:
        answer = handle.get(options.timeout)
        print("(nobody was woken by this entry)" if answer is None else answer)
        return 0
    text = handle.get(options.timeout, propagate=False)
    state = handle.state
    print_json({"id": handle.id, "state": state, "text": text})
    return {"failed": 1, "cancelled": 3}.get(state, 0)
