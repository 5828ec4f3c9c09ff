"""``chaz demo``: a researcher, its two readers and three texts, on the real path, shown as it grows."""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import UUID

from chaz import sessionlog
from chaz.audit import trail
from chaz.cli.options import add_command, on_terminal, positive, print_json
from chaz.cli.render import clipped, coloured, terminal_width, what
from chaz.database import Database
from chaz.demo.agents import MODEL, REAL
from chaz.entries import Entry
from chaz.errors import RunError
from chaz.listings import RunFilter
from chaz.producer import Chaz
from chaz.result import AgentResult
from chaz.sessionlog import Follower

if TYPE_CHECKING:
    from chaz.cli.options import Commands
    from chaz.cli.stack import Stack

SESSION = "demo"
QUESTION = (
    "Which of the texts garden.txt, log.txt and queue.txt is the longest, and how many words do they have together?"
)
ANSWER_WITHIN = 300.0
AUDIT_WITHIN = 10.0
WARM_UPS = 16
LOOK_EVERY = 0.1
HELD_BACK = timedelta(seconds=0.4)
_COLOURS = {"directive": "1;36", "message": "1;32", "error": "1;31", "ack": "2"}


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    demo = add_command(commands, common, "demo", run_demo, "see agents work: everything in a temporary folder")
    demo.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    demo.add_argument("--workers", type=positive, default=2, metavar="N", help="worker processes (2)")
    demo.add_argument("--verbose", action="store_true", help="show what the processes write, too")


@dataclass
class Seen:
    """What came out of the demo."""

    entries: list[Entry] = field(default_factory=list[Entry])
    runs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    missing: dict[UUID, int] = field(default_factory=dict[UUID, int])
    handle: AgentResult | None = None
    answer: str = ""
    failed: bool = False
    seconds: float = 0.0
    idle: list[float] = field(default_factory=list[float])
    """Milliseconds from insert to claim of runs that came to an idle system."""


