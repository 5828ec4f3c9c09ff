"""A deployment under chaos: ``python -m bench.soak --minutes 5``. Nothing may be lost, and nothing may happen twice.

Its own PostgreSQL and Valkey, two listeners, workers and audit consumers, and a producer in this process. When the
time is over the chaos ends, everything heals, and the database is asked what happened. With ``--broker`` a broker that
is there, under a prefix of the soak's own: it is cut off and emptied, but not restarted.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from bench.course import Soak
from bench.services import Services


def show(report: dict[str, Any]) -> None:
    """Print it as a table."""
    for title in ("numbers", "must be 0", "faults", "logged"):
        print(f"\n{title}")
        for name, number in report[title].items():
            print(f"  {name:36} {number:>6}{'  <--' if title == 'must be 0' and number else ''}")
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
    parser.add_argument("--broker", metavar="URL", help="instead of a Valkey of its own: amqp://… or redis://…")
    parser.add_argument("--isolation", action="store_true", help="with a worker for suspect runs as well")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--logs", type=Path, help="copy the processes' logs here")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, terminated)
    logging.getLogger("psycopg").setLevel("CRITICAL")
    seconds = options.seconds or options.minutes * 60
    print(f"soak: {seconds:g} s, seed {options.seed}", file=sys.stderr, flush=True)
    folder = Path(tempfile.mkdtemp(prefix="chaz-soak-"))
    services = None
    try:
        services = Services(folder / "data", options.broker)
        soak = Soak(services, folder, seconds=seconds, seed=options.seed, isolation=options.isolation)
        try:
            report = soak.run()
        finally:
            if options.logs:
                options.logs.mkdir(parents=True, exist_ok=True)
                for log in [*folder.glob("*.log"), *folder.glob("data/*/*.log")]:
                    shutil.copy(log, options.logs)
                faults = "\n".join(f"{at:.2f} {fault} {whom}" for at, fault, whom in soak.chaos.log)
                (options.logs / "faults.txt").write_text(faults)
    except KeyboardInterrupt:
        return 130
    finally:
        if services is not None:
            services.end()
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
