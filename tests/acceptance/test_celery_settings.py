"""What a deployment sets in its ``celeryconfig`` wins over chaz's own choice; what it leaves open stays chaz's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chaz import Chaz
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import ROOT, Processes

SHOW = """
import json
from chaz.celery import app
print(json.dumps({name: getattr(app.conf, name) for name in (
    "worker_pool", "worker_concurrency", "task_acks_late", "worker_prefetch_multiplier", "control_exchange",
    "broker_transport_options")}))
"""
CHOSEN = """
worker_pool = "prefork"
worker_concurrency = 7
broker_transport_options = {"visibility_timeout": 7}
"""


@pytest.mark.parametrize(("name", "variable"), [("celeryconfig", None), ("mine", "CELERY_CONFIG_MODULE")])
def test_the_deployment_wins(name: str, variable: str | None, processes: Processes, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(CHOSEN)
    environment = processes.environment | {"PYTHONPATH": f"{tmp_path}:{ROOT}"} | ({variable: name} if variable else {})

    shown = json.loads(
        subprocess.run(
            [sys.executable, "-c", SHOW], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
    )

    options = shown.pop("broker_transport_options")
    assert (options["visibility_timeout"], options["global_keyprefix"]) == (7, f"{environment['CHAZ_BROKER_PREFIX']}:")
    assert shown == {
        "worker_pool": "prefork",
        "worker_concurrency": 7,
        "task_acks_late": True,
        "worker_prefetch_multiplier": 1,
        "control_exchange": f"{environment['CHAZ_BROKER_PREFIX']}.control",
    }


def test_the_shipped_file_changes_nothing() -> None:
    chosen: dict[str, object] = {}
    exec((ROOT / "celeryconfig.py").read_text(), chosen)

    assert [name for name in chosen if not name.startswith("__")] == []


def test_a_prefork_worker_survives_a_tool_that_kills_its_process(
    processes: Processes, database: ScratchDatabase, tmp_path: Path
) -> None:
    soon = {"lease": "2", "beat": "0.5", "sweep": "1"}
    processes.listener(**soon)
    worker = processes.start("worker", [sys.executable, "-m", "chaz", "worker", "--pool", "prefork", "-c", "1"], **soon)
    worker.until_says("ready.")
    wanted = script(calls(call("record_effect", name="once"), call("kill_process")), answer("{{results}}"))

    with Chaz(database.url) as chaz:
        told = chaz.session("talk").direct("solo", wanted).get(timeout=60) or ""

    assert told.startswith("recorded once; the worker was lost during this call") or told.count("may or may not") == 2
    assert database.value("select count(*) from effects") <= 1
    worker.stop()
