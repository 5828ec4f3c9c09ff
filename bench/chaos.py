"""The chaos of the soak: faults at random, from a seed."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import threading
import time
from collections import Counter
from typing import Any

import psycopg

from bench.fleet import Fleet

LEASE = 2.0
PAUSE = (0.3, 1.5)
# How often each is drawn.
WEIGHTS = {
    "kill worker": 4,
    "kill listener": 3,
    "kill audit": 2,
    "freeze worker": 3,
    "terminate worker": 3,
    "terminate listener": 2,
    "terminate audit": 2,
    # Not killed: a run that is lost once more while it runs alone is meant to be given up.
    "terminate isolation": 1,
    "cut connections": 8,
    "flush broker": 1,
    "crash postgres": 1,
}
CUT = """
    select count(pg_terminate_backend(pid)) from pg_stat_activity
    where datname = current_database() and application_name like 'chaz-%' and random() < 1.0 / 3
"""
BACKEND = """
    select pid from pg_stat_activity
    where datname = current_database() and application_name like 'chaz-%' order by random() limit 1
"""


class Chaos(threading.Thread):
    """Keeps the fleet going, and makes faults until :meth:`calm`."""

    def __init__(self, fleet: Fleet, database_url: str, broker_url: str, prefix: str, seed: int) -> None:
        super().__init__(name="soak-chaos", daemon=True)
        self.faults: Counter[str] = Counter()
        self.log: list[tuple[float, str, str]] = []
        self.error: BaseException | None = None
        self._fleet = fleet
        self._database_url = database_url
        self._broker: Any = importlib.import_module("redis").Redis.from_url(broker_url)
        self._prefix = prefix
        self._random = random.Random(seed)
        self._calm = threading.Event()
        self._done = threading.Event()

    def run(self) -> None:
        """Tick, and strike when it is time."""
        next_fault = time.monotonic()
        try:
            while not self._done.wait(0.05):
                self._fleet.tick()
                if not self._calm.is_set() and time.monotonic() >= next_fault:
                    self._strike()
                    next_fault = time.monotonic() + self._random.uniform(*PAUSE)
        except BaseException as error:
            self.error = error

    def calm(self) -> None:
        """No more faults; the fleet is kept going, and heals."""
        self._calm.set()

    def finish(self) -> None:
        """End the thread, not the fleet."""
        self._done.set()
        if self.is_alive():
            self.join()
        self._broker.close()

    def _strike(self) -> None:
        (fault,) = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        verb, _, kind = fault.partition(" ")
        # Drawn in any case, so that a seed gives the same faults as far as the processes do the same.
        draw, seconds = self._random.random(), self._random.uniform(0.1, 1.0)
        candidates = self._fleet.ready(kind)
        if kind in ("connections", "broker", "postgres") or not candidates:
            fault = fault if kind in ("broker", "postgres") else "cut connections"
            # It may just be recovering from the last one.
            with contextlib.suppress(psycopg.OperationalError):
                {"flush broker": self._flush, "crash postgres": self._crash, "cut connections": self._cut}[fault]()
                self._struck(fault, "")
            return
        station = candidates[int(draw * len(candidates))]
        self._struck(fault, station.name)
        match verb:
            case "kill":
                station.kill(seconds)
            case "freeze":
                station.freeze(LEASE + 3 * seconds)
            case _:
                station.terminate()

    def _struck(self, fault: str, whom: str) -> None:
        self.faults[fault] += 1
        self.log.append((time.time(), fault, whom))

    def _cut(self) -> None:
        with psycopg.connect(self._database_url, autocommit=True, application_name="soak") as connection:
            connection.execute(CUT)

    def _crash(self) -> None:
        """Kill one backend hard: PostgreSQL ends all others and recovers, as after a crash of its own."""
        with psycopg.connect(self._database_url, autocommit=True, application_name="soak") as connection:
            row = connection.execute(BACKEND).fetchone()
        if row is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(row[0], signal.SIGKILL)

    def _flush(self) -> None:
        keys: list[Any] = list(self._broker.scan_iter(match=f"{self._prefix}:*"))
        if keys:
            self._broker.delete(*keys)
