"""Parents that wait hold no slot: ``python -m bench.waiting --parents 1000``.

Its own PostgreSQL and Valkey, a listener, an audit consumer and one worker with two slots. Each parent spawns a child,
which spawns a child. All the while the worker is asked what it is at, and the database what those runs do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from bench.fleet import ROOT, Station
from chaz import Chaz, schema
from chaz.celery import make_app
from chaz.database import connect_blocking
from chaz.embedded import start_services
from chaz.settings import Settings

READY_WITHIN = 90.0
LEAVES_WITHIN = 5.0
"""Seconds for a slot to come free once its run has parked: that is committed first."""


def family(number: int) -> str:
    """What a parent is told: to spawn a child that spawns a child."""
    told = _script({"text": f"{number}"})
    for _ in range(2):
        call = {"tool": "spawn_agent", "arguments": {"agent": "parent", "instruction": told.replace("{{", "{{!")}}
        told = _script({"calls": [call]}, {"text": "{{results}}, over"})
    return told


def _script(*turns: dict[str, Any]) -> str:
    return f"```script\n{json.dumps(turns)}\n```"


class Slots:
    """Looks at what a worker is at. A run that is parked and stays in a slot is ``held``."""

    def __init__(self, environment: Mapping[str, str], database_url: str) -> None:
        self.looks = 0
        self.most_active = 0
        self.most_parked = 0
        self.held: list[UUID] = []
        self._app = make_app(
            Settings(
                broker_url=environment["CHAZ_BROKER_URL"],
                broker_prefix=environment.get("CHAZ_BROKER_PREFIX", Settings().broker_prefix),
            )
        )
        self._connection = connect_blocking(database_url, "bench")

    def __enter__(self) -> Slots:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        cast("Any", self._app).close()

    def look(self) -> None:
        """Look once; at a run that waits in a slot again, until it has left or stayed too long."""
        before = self._parked()
        self.most_parked = max(self.most_parked, len(before))
        suspects = self._active() & before.keys()
        ends = time.monotonic() + LEAVES_WITHIN
        while suspects and time.monotonic() < ends:
            now = self._parked()
            suspects = {run for run in suspects & self._active() if now.get(run) == before[run]}
        self.held += suspects
        self.looks += 1

    def _active(self) -> set[UUID]:
        replies: dict[str, list[dict[str, str]]] = cast("Any", self._app).control.inspect(timeout=0.5).active() or {}
        active = {UUID(task["id"]) for tasks in replies.values() for task in tasks}
        self.most_active = max(self.most_active, len(active))
        return active

    def _parked(self) -> dict[UUID, int]:
        rows = self._connection.execute("select id, attempt from chaz.runs where state = 'parked'").fetchall()
        return {row["id"]: row["attempt"] for row in rows}


def run(parents: int, folder: Path, urls: tuple[str, str]) -> dict[str, Any]:
    """All of it; the numbers."""
    schema.upgrade(urls[0])
    environment = {
        "CHAZ_DATABASE_URL": urls[0],
        "CHAZ_BROKER_URL": urls[1],
        "CHAZ_AGENTS": "bench.agents",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "PATH": "/usr/bin:/bin",
    }
    worker = ["celery", "-A", "chaz", "worker", "-l", "WARNING", "-c", "2", "-n", "worker1@%h"]
    commands = {"listener1": ["chaz", "listener"], "audit1": ["chaz", "audit"], "worker1": worker}
    stations = [Station(name, command, environment, folder) for name, command in commands.items()]
    try:
        for station in stations:
            station.start()
        ends = time.monotonic() + READY_WITHIN
        while any(station.state != "ready" for station in stations):
            if time.monotonic() > ends or any(station.problems for station in stations):
                raise SystemExit("\n".join(problem for station in stations for problem in station.problems))
            for station in stations:
                station.tick()
            time.sleep(0.05)
        began = time.monotonic()
        with Chaz(urls[0]) as chaz, Slots(environment, urls[0]) as slots:
            results = [chaz.session(f"family {n}").direct("parent", family(n)) for n in range(parents)]
            while not all(result.ready() for result in results):
                slots.look()
            wrong = sum(result.get(timeout=1) != f"{n}, over, over" for n, result in enumerate(results))
            seconds = time.monotonic() - began
    finally:
        for station in stations:
            station.end()
    return {
        "parents": parents,
        "runs": 3 * parents,
        "seconds": round(seconds, 1),
        "looks": slots.looks,
        "most slots busy": slots.most_active,
        "most runs parked": slots.most_parked,
        "slots held by a waiting run": len(slots.held),
        "wrong answers": wrong,
    }


def main() -> int:
    """Exit code 0 if all answered, and nobody held a slot."""
    parser = argparse.ArgumentParser(prog="python -m bench.waiting", description=__doc__)
    parser.add_argument("--parents", type=int, default=1000)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaz-waiting-"))
    try:
        with start_services(folder / "data", durable=True) as started:
            numbers = run(options.parents, folder, (started.database_url, started.broker_url))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, number in numbers.items():
        print(f"{name:30} {number:>8}")
    return 1 if numbers["wrong answers"] or numbers["slots held by a waiting run"] else 0


if __name__ == "__main__":
    sys.exit(main())
