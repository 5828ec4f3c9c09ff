"""The fixtures' files, and an environment without chaz's own variables; nothing else."""

from __future__ import annotations

import os

pytest_plugins = [
    "tests.fixtures.shared",
    "tests.fixtures.postgres",
    "tests.fixtures.stations",
    "tests.fixtures.broker",
    "tests.fixtures.listeners",
    "tests.fixtures.processes",
    "tests.fixtures.proxy",
    "tests.fixtures.rabbitmq",
    "tests.fixtures.valkey",
]

for name in [name for name in os.environ if name.startswith("CHAZ_") and not name.startswith("CHAZ_TEST_")]:
    del os.environ[name]
