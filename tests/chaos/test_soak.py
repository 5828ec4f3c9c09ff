"""The soak in short: everything at once, at random."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fixtures.processes import ROOT

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


def test_a_soak_loses_nothing_and_repeats_nothing() -> None:
    # Its own services, since it kills what it likes; with Ctrl-C's signal it would end them all the same.
    soak = subprocess.run(
        [sys.executable, "-m", "bench.soak", "--seconds", "45", "--seed", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert soak.returncode == 0, soak.stdout + soak.stderr
