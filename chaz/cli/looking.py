"""``chaz log`` and ``chaz runs``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, get_args

from chaz.cli.options import add_command, on_terminal, positive, print_json, producer_of, session_target
from chaz.cli.render import (
    STATE_COLOURS,
    clipped,
    coloured,
    cost_text,
    entry_line,
    one_line,
    terminal_width,
    tokens_text,
)
from chaz.listings import RunFilter
from chaz.outcomes import RunState, Spent
from chaz.producer import Chaz

if TYPE_CHECKING:
    from chaz.cli.options import Commands


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the commands."""
    log = add_command(commands, common, "log", run_log, "show a session's log")
    log.add_argument("session", help="its name or id")
    log.add_argument("--follow", "-f", action="store_true", help="go on as it grows, until Ctrl-C")
    log.add_argument(
        "--after",
        default="0",
        metavar="PLACE",
        help="go on from here: a position, or the `bookmark` of an entry in JSON",
    )
    log.add_argument("--json", action="store_true", help="one JSON object per entry, whole")

    runs = add_command(
        commands, common, "runs", run_runs, "list runs, newest first; what `failed` for good; `requeue` one"
    )
    runs.add_argument(
        "verb",
        nargs="?",
        choices=("failed", "requeue"),
        help="failed: what failed for good, and why; requeue: run a failed or cancelled one anew, and print the new id",
    )
    runs.add_argument("id", nargs="?", metavar="ID", help="the run to requeue")
    runs.add_argument("--agent", help="of this agent only")
    states = get_args(RunState)
    runs.add_argument("--state", choices=states, metavar="STATE", help=f"in this state only: {', '.join(states)}")
    runs.add_argument("--session", help="of this session only: a name or an id")
    runs.add_argument("--limit", type=positive, default=50, metavar="N", help="so many at most (default 50)")
    runs.add_argument("--json", action="store_true", help="one JSON object per run")
    runs.set_defaults(refuse=runs.error)


def run_log(options: argparse.Namespace) -> int:
    """Print a session's entries in order."""
    colour = on_terminal()
    width = terminal_width() if colour else None
    with producer_of(options) as chaz:
        name, id = session_target(options.session)
        for entry in chaz.session(name, id=id).entries(follow=options.follow, after=options.after):
            if options.json:
                print_json(entry.model_dump(mode="json"))
            else:
                print(entry_line(entry, colour=colour, width=width), flush=True)
    return 0


def run_runs(options: argparse.Namespace) -> int:
    """Print runs, newest first; or what the verb says."""
    if options.verb == "requeue":
        if options.id is None:
            options.refuse("requeue needs the ID of a run")
        return run_requeue(options)
    if options.id is not None:
        options.refuse(f"{options.verb} takes no ID")
    if options.verb == "failed":
        if options.state is not None:
            options.refuse("failed takes no --state")
        return run_failed(options)
    with producer_of(options) as chaz:
        found = chaz.runs(_wanted(options, chaz))
    if options.json:
        for run in found:
            print_json(run)
        return 0
    print(
        f"{'id':36}  {'agent':16}  {'state':10}  {'try':>3}  {'steps':>5}  {'tokens':>8}  {'cost':>8}  "
        f"{'created':19}  what"
    )
    for run in found:
        state = coloured(f"{run['state']:10}", STATE_COLOURS.get(run["state"], ""), on=on_terminal())
        note = run["waits_for"] or run["result"] or ""
        session = run["session"] or run["session_id"]
        spent = Spent.model_validate(run["usage"])
        what = clipped(one_line(f"[{session}] {note}"), 80)
        print(
            f"{run['id']}  {one_line(run['agent']):16}  {state}  {run['attempt']:>3}  {run['steps']:>5}  "
            f"{tokens_text(spent):>8}  {cost_text(spent):>8}  "
            f"{run['created_at'].astimezone():%Y-%m-%d %H:%M:%S}  {what}"
        )
    return 0


def _wanted(options: argparse.Namespace, chaz: Chaz) -> RunFilter:
    session_id = None
    if options.session:
        name, id = session_target(options.session)
        session_id = chaz.session(name, id=id).id
    return RunFilter(session_id=session_id, agent=options.agent, state=options.state, limit=options.limit)


def run_failed(options: argparse.Namespace) -> int:
    """Print what failed for good, the latest first."""
    from chaz.runlistings import list_failed

    with producer_of(options) as chaz:
        found = chaz.loop.run(list_failed(chaz.inner.database, _wanted(options, chaz)))
    if options.json:
        for run in found:
            print_json(run)
        return 0
    print(f"{'id':36}  {'agent':16}  {'failed':19}  {'try':>3}  {'lost':>4}  why")
    for run in found:
        session = run["session"] or run["session_id"]
        why = clipped(one_line(f"[{session}] {run['reason']}: {run['result'] or ''}"), 120)
        print(
            f"{run['id']}  {one_line(run['agent']):16}  {run['ended_at'].astimezone():%Y-%m-%d %H:%M:%S}  "
            f"{run['attempt']:>3}  {run['crashes']:>4}  {why}"
        )
    return 0


def run_requeue(options: argparse.Namespace) -> int:
    """Run a failed or cancelled run anew; print the new run's id."""
    with producer_of(options) as chaz:
        handle = chaz.requeue(options.id)
    if options.json:
        print_json({"id": handle.id, "retry_of": options.id})
    else:
        print(handle.id)
    return 0
