"""How long a run waits for its context: ``python -m bench.context``. From the insert to the first call of a model.

In one process, station by station, without broker and polling: send, place, claim, read and fit; then the run ends.
Sessions of 100 and of 1,000,000 entries, made by COPY: every fifth is a message of a person's, every fifth the answer,
the rest are acks and audit. Of the long one the newest 100 are in view and a summary stands for the others; and once
more without a summary, where as much is read as a model's window holds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from chaz import runs, schema, sessionlog, workers
from chaz.completion import end_run
from chaz.database import Database, connect_blocking
from chaz.embedded import start_services
from chaz.entries import session_id
from chaz.outcomes import RunOutcome
from chaz.placing import place
from chaz.runs import Claim
from chaz.runtime.context import conversation_of
from chaz.runtime.tokens import estimate
from chaz.runtime.window import Window
from chaz.sessionlog import Submission
from chaz.worker import BYTES_OF_A_TOKEN

ROOM = 120_000
"""Tokens of a window."""
SHORT = 100
WORDS = "What is said here is about as long as what people say to each other in a chat. " * 3
KINDS = ("message", "ack", "tool_call", "tool_result", "answer")


def main(arguments: list[str] | None = None) -> int:
    """Print medians, and the ratios of the long sessions to the short one."""
    parser = argparse.ArgumentParser(prog="python -m bench.context", description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="chaz-context-") as folder, start_services(Path(folder)) as services:
        url = services.database_url
        schema.upgrade(url)
        long = f"{options.entries} entries"
        sessions = {"100 entries": SHORT, long: options.entries, f"{long}, no summary": options.entries}
        fill(url, sessions)
        medians = asyncio.run(measure(url, list(sessions), options.rounds))
    short = medians["100 entries"]
    for name, times in medians.items():
        print(f"{name}:")
        for what, value in times.items():
            ratio = "" if times is short else f"  {value / short[what]:6.2f} times that of 100 entries"
            print(f"    {what:28} {value:8.2f}{ratio if what.endswith('ms') else ''}")
    return 0


def fill(url: str, sessions: dict[str, int]) -> None:
    """Make the sessions, each with so many entries and the runs that answered."""
    with connect_blocking(url, "bench") as connection:
        for name, count in sessions.items():
            id = session_id(name)
            connection.execute("insert into chaz.sessions (id, name) values (%s, %s)", [id, name])
            connection.execute("insert into chaz.heads (session_id, next_position) values (%s, %s)", [id, count + 1])
            connection.execute("select chaz.attach(%s, 'solo')", [str(id)])
            ids = [uuid4() for _ in range(count // 5 + 1)]
            columns = "id, session_id, position, seq, type, sender, author, content, metadata, run_id"
            with connection.cursor().copy(f"copy chaz.entries ({columns}) from stdin") as copy:
                for row in _entries(id, count, ids, with_summary=not name.endswith("no summary")):
                    copy.write_row(row)
            columns = "id, session_id, agent, state, cause, trigger_position, root_run_id, deadline, ended_at"
            with connection.cursor().copy(f"copy chaz.runs ({columns}) from stdin") as copy:
                for number, run in enumerate(ids[: count // 5]):
                    copy.write_row([run, id, "solo", "succeeded", "message", 5 * number + 1, run, "now", "now"])
        connection.commit()
        connection.autocommit = True
        connection.execute("vacuum analyze")


def _entries(id: UUID, count: int, runs: list[UUID], *, with_summary: bool) -> Iterator[list[Any]]:
    for position, kind in zip(range(1, count + 1), itertools.cycle(KINDS), strict=False):
        run = runs[(position - 1) // 5]
        if with_summary and count > SHORT and position == count - SHORT:
            covers = json.dumps({"covers": position - 1})
            yield [uuid4(), id, position, 0, "summary", "solo", "agent", WORDS * 10, covers, None]
        elif kind == "message":
            yield [run, id, position, 0, "message", "ada", "human", WORDS, "{}", None]
        elif kind == "answer":
            yield [uuid4(), id, position, 0, "message", "solo", "agent", WORDS, "{}", run]
        else:
            seq = 0 if kind == "ack" else KINDS.index(kind)
            yield [uuid4(), id, position, seq, kind, "solo", "agent", WORDS if seq else "", "{}", run]


async def measure(url: str, sessions: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Medians by session and station, in milliseconds, taken in turn."""
    database, worker = Database(url), uuid4()
    await database.open()
    times: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in sessions}
    try:
        served = [runs.Served("solo", "solo", "v1", 30, timedelta(hours=1))]
        await database.transact(lambda tx: runs.register_agents(tx, served))
        with connect_blocking(url, "bench") as connection:
            workers.beat(connection, worker, name="bench", pid=0, lease=timedelta(hours=1))
            connection.commit()
        for number in range(rounds + 5):
            for name in sessions:
                measured = await _round(database, worker, name)
                # The first ones warm up pools and caches.
                if number >= 5:
                    for what, value in measured.items():
                        times[name][what].append(value)
    finally:
        await database.close()
    return {name: {what: statistics.median(of) for what, of in each.items()} for name, each in times.items()}


async def _round(database: Database, worker: UUID, session: str) -> dict[str, float]:
    times = [time.perf_counter()]

    def passed() -> float:
        times.append(time.perf_counter())
        return (times[-1] - times[-2]) * 1000

    message = Submission(session=session, type="message", sender="ada", author="human", content=WORDS)
    run = await database.transact(lambda tx: sessionlog.send(tx, message))
    send = passed()
    await database.transact(lambda tx: place(tx, default_agent="", first_wait=5))
    placing = passed()
    claim = await database.transact(lambda tx: runs.claim(tx, run, agent="solo", worker_id=worker, claim_id=uuid4()))
    assert isinstance(claim, Claim), claim
    claiming = passed()
    conversation, triggers = await database.transact(
        lambda tx: sessionlog.context_entries(
            tx, session_id=claim.session_id, run_id=run, read_to=claim.read_to, room=ROOM * BYTES_OF_A_TOKEN
        )
    )
    reading = passed()
    shown = Window(conversation_of("solo", conversation, triggers), estimate, ROOM).show()
    fitting = passed()
    first_call = (times[-1] - times[0]) * 1000
    await database.transact(lambda tx: end_run(tx, claim, RunOutcome(state="succeeded", text=WORDS)))
    return {
        "send, ms": send,
        "place, ms": placing,
        "claim, ms": claiming,
        "read the context, ms": reading,
        "fit it, ms": fitting,
        "insert to first call, ms": first_call,
        "end, ms": passed(),
        "messages that are shown": len(shown),
    }


if __name__ == "__main__":
    raise SystemExit(main())
