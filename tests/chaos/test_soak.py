"""The soak in short: everything at once, at random."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fixtures.broker import Broker
from tests.fixtures.processes import ROOT

# What is under way when the chaos is over, and its audit trail, take half a minute more.
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


def soak(*options: str) -> None:
    # Its own services, since it kills what it likes; with Ctrl-C's signal it would end them all the same.
    done = subprocess.run(
        [sys.executable, "-m", "bench.soak", *options], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_soak_loses_nothing_and_repeats_nothing() -> None:
    soak("--seconds", "60", "--seed", "1")


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_nor_does_it_on_rabbitmq(broker: Broker) -> None:
    soak("--seconds", "30", "--seed", "2", "--isolation", "--broker", broker.url)
