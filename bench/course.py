"""The course of a soak: start the fleet, send under chaos, let everything heal, and count."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from bench import checks, logs
from bench.chaos import Chaos
from bench.fleet import Fleet
from bench.services import Services
from bench.work import Job, job
from chaz import Chaz, runs, schema
from chaz.audit import trail
from chaz.errors import ChazError

BACKLOG = 200
READY_WITHIN = 90.0
OVER_WITHIN = 90.0
"""Seconds beside those of the chaos: as long as a run was published in vain, it may wait to be published again."""


class Soak:
    """One soak, and what it found."""

    def __init__(self, services: Services, folder: Path, *, seconds: float, seed: int, isolation: bool) -> None:
        self.seed = seed
        self.seconds = seconds
        self.sent: list[UUID] = []
        self.retries = 0
        self.notes: list[str] = []
        self._url = services.database_url
        self._folder = folder
        schema.upgrade(self._url)
        self._admin = checks.Questions(self._url)
        self.fleet = Fleet(services, folder, isolation=isolation)
        self.chaos = Chaos(self.fleet, services, seed)

    def run(self) -> dict[str, Any]:
        """All of it; the numbers, with those under ``must be 0`` to be 0."""
        began = time.monotonic()
        try:
            self._until_ready()
            self.chaos.start()
            with Chaz(self._url) as chaz:
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
        self._admin.load_effects(self._folder / "effects")
        final = ("succeeded", "failed", "cancelled")
        bad = {"lost": sum(states.get(id) not in final for id in self.sent)}
        bad |= {name: self._admin.count(query) for name, query in checks.FAULTS.items()}
        bad |= {"processes that ended by themselves": len(self.fleet.problems)}
        bad |= {"audit missing": audit.missing, "audit altered": audit.altered, "runs still open": audit.open_runs}
        if not over or bad["lost"]:
            self.notes += self._admin.unfinished()
        self.notes += self._admin.failures()
        numbers = {"runs submitted": len(self.sent), "finished": len(self.sent) - bad["lost"]}
        numbers |= {name: self._admin.count(query) for name, query in checks.NUMBERS.items()}
        numbers |= {"audit events": audit.recorded, "sends repeated": self.retries}
        numbers |= {"starts refused": self.fleet.refused}
        self._admin.close()
        return {
            "seed": self.seed,
            "seconds": round(time.monotonic() - began, 1),
            "seconds until all were over": round(healed, 1),
            "seconds until the audit was complete": round(seconds, 1),
            "faults survived": self.chaos.faults.total(),
            "faults": dict(sorted(self.chaos.faults.items())),
            "logged": logs.complaints(self._folder),
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
        ends = time.monotonic() + OVER_WITHIN + self.seconds
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
