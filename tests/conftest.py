"""The fixtures' files, and an environment without chaz's own variables; nothing else."""

from __future__ import annotations

import os

import pytest

pytest_plugins = [
    "tests.fixtures.shared",
    "tests.fixtures.postgres",
    "tests.fixtures.stations",
    "tests.fixtures.schedules",
    "tests.fixtures.broker",
    "tests.fixtures.listeners",
    "tests.fixtures.summaries",
    "tests.fixtures.processes",
    "tests.fixtures.proxy",
    "tests.fixtures.rabbitmq",
    "tests.fixtures.valkey",
]

for name in [name for name in os.environ if name.startswith("CHAZ_") and not name.startswith("CHAZ_TEST_")]:
    del os.environ[name]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two workers for each processor of a small machine: most of the tests' time is spent in waiting for processes."""
    processors = os.cpu_count() or 1
    return max(processors, min(2 * processors, 8))
