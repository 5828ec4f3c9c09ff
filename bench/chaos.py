"""The chaos of the soak: faults at random, from a seed."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter

import psycopg

from bench.fleet import Fleet
from bench.services import Services, freeze

LEASE = 2.0
PAUSE = (0.3, 1.5)
# How often each is drawn.
PROCESSES = {
    "kill worker": 4,
    "kill listener": 3,
    "kill audit": 2,
    "freeze worker": 3,
    "freeze listener": 2,
    "freeze audit": 2,
    "terminate worker": 3,
    "terminate listener": 2,
    "terminate audit": 2,
    # Not killed: a run that is lost once more while it runs alone is meant to be given up.
    "terminate isolation": 1,
}
SERVICES = {
    "cut connections": 6,
    "freeze connections": 2,
    "freeze backends": 2,
    "restart postgres": 1,
    "stop postgres at once": 1,
    "crash a backend": 1,
    "cut broker": 2,
    "freeze broker": 1,
    "flush broker": 1,
    "restart broker": 1,
}


class Chaos(threading.Thread):
    """Keeps the fleet going, and makes faults until :meth:`calm`."""

    def __init__(self, fleet: Fleet, services: Services, seed: int) -> None:
        super().__init__(name="soak-chaos", daemon=True)
        self.faults: Counter[str] = Counter()
        self.log: list[tuple[float, str, str]] = []
        self.error: BaseException | None = None
        self._fleet = fleet
        self._services = services
        self._weights = PROCESSES | SERVICES
        if not services.owns_broker:
            del self._weights["restart broker"]
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

    def _strike(self) -> None:
        (fault,) = self._random.choices(list(self._weights), list(self._weights.values()))
        # Drawn in any case, so that a seed gives the same faults as far as the processes do the same.
        draw, seconds = self._random.random(), self._random.uniform(0.1, 1.0)
        if fault in SERVICES:
            self._strike_services(fault, seconds)
            return
        verb, _, kind = fault.partition(" ")
        candidates = self._fleet.ready(kind)
        if not candidates:
            self._strike_services("cut connections", seconds)
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

    def _strike_services(self, fault: str, seconds: float) -> None:
        services = self._services
        self._struck(fault, "")
        # PostgreSQL may just be recovering from the last one.
        with contextlib.suppress(psycopg.OperationalError):
            match fault:
                case "freeze connections":
                    freeze(services.to_postgres, LEASE + 3 * seconds)
                case "freeze backends":
                    # Less than a lease: the isolation worker's are among them.
                    services.freeze_backends(seconds)
                case "restart postgres":
                    services.restart_postgres(crash=False)
                case "stop postgres at once":
                    services.restart_postgres(crash=True)
                case "crash a backend":
                    services.crash_postgres()
                case "cut broker":
                    services.to_broker.cut()
                case "freeze broker":
                    freeze(services.to_broker, LEASE + 3 * seconds)
                case "flush broker":
                    services.flush_broker()
                case "restart broker":
                    services.restart_broker()
                case _:
                    services.cut_connections()

    def _struck(self, fault: str, whom: str) -> None:
        self.faults[fault] += 1
        self.log.append((time.time(), fault, whom))
