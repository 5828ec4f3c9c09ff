"""``chaz doctor``."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from typing import TYPE_CHECKING

from chaz.cli.options import add_command, on_terminal, print_json, settings_of
from chaz.cli.processes import need_worker_extra
from chaz.cli.render import coloured

if TYPE_CHECKING:
    from chaz.cli.options import Commands

_COLOURS = {"ok": "32", "warn": "33", "bad": "1;31"}


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    doctor = add_command(
        commands, common, "doctor", run_doctor, "look at all that a deployment stands on; exit code 1 if a part is bad"
    )
    doctor.add_argument("--broker", metavar="URL", help="RabbitMQ, Redis or Valkey (CHAZ_BROKER_URL)")
    doctor.add_argument("--json", action="store_true", help="one JSON object per thing looked at")


def run_doctor(options: argparse.Namespace) -> int:
    """Print a line for each thing; exit code 1 if any is bad."""
    need_worker_extra()
    from chaz.celery import make_app
    from chaz.doctor import examine

    settings = settings_of(options)
    # As the workers use them: celeryconfig.py may say more.
    found = asyncio.run(examine(settings, make_app(settings).conf.broker_transport_options))
    for finding in found:
        if options.json:
            print_json(dataclasses.asdict(finding))
        else:
            verdict = coloured(f"{finding.verdict:4}", _COLOURS[finding.verdict], on=on_terminal())
            print(f"{verdict}  {finding.name:12}  {finding.text}")
    return 1 if any(finding.verdict == "bad" for finding in found) else 0
