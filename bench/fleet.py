"""The processes of the soak: the same twice, as on two machines."""

from __future__ import annotations

import os
import time
from pathlib import Path

from bench.services import Services
from bench.station import Station

ROOT = Path(__file__).parents[1]
QUICK = ("--without-gossip", "--without-mingle")


class Fleet:
    """One of each on each of two machines. :meth:`tick` is called all the time, by one thread."""

    def __init__(self, services: Services, folder: Path, *, isolation: bool) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("CHAZ_")}
        environment = clean | {
            "CHAZ_BROKER_URL": services.to_broker.url,
            "CHAZ_BROKER_PREFIX": services.settings.broker_prefix,
            "CHAZ_AGENTS": "bench.agents",
            # Workers come and go all the time here, and each would load the scanner's rules anew.
            "CHAZ_SECRETS": "off",
            "CHAZ_LEASE": "2",
            "CHAZ_BEAT": "0.5",
            "CHAZ_SWEEP": "1",
            "CHAZ_SHUTDOWN_GRACE": "2",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "SOAK_EFFECTS": str(folder / "effects"),
        }
        first = environment | {"CHAZ_DATABASE_URL": services.database_url}
        second = environment | {"CHAZ_DATABASE_URL": services.to_postgres.url}
        self.stations: list[Station] = []
        for n, machine in ((1, first), (2, second)):
            worker = ["celery", "-A", "chaz", "worker", "-l", "INFO", "-n", f"worker{n}@%h", *QUICK]
            commands = {"listener": ["chaz", "listener"], "audit": ["chaz", "audit"], "worker": worker}
            for kind, command in commands.items():
                self.stations.append(Station(f"{kind}{n}", command, machine, folder))
        if isolation:
            command = ["chaz", "worker", "--isolation", "--name", "isolation1@%h"]
            self.stations.append(Station("isolation1", command, first, folder))

    @property
    def problems(self) -> list[str]:
        """What processes did that nobody asked for."""
        return [problem for station in self.stations for problem in station.problems]

    @property
    def refused(self) -> int:
        """Starts that failed because a service was away."""
        return sum(station.refused for station in self.stations)

    def tick(self) -> None:
        """Do what is due for each."""
        for station in self.stations:
            station.tick()

    def ready(self, kind: str = "") -> list[Station]:
        """Those of a kind that are ready."""
        return [s for s in self.stations if s.state == "ready" and s.kind.startswith(kind)]

    def stop(self) -> None:
        """Ask all to end, workers first, and wait for it."""
        for kind in ("worker", "isolation", "listener", "audit"):
            members = [station for station in self.stations if station.kind == kind]
            for station in members:
                if station.state != "down":
                    station.terminate()
            while any(station.state != "down" for station in members):
                for station in members:
                    station.tick(restart=False)
                time.sleep(0.02)

    def end(self) -> None:
        """End all by any means."""
        for station in self.stations:
            station.end()
