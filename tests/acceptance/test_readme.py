"""What the README says is true: its code runs, its table's stations exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from chaz import Chaz
from chaz.cli import parser
from chaz.runtime.agents import load_agents
from chaz.settings import Settings
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import ROOT, Processes

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def stations() -> list[tuple[str, str]]:
    """File and process of each row of the table of the path."""
    table = README.split("| file | process |")[1].split("\n\n")[0]
    rows = [line.split("|") for line in table.splitlines()[2:]]
    return [(row[1].strip().strip("`"), row[2].strip().strip("`")) for row in rows]


def test_the_five_lines_and_the_sql(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener()
    processes.audit()
    processes.worker(agents="chaz.demo.agents")

    five_lines = blocks("python")[0]
    done = subprocess.run(
        [sys.executable, "-c", five_lines],
        env=processes.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "queue.txt is the longest" in done.stdout, done.stderr

    with psycopg.connect(database.url, autocommit=True) as connection:
        row = connection.execute(blocks("sql")[0].encode()).fetchone()
    assert row is not None
    with Chaz(database.url) as chaz:
        assert "queue.txt is the longest" in (chaz.result(row[0]).get(timeout=60) or "")


def test_the_agents_module_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "readme_agents.py").write_text(blocks("python")[1])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    agents = load_agents("readme_agents")

    assert set(agents) == {"reader", "researcher"}
    assert agents["researcher"].may_spawn_agent("reader")


def test_each_station_is_a_file_a_test_and_a_service() -> None:
    names = [file for file, _ in stations()]
    assert names == [
        *("producer.py", "sql/", "listener.py", "celery.py", "tasks.py", "runtime/"),
        *("audit/", "completion.py", "result.py"),
    ]
    for name in names:
        assert (ROOT / "chaz" / name).exists(), name
        assert name.rstrip("/") in (ROOT / "chaz/__init__.py").read_text(), f"{name} is not in the package's docstring"
    compose = (ROOT / "docker-compose.yml").read_text()
    for service in ("listener", "worker", "audit", "flower"):
        assert re.search(rf"^  {service}:$", compose, re.MULTILINE), service


def test_the_settings_table_is_whole() -> None:
    documented = set(re.findall(r"`(CHAZ_[A-Z_]+)`", README.split("| variable |")[1].split("\n\n")[0]))

    assert documented == {f"CHAZ_{name.upper()}" for name in Settings.model_fields}


def test_the_commands_are_those_of_the_command_line() -> None:
    listed = README.split("```text\n")[1].split("```")[0]

    documented = set(re.findall(r"chaz (\w+)", listed))

    assert documented == set(re.findall(r"^    (\w+)(?:  |$)", parser().format_help(), re.MULTILINE))


def test_the_two_commands_are_one_line_each() -> None:
    setups = [block for block in blocks("sh") if "venv" in block]

    assert [len(block.splitlines()) for block in setups] == [1, 1]
    assert setups[0].rstrip().endswith("chaz demo")
    assert setups[1].rstrip().endswith("pytest")
