"""A deployment under chaos: ``python -m bench.soak --minutes 5``. Nothing may be lost, and nothing may happen twice.

Its own PostgreSQL and Valkey, two listeners, workers and audit consumers, and a producer in this process. When the
time is over the chaos ends, everything heals, and the database is asked what happened.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, NoReturn
from uuid import UUID, uuid4

from bench import checks
from bench.chaos import Chaos
from bench.fleet import Fleet
from bench.work import Job, job
from chaz import Chaz, runs, schema
from chaz.audit import trail
from chaz.embedded import start_services
from chaz.errors import ChazError
from chaz.settings import Settings

BACKLOG = 200
READY_WITHIN = 90.0
OVER_WITHIN = 120.0
EFFECTS = """
    create table effects (name text, key text, idempotent boolean, pid int, at timestamptz default clock_timestamp());
    create index on effects (key)
"""


class Soak:
    """One soak, and what it found."""

    def __init__(self, urls: tuple[str, str], folder: Path, *, seconds: float, seed: int, isolation: bool) -> None:
        self.seed = seed
        self.seconds = seconds
        self.sent: list[UUID] = []
        self.retries = 0
        self.notes: list[str] = []
        self._urls = urls
        schema.upgrade(urls[0])
        self._admin = checks.Questions(urls[0])
        self._admin.ask(EFFECTS)
        self.fleet = Fleet(*urls, folder, isolation=isolation)
        self.chaos = Chaos(self.fleet, *urls, Settings().broker_prefix, seed)

    def run(self) -> dict[str, Any]:
        """All of it; the numbers, with those under ``must be 0`` to be 0."""
        began = time.monotonic()
        try:
            self._until_ready()
            self.chaos.start()
            with Chaz(self._urls[0]) as chaz:
                self._produce(chaz)
                self.chaos.calm()
                chaos_ended = time.monotonic()
                over = self._wait_until_over()
                healed = time.monotonic() - chaos_ended
                audit, seconds = self._wait_for_audit(chaz)
                states = self._states(chaz)
            self.chaos.finish()
            if self.chaos.error is not None:
                raise self.chaos.error
            self.fleet.stop()
        finally:
            # First, or it starts again what is ended here.
            self.chaos.finish()
            self.fleet.end()
        final = ("succeeded", "failed", "cancelled")
        bad = {"lost": sum(states.get(id) not in final for id in self.sent)}
        bad |= {name: self._admin.count(query) for name, query in checks.FAULTS.items()}
        bad |= {"audit missing": audit.missing, "audit altered": audit.altered, "runs still open": audit.open_runs}
        if not over or bad["lost"]:
            self.notes += self._admin.unfinished()
        self.notes += self._admin.failures()
        numbers = {"runs submitted": len(self.sent), "finished": len(self.sent) - bad["lost"]}
        numbers |= {name: self._admin.count(query) for name, query in checks.NUMBERS.items()}
        numbers |= {"audit events": audit.recorded, "sends repeated": self.retries}
        self._admin.close()
        return {
            "seed": self.seed,
            "seconds": round(time.monotonic() - began, 1),
            "seconds until all were over": round(healed, 1),
            "seconds until the audit was complete": round(seconds, 1),
            "faults survived": self.chaos.faults.total(),
            "faults": dict(sorted(self.chaos.faults.items())),
            "numbers": numbers,
            "must be 0": bad,
            "ok": not any(bad.values()),
            "notes": self.notes + self.fleet.problems,
        }

    def _until_ready(self) -> None:
        for station in self.fleet.stations:
            station.start()
        ends = time.monotonic() + READY_WITHIN
        while len(self.fleet.ready()) < len(self.fleet.stations):
            if time.monotonic() > ends or self.fleet.problems:
                raise SystemExit("\n".join(["the stack did not start", *self.fleet.problems]))
            self.fleet.tick()
            time.sleep(0.05)

    def _produce(self, chaz: Chaz) -> None:
        """Send as long as there is time, with a bounded backlog."""
        draw = random.Random(self.seed + 1)
        ends = time.monotonic() + self.seconds
        while time.monotonic() < ends and self.chaos.error is None:
            if self._admin.count(checks.UNFINISHED) >= BACKLOG:
                time.sleep(0.05)
                continue
            for _ in range(10):
                for wanted in job(draw, len(self.sent)):
                    self._send(chaz, wanted)

    def _send(self, chaz: Chaz, wanted: Job) -> None:
        """Send once, however often it takes: the id is the same."""
        id, session = uuid4(), chaz.session(wanted.session)
        ends = time.monotonic() + 60
        while True:
            try:
                if wanted.agent is None:
                    session.say(wanted.text, id=id)
                else:
                    session.direct(wanted.agent, wanted.text, id=id)
            except ChazError:
                if time.monotonic() > ends:
                    raise
                self.retries += 1
                time.sleep(0.1)
            else:
                self.sent.append(id)
                return

    def _wait_until_over(self) -> bool:
        ends = time.monotonic() + OVER_WITHIN
        while self._admin.count(checks.UNFINISHED):
            if time.monotonic() > ends:
                return False
            time.sleep(0.1)
        return True

    def _wait_for_audit(self, chaz: Chaz) -> tuple[trail.Verification, float]:
        """Wait for what is told again: the longer a run is over, the more rarely it is looked at."""
        began = time.monotonic()
        ends = began + 60 + self.seconds
        while self._admin.count("select count(*) from chaz.runs where audit_after is not null"):
            if time.monotonic() > ends:
                break
            time.sleep(0.2)
        return chaz.loop.run(trail.verify(chaz.inner.database)), time.monotonic() - began

    def _states(self, chaz: Chaz) -> dict[UUID, str]:
        found: dict[UUID, str] = {}
        for start in range(0, len(self.sent), 1000):
            rows = chaz.loop.run(runs.status(chaz.inner.database, self.sent[start : start + 1000]))
            found |= {id: row["state"] for id, row in rows.items()}
        return found


@contextlib.contextmanager
def services(folder: Path) -> Generator[tuple[str, str]]:
    """PostgreSQL and Valkey of the soak's own."""
    with start_services(folder / "data", durable=True) as started:
        yield started.database_url, started.broker_url


