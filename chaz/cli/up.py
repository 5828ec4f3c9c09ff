"""``chaz up``: everything on this machine, in one terminal."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from chaz.cli.options import add_command, on_terminal, positive
from chaz.cli.render import coloured
from chaz.errors import ConfigurationError
from chaz.settings import Settings

if TYPE_CHECKING:
    from chaz.cli.options import Commands

LOOK_EVERY = 0.5
"""Seconds between two looks whether the services are still there."""
DEMO_AGENTS = "chaz.demo.agents"
_COLOURS = {"postgres": "34", "valkey": "31", "schema": "34", "listener": "36", "audit": "33", "flower": "35"}


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    up = add_command(
        commands,
        common,
        "up",
        run_up,
        "run everything here: PostgreSQL and Valkey from wheels, listener, workers, audit consumer",
    )
    up.add_argument("--data", type=Path, default=Path("chaz-data"), metavar="DIR", help="data folder (./chaz-data)")
    up.add_argument("--workers", type=positive, default=1, metavar="N", help="worker processes (1)")
    up.add_argument("--flower", action="store_true", help="Flower too, on http://127.0.0.1:5555")
    up.add_argument("--agents", metavar="MODULE", help="module that defines the agents (CHAZ_AGENTS; else the demo's)")


def run_up(options: argparse.Namespace) -> int:
    """Run until SIGTERM or Ctrl-C."""
    # The embedded services are an extra, and so is Celery; the other commands do without.
    from chaz.cli.stack import Stack

    if options.flower and importlib.util.find_spec("flower") is None:
        raise ConfigurationError("Flower is not installed; install it with: pip install 'chaz[flower]'")
    agents = Settings.from_env(agents=options.agents).agents or DEMO_AGENTS
    stop = threading.Event()

    def ask_to_stop(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask_to_stop)
    printing = threading.Lock()
    colour = on_terminal()

    def show(name: str, line: str) -> None:
        with printing:
            print(f"{coloured(f'{name:>9}', _COLOURS.get(name, '32'), on=colour)} │ {line}", flush=True)

    with Stack(options.data, agents=agents, workers=options.workers, flower=options.flower, on_line=show) as stack:
        show("chaz", f"ready with the agents of {agents}; Ctrl-C stops it. In another terminal:")
        show("chaz", f"  export CHAZ_DATABASE_URL={stack.settings.database_url}")
        show("chaz", f"  export CHAZ_BROKER_URL={stack.settings.broker_url}")
        show("chaz", "  chaz send hello 'How long are the texts?' --to researcher --wait")
        while not stop.wait(LOOK_EVERY):
            stack.check()
        show("chaz", "stopping")
    show("chaz", "stopped")
    return 0
