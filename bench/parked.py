"""What a parked run costs: ``python -m bench.parked``. 10,000 of them, and the memory of worker and listener.

Each run really goes its way: sent, placed, published, claimed, spawning, parked. Its child is to come later, so that it
stays parked. Memory is read at some counts, after a pause for what was on its way: of the listener what it has for
itself; of the worker, whose many threads leave gaps of megabytes that come and go, what it says that it holds when its
garbage has been collected. The slope is the least squares' one over the second half: what a process takes once for
its pools and caches is no cost of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import psycopg

from bench.fleet import QUICK, ROOT, Station
from bench.spawn import until_ready
from chaz import Chaz, schema
from chaz.embedded import start_services

LIMIT = 100.0
"""Bytes of a process per parked run."""
PARKED_WITHIN = 1800.0
PARENT = json.dumps(
    [
        {"calls": [{"tool": "spawn_agent", "arguments": {"agent": "child", "instruction": "wait"}}]},
        {"text": "done"},
    ]
)
TIDY = json.dumps([{"calls": [{"tool": "bytes_in_use", "arguments": {}}]}, {"text": "{{results}}"}])


def resident(pid: int) -> int:
    """The private memory of a process in bytes: what it alone would give back."""
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def slope(points: list[tuple[int, int]]) -> float:
    """Least squares, in bytes per run."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def main(arguments: list[str] | None = None) -> int:
    """Print memory by count, and the slopes; 1 if one is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--points", type=int, default=10)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="chaz-parked-") as folder:
        measured = measure(Path(folder), options.runs, options.points)
    worst = 0.0
    for name, points in measured.items():
        for count, size in points:
            print(f"{name:10} {count:7} parked  {size / 2**20:8.2f} MiB")
        per_run = slope(points[len(points) // 2 :])
        worst = max(worst, per_run)
        print(f"{name:10} slope {per_run:.1f} bytes a parked run (limit {LIMIT:g})")
    return 1 if worst > LIMIT else 0


def measure(folder: Path, runs: int, points: int) -> dict[str, list[tuple[int, int]]]:
    """Private memory of each process at so many counts of parked runs."""
    with start_services(folder / "services", durable=False) as services:
        schema.upgrade(services.database_url)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("CHAZ_")} | {
            "CHAZ_DATABASE_URL": services.database_url,
            "CHAZ_BROKER_URL": services.broker_url,
            "CHAZ_AGENTS": "bench.agents",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        # All of Python's memory is malloc's then, which can say how much of it is in use; what threads keep for
        # themselves of what they have freed would count as such.
        counted = {"PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "1"}
        counted["GLIBC_TUNABLES"] = "glibc.malloc.tcache_count=0"
        # The children's agent is registered by this worker, and served from a queue that none consumes.
        worker = ["celery", "-A", "chaz", "worker", "-l", "WARNING", "-n", "worker1@%h", "-Q", "chaz.parent", *QUICK]
        commands = {"listener1": ["chaz", "listener"], "audit1": ["chaz", "audit"], "worker1": worker}
        stations = [
            Station(name, command, environment | (counted if name == "worker1" else {}), folder)
            for name, command in commands.items()
        ]
        measured: dict[str, list[tuple[int, int]]] = {"listener1": [], "worker1": []}
        try:
            for station in stations:
                station.start()
            until_ready(stations)
            with Chaz(services.database_url) as chaz:
                for number in range(1, points + 1):
                    count = runs * number // points
                    for _ in range(count - runs * (number - 1) // points):
                        chaz.session().direct("parent", f"```script\n{PARENT}\n```", timeout=86_400)
                    _until_parked(services.database_url, count)
                    held = chaz.session().direct("janitor", f"```script\n{TIDY}\n```").get(timeout=PARKED_WITHIN)
                    measured["worker1"].append((count, int(held or 0)))
                    for station in stations:
                        if station.name == "listener1":
                            measured[station.name].append((count, resident(station.pid)))
                    print(f"{count} parked", flush=True)
        finally:
            for station in stations:
                station.end()
    return measured


def _until_parked(url: str, count: int) -> None:
    ends = time.monotonic() + PARKED_WITHIN
    with psycopg.connect(url, autocommit=True) as connection:
        while True:
            row = connection.execute("select count(*) from chaz.runs where state = 'parked'").fetchone()
            assert row is not None
            if row[0] >= count:
                break
            if time.monotonic() > ends:
                raise SystemExit(f"only {row[0]} of {count} runs have parked")
            time.sleep(0.2)
    # What is on its way to broker and audit trail comes to rest.
    time.sleep(3)


if __name__ == "__main__":
    raise SystemExit(main())