def show(report: dict[str, Any]) -> None:
    """Print it as a table."""
    for title in ("numbers", "must be 0", "faults"):
        print(f"\n{title}")
        for name, number in report[title].items():
            print(f"  {name:32} {number:>8}{'  <--' if title == 'must be 0' and number else ''}")
    print()
    for name, number in report.items():
        if not isinstance(number, (dict, list)):
            print(f"{name}: {number}")
    for note in report["notes"]:
        print(f"note: {note}")


def terminated(*_: object) -> NoReturn:
    """SIGTERM ends it as Ctrl-C does: with nothing left behind."""
    raise KeyboardInterrupt


def main() -> int:
    """Exit code 0 if all that must be 0 is, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=5)
    length.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--isolation", action="store_true", help="with a worker for suspect runs as well")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--logs", type=Path, help="copy the processes' logs here")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, terminated)
    logging.getLogger("psycopg").setLevel("CRITICAL")
    seconds = options.seconds or options.minutes * 60
    print(f"soak: {seconds:g} s, seed {options.seed}", file=sys.stderr, flush=True)
    folder = Path(tempfile.mkdtemp(prefix="chaz-soak-"))
    try:
        with services(folder) as urls:
            soak = Soak(urls, folder, seconds=seconds, seed=options.seed, isolation=options.isolation)
            try:
                report = soak.run()
            finally:
                if options.logs:
                    options.logs.mkdir(parents=True, exist_ok=True)
                    for log in folder.glob("*.log"):
                        shutil.copy(log, options.logs)
                    faults = "\n".join(f"{at:.2f} {fault} {whom}" for at, fault, whom in soak.chaos.log)
                    (options.logs / "faults.txt").write_text(faults)
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