def run_demo(options: argparse.Namespace) -> int:
    """Run the demo; exit code 0 if its answer came and its audit trail is complete."""
    from chaz.cli.stack import Stack
    from chaz.cli.up import DEMO_AGENTS

    # Leave every `with` in order, so that nothing stays behind.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    say: Callable[[str], None] = _say_nothing if options.json else print
    say(f"chaz demo with {f'the model {MODEL}' if REAL else 'the scripted model (set OPENAI_API_KEY for a real one)'}.")
    say("Starting PostgreSQL, Valkey, a listener, an audit consumer and workers in a temporary folder …")

    def on_line(name: str, line: str) -> None:
        if options.verbose:
            print(f"{name:>9} │ {line}", file=sys.stderr, flush=True)

    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="chaz-demo-", ignore_cleanup_errors=True) as folder,
        Stack(
            Path(folder) / "data",
            agents=DEMO_AGENTS,
            workers=options.workers,
            durable=False,
            # Whatever Celery settings lie in the folder that it is started in are another application's.
            celery_config="chaz.demo",
            on_line=on_line,
        ) as stack,
        Chaz(settings=stack.settings) as chaz,
    ):
        say(f"All of it is ready after {time.monotonic() - started:.1f} s. One INSERT into the session {SESSION!r}:\n")
        warm = _warm_up(chaz)
        seen = _ask(chaz, say)
        seen.idle = _idle_latencies(chaz, warm[WARM_UPS // 2 :])
        if options.json:
            _print_json(seen)
        else:
            _print_summary(seen, stack)
    return 1 if seen.failed or seen.missing else 0


def _exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _say_nothing(_: str) -> None: ...


def _warm_up(chaz: Chaz) -> list[UUID]:
    """Let each process open its connections and prepare its statements; the runs that it took, one at a time."""
    if REAL:
        return []
    runs: list[UUID] = []
    for number in range(WARM_UPS):
        agent = ("reader", "researcher")[number % 2]
        handle = chaz.session("warm-up").direct(agent, '```script\n[{"text": "warm"}]\n```')
        handle.wait(ANSWER_WITHIN)
        runs.append(handle.id)
        # Until the listener sleeps again.
        time.sleep(0.1)
    return runs


def _idle_latencies(chaz: Chaz, runs: list[UUID]) -> list[float]:
    """Milliseconds from the insert to the claim of each run, by the database's clock."""
    rows = chaz.loop.run(
        chaz.inner.database.fetch(
            """
            select extract(epoch from r.started_at - e.created_at)::float8 * 1000 as ms
            from chaz.runs r join chaz.entries e using (id) where r.id = any(%(runs)s)
            """,
            {"runs": runs},
        )
    )
    return [row["ms"] for row in rows]


def _ask(chaz: Chaz, say: Callable[[str], None]) -> Seen:
    seen = Seen()
    asked = time.monotonic()
    handle = seen.handle = chaz.session(SESSION).direct("researcher", QUESTION, sender="you")
    tree = Tree(chaz, handle.id, chaz.session(SESSION).id)
    width = terminal_width() if on_terminal() else None
    while not handle.ready() and time.monotonic() - asked < ANSWER_WITHIN:
        tree.show(seen, say, width)
        time.sleep(LOOK_EVERY)
    try:
        seen.answer = handle.get(ANSWER_WITHIN) or ""
    except RunError as error:
        seen.answer, seen.failed = str(error), True
    database = chaz.inner.database
    seen.runs = chaz.runs(RunFilter(root_run_id=handle.id))
    root = next(run for run in seen.runs if run["id"] == handle.id)
    seen.seconds = (root["ended_at"] - root["created_at"]).total_seconds()
    ends = time.monotonic() + AUDIT_WITHIN
    while True:
        tree.show(seen, say, width)
        seen.missing = chaz.loop.run(trail.missing(database, handle.id))
        if not (seen.missing or tree.incomplete()) or time.monotonic() > ends:
            break
        time.sleep(LOOK_EVERY)
    tree.show(seen, say, width, to_the_end=True)
    return seen


class Tree:
    """The sessions of a tree of runs, read as they grow."""

    def __init__(self, chaz: Chaz, root_run_id: UUID, session_id: UUID) -> None:
        self._chaz = chaz
        self._root = root_run_id
        self._database: Database = chaz.inner.database
        self._followers: dict[UUID, tuple[int, Follower]] = {session_id: (0, Follower(self._database, session_id))}
        self._first: float | None = None
        self._held: list[tuple[int, Entry]] = []

    def show(self, seen: Seen, say: Callable[[str], None], width: int | None, *, to_the_end: bool = False) -> None:
        """Show what is new, indented by depth, in the order in which it happened.

        Audit entries come a moment after the run went on, so all is held back for that moment.
        """
        for child in self._chaz.loop.run(sessionlog.child_sessions(self._database, self._root)):
            self._followers.setdefault(child["id"], (child["depth"], Follower(self._database, child["id"])))
        for depth, follower in self._followers.values():
            self._held += [(depth, entry) for entry in self._chaz.loop.run(follower.next())]
        self._held.sort(key=lambda pair: pair[1].created_at)
        until = datetime.now(UTC) - (timedelta(0) if to_the_end else HELD_BACK)
        while self._held and (to_the_end or self._held[0][1].created_at < until):
            depth, entry = self._held.pop(0)
            seen.entries.append(entry)
            self._first = self._first or entry.created_at.timestamp()
            since = (entry.created_at.timestamp() - self._first) * 1000
            line = f"{since:7.1f} ms  {'│   ' * depth}{what(entry)}"
            say(coloured(clipped(line, width) if width else line, _COLOURS.get(entry.type, "33"), on=width is not None))

    def incomplete(self) -> bool:
        """Whether an entry is still to come that the runs have counted."""
        return any(follower.open_runs for _, follower in self._followers.values())


def _print_json(seen: Seen) -> None:
    assert seen.handle is not None
    print_json(
        {
            "answer": seen.answer,
            "run_id": seen.handle.id,
            "entries": Counter(entry.type for entry in seen.entries),
            "runs": [
                {
                    "id": run["id"],
                    "agent": run["agent"],
                    "state": run["state"],
                    "attempts": run["attempt"],
                    "parent": run["parent_run_id"],
                }
                for run in reversed(seen.runs)
            ],
            "audit_complete": not seen.missing,
            "seconds": seen.seconds,
        }
    )


def _print_summary(seen: Seen, stack: Stack) -> None:
    asked = {entry.id: entry.created_at for entry in seen.entries}
    print(f"\nAnswer:  {seen.answer}\n")
    for run in reversed(seen.runs):
        if run["started_at"] and run["id"] in asked:
            claim = (run["started_at"] - asked[run["id"]]).total_seconds() * 1000
            attempts = f", {run['attempt']} claims (it parked for its children)" if run["attempt"] > 1 else ""
            print(f"  {run['agent']:10} {run['state']:9}  insert → claim {claim:5.1f} ms{attempts}")
    complete = "complete" if not seen.missing else f"{sum(seen.missing.values())} events are missing"
    print(f"  round trip {seen.seconds * 1000:.0f} ms; {len(seen.entries)} entries; the audit trail is {complete}")
    if seen.idle:
        print(f"  when idle: insert → claim {statistics.median(seen.idle):.1f} ms (median of {len(seen.idle)} runs)\n")
    print("Who did what (the warm-up included):")
    for process in stack.processes:
        counts = process.counts
        did = {
            "listener": f"published {counts['published']} deliveries",
            "audit": f"recorded events in {counts['recorded']} batches",
        }.get(
            process.name,
            f"claimed {counts['claimed']} times, parked {counts['parked']}, ended {counts['ended']} runs",
        )
        print(f"  {process.name:9} pid {process.pid}: {did}")
    print(
        "\nNext:  chaz up        keeps it running; it prints what to set for the rest\n"
        "       chaz send hello 'How long are the texts?' --to researcher --wait\n"
        "       chaz log hello --follow\n"
        "       README.md      your own agents, five lines of Python, deployment"
    )
