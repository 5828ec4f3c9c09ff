"""How long a child takes: ``python -m bench.spawn``. Parent -> child -> parent, beside Celery's ``delay().get()``.

Both on the same PostgreSQL, Valkey, worker and at the same time of day: the ratio is what durability, placing and two
parkings cost. One run after the other, so that nothing waits for a free slot.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.fleet import QUICK, ROOT, Station
from chaz import Chaz, schema
from chaz.embedded import start_services

READY_WITHIN = 60.0
OWN_TASK = """
from chaz.celery import app

@app.task(name="bench.echo", ignore_result=False)
def echo(text):
    return text
"""
CHILD = json.dumps([{"text": "from the child"}])
PARENT = json.dumps(
    [
        {
            "calls": [
                {"tool": "spawn_agent", "arguments": {"agent": "child", "instruction": f"```script\n{CHILD}\n```"}}
            ]
        },
        {"text": "done"},
    ]
)


def main(arguments: list[str] | None = None) -> int:
    """Print medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="chaz-spawn-") as folder:
        numbers = measure(Path(folder), options.rounds)
    if options.json:
        print(json.dumps(numbers))
        return 0
    for name, value in numbers.items():
        print(f"{name:44} {value:10.2f}")
    return 0


def measure(folder: Path, rounds: int) -> dict[str, float]:
    """Milliseconds, medians of ``rounds``, taken in turn."""
    (folder / "bench_tasks.py").write_text(OWN_TASK)
    with start_services(folder / "services") as services:
        schema.upgrade(services.database_url)
        (folder / "celeryconfig.py").write_text(
            f"imports = ['bench_tasks']\nresult_backend = {services.broker_url!r}\n"
        )
        environment = {key: value for key, value in os.environ.items() if not key.startswith("CHAZ_")} | {
            "CHAZ_DATABASE_URL": services.database_url,
            "CHAZ_BROKER_URL": services.broker_url,
            "CHAZ_AGENTS": "bench.agents",
            "PYTHONPATH": f"{folder}:{ROOT}",
            "PYTHONUNBUFFERED": "1",
        }
        worker = ["celery", "-A", "chaz", "worker", "-l", "WARNING", "-n", "worker1@%h", *QUICK]
        commands = {"listener1": ["chaz", "listener"], "audit1": ["chaz", "audit"], "worker1": worker}
        stations = [Station(name, command, environment, folder) for name, command in commands.items()]
        try:
            for station in stations:
                station.start()
            until_ready(stations)
            os.environ.update(environment)
            sys.path.insert(0, str(folder))
            os.chdir(folder)
            return _rounds(services.database_url, rounds)
        finally:
            for station in stations:
                station.end()


def until_ready(stations: list[Station]) -> None:
    """Wait for all of them."""
    ends = time.monotonic() + READY_WITHIN
    while any(station.state != "ready" for station in stations):
        for station in stations:
            station.tick()
        if time.monotonic() > ends:
            raise SystemExit("\n".join(f"{station.name}: {station.tail(5)}" for station in stations))
        time.sleep(0.05)


def _rounds(url: str, rounds: int) -> dict[str, float]:
    import importlib

    echo: Any = importlib.import_module("bench_tasks").echo
    with Chaz(url) as chaz:

        def run(text: str, agent: str) -> None:
            assert chaz.session().direct(agent, text).get(timeout=60)

        ways: dict[str, Callable[[], object]] = {
            "celery delay().get(), ms": lambda: echo.delay("x").get(timeout=60),
            "chaz run without a child, ms": lambda: run(f"```script\n{CHILD}\n```", "child"),
            "chaz parent -> child -> parent, ms": lambda: run(f"```script\n{PARENT}\n```", "parent"),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 5):
            for name, way in ways.items():
                began = time.perf_counter()
                way()
                # The first ones warm up pools and caches.
                if number >= 5:
                    times[name].append((time.perf_counter() - began) * 1000)
    medians = {name: statistics.median(of) for name, of in times.items()}
    celery, alone, spawning = medians.values()
    return medians | {
        "ratio of the spawning run to delay().get()": spawning / celery,
        "what the child adds, ms": spawning - alone,
    }


if __name__ == "__main__":
    raise SystemExit(main())
