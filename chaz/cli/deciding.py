"""``chaz approvals``, ``chaz approve``, ``chaz deny`` and ``chaz answer``."""

from __future__ import annotations

import argparse
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import UUID

from chaz import deciding
from chaz.approvals import in_words
from chaz.cli.options import add_command, on_terminal, print_json, producer_of, session_target
from chaz.cli.render import clipped, coloured, one_line, terminal_width
from chaz.deciding import Request, Word
from chaz.errors import InvalidEntry, UnknownRequest
from chaz.producer import Chaz

if TYPE_CHECKING:
    from chaz.cli.options import Commands

EXIT_NO_EFFECT = 77
PLACED_WITHIN = 5.0
RISK_COLOURS = {"low": "32", "medium": "33", "high": "1;31"}


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the commands."""
    approvals = add_command(
        commands, common, "approvals", run_approvals, "list what agents ask people and nobody has decided, oldest first"
    )
    approvals.add_argument("--session", help="of this session only: a name or an id")
    approvals.add_argument("--json", action="store_true", help="one JSON object per request, whole")
    approve = add_command(commands, common, "approve", run_decide, "let a call be made that an agent asks for")
    approve.add_argument("--all", action="store_true", help="and whatever else its run calls")
    approve.set_defaults(word="approve")
    deny = add_command(commands, common, "deny", run_decide, "do not let a call be made, or decline a question")
    deny.set_defaults(word="deny")
    answer = add_command(commands, common, "answer", run_decide, "answer an agent's question")
    answer.set_defaults(word="answer")
    for command in (approve, deny, answer):
        command.add_argument("id", help="the request's id, or enough of its beginning (four characters or more)")
        command.add_argument("--by", metavar="NAME", help="who decides (default: the user)")
    answer.add_argument("text", help="the answer")
    for command in (approve, deny):
        command.add_argument("--reason", default="", help="why; the model is told")


def run_approvals(options: argparse.Namespace) -> int:
    """Print the open requests."""
    with producer_of(options) as chaz:
        session_id = None
        if options.session:
            name, id = session_target(options.session)
            session_id = chaz.session(name, id=id).id
        found = chaz.approvals(session_id)
    for request in found:
        if options.json:
            print_json(request.facts())
        else:
            print(_line(request))
    if not found and not options.json:
        print("nobody is asked anything")
    return 0


def _line(request: Request[UUID | None]) -> str:
    asks = request.shown if request.kind == "question" else f"{request.tool} {request.shown}"
    left = (request.expires_at - datetime.now(UTC)).total_seconds()
    shown = f"{request.id}  {max(0.0, left):5.0f} s left  {request.risk:6}  {request.agent}: {one_line(asks)}"
    if not on_terminal():
        return shown
    return coloured(clipped(shown, terminal_width()), RISK_COLOURS[request.risk], on=True)


def run_decide(options: argparse.Namespace) -> int:
    """Send the word, wait a moment until it is placed, and say what it came to."""
    word: Word = "approve_all" if options.word == "approve" and options.all else options.word
    with producer_of(options) as chaz:
        id = _whole(chaz, options.id)
        sent = chaz.decide(id, word, by=options.by, reason=options.text if word == "answer" else options.reason)
        if sent is None:
            request = chaz.approval(id)
            print(f"{_how(request)} already; nothing was changed")
            # Whoever wanted just that has it.
            return 0 if (request.decision or "").split("_")[0] == options.word else EXIT_NO_EFFECT
        ends = time.monotonic() + PLACED_WITHIN
        while time.monotonic() < ends:
            if why := chaz.loop.run(deciding.no_effect(chaz.inner.database, sent)):
                print(why)
                return EXIT_NO_EFFECT
            request = chaz.approval(id)
            if request.decision is not None:
                print(_how(request))
                return 0
            time.sleep(0.05)
    print(f"request {id}: the word was sent; no listener has placed it yet")
    return 0


def _how(request: Request[UUID | None]) -> str:
    when = "" if request.decided_at is None else f" at {request.decided_at.astimezone():%Y-%m-%d %H:%M:%S}"
    return f"request {request.id} was {in_words(request.decision or '', request.decided_by or '')}{when}"


def _whole(chaz: Chaz, text: str) -> UUID:
    """The request meant by an id or the beginning of one. Raises UnknownRequest, InvalidEntry (of several)."""
    found = chaz.loop.run(deciding.beginning_with(chaz.inner.database, text))
    if not found:
        raise UnknownRequest(text)
    if len(found) > 1:
        raise InvalidEntry(f"{text} begins the ids of several requests: {', '.join(map(str, found))}")
    return found[0]
