"""``chaz demo`` and ``chaz up``: everything on one machine, from one command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from chaz import Chaz
from chaz.testing import eventually
from tests.fixtures.model import answer, call, calls, script
from tests.fixtures.processes import ROOT, Process

pytestmark = pytest.mark.timeout(240)

WORDS = {
    name: len((ROOT / "chaz/demo/texts" / name).read_text().split()) for name in ("garden.txt", "log.txt", "queue.txt")
}


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """As a newcomer has it: no settings, no key, a folder for temporary files of one's own.

    Not below pytest's, which is closed to the user whom root hands the services to.
    """
    temporary = tempfile.mkdtemp(prefix="chaz-tests-")
    os.chmod(temporary, 0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CHAZ_", "OPENAI_"))}
    yield kept | {"TMPDIR": temporary, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    shutil.rmtree(temporary, ignore_errors=True)


def living(marker: str) -> list[str]:
    """Command lines and folders of processes that have to do with a folder."""
    found: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            facts = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            facts += os.readlink(folder / "cwd").encode()
        except OSError:
            continue
        if marker.encode() in facts and int(folder.name) != os.getpid():
            found.append(f"{folder.name}: {(folder / 'cmdline').read_bytes().decode().replace(chr(0), ' ')}")
    return found


def test_the_demo_s_answer_is_right_and_nothing_is_left(environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chaz", "demo", "--json"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    longest = max(WORDS, key=lambda name: WORDS[name])
    assert f"{longest} is the longest with {WORDS[longest]} words" in said["answer"]
    assert str(sum(WORDS.values())) in said["answer"]
    assert said["audit_complete"] is True
    assert said["entries"] == {"directive": 3, "ack": 4, "tool_call": 6, "tool_result": 6, "message": 3}
    agents = [(run["agent"], run["state"], run["parent"]) for run in said["runs"]]
    assert sorted(agents, key=str) == sorted(
        [("researcher", "succeeded", None), *[("reader", "succeeded", said["run_id"])] * 2], key=str
    )
    assert said["seconds"] > 0
    assert list(Path(environment["TMPDIR"]).iterdir()) == []
    assert list(tmp_path.iterdir()) == []
    assert living(environment["TMPDIR"]) == []


def test_a_person_sees_the_tree_grow(environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chaz", "demo"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "scripted model" in done.stdout
    assert "you → researcher: " in done.stdout
    assert "│   reader calls count_words(file=" in done.stdout
    assert "insert → claim" in done.stdout
    assert "the audit trail is complete" in done.stdout


class Up:
    """A ``chaz up`` with its log."""

    def __init__(self, environment: dict[str, str], folder: Path, *flags: str) -> None:
        self.data = folder / "data"
        command = [sys.executable, "-m", "chaz", "up", "--data", str(self.data), *flags]
        self.process = Process("up", command, environment, folder)
        self.process.until_says("ready with the agents of", within=120)
        lines = self.process.said.splitlines()
        self.url = next(line.split("CHAZ_DATABASE_URL=")[1] for line in lines if "CHAZ_DATABASE_URL=" in line)

    def query(self, text: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(text.encode())
            return cursor.fetchall() if cursor.description else []


def test_data_stays_and_a_killed_worker_repeats_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    environment |= {"CHAZ_LEASE": "2", "CHAZ_BEAT": "0.5", "CHAZ_SWEEP": "1"}
    up = Up(environment, tmp_path, "--agents", "tests.agents")
    try:
        up.query("create table effects (name text, key text, pid int, at timestamptz default clock_timestamp())")
        with Chaz(up.url) as chaz:
            # From SQL, as psql would.
            (row,) = up.query("select chaz.send('talk', 'directive', 'psql', 'Hello', recipient => 'solo')")
            assert chaz.result(str(row[0])).get(timeout=60) == "You said: Hello"

            wanted = script(
                calls(call("record_effect", name="before")),
                calls(call("slow", seconds=2)),
                calls(call("record_effect", name="after")),
                answer("through"),
            )
            result = chaz.session("talk").direct("solo", wanted)
            eventually(lambda: up.query("select 1 from chaz.calls where tool = 'slow'"), within=60)
            ((worker,),) = up.query("select pid from chaz.workers where expires_at > now()")
            os.kill(int(str(worker)), signal.SIGKILL)

            assert result.get(timeout=90) == "through"
        up.process.until_says("starting it again")
        assert sorted(up.query("select name, count(*) from effects group by 1")) == [("after", 1), ("before", 1)]
    finally:
        up.process.stop()
    assert "stopped" in up.process.said

    again = Up(environment, tmp_path, "--agents", "tests.agents")
    try:
        assert again.url == up.url, "ports and password stay, so that what one noted down still works"
        assert again.query("select count(*) from chaz.entries where type = 'directive'") == [(2,)]
    finally:
        again.process.stop()
    eventually(lambda: living(str(tmp_path)) == [], within=10)


def test_all_ends_with_a_killed_owner(environment: dict[str, str], tmp_path: Path) -> None:
    up = Up(environment, tmp_path)
    assert len(living(str(tmp_path))) > 5

    up.process.kill()

    eventually(lambda: living(str(tmp_path)) == [], within=60)
    # The copy of the programs that root makes where nobody else can read the environment.
    eventually(lambda: list(Path(environment["TMPDIR"]).iterdir()) == [], within=60)


def test_the_same_folder_twice_is_one_clear_line(environment: dict[str, str], tmp_path: Path) -> None:
    up = Up(environment, tmp_path)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "chaz", "up", "--data", str(up.data)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 69
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert str(up.process.pid) in done.stderr
    finally:
        up.process.stop()


@pytest.mark.parametrize("service", ["postgres", "valkey"])
def test_without_its_services_it_ends_with_one_clear_line(
    environment: dict[str, str], tmp_path: Path, service: str
) -> None:
    up = Up(environment, tmp_path)
    try:
        pid = next(line for line in living(str(tmp_path)) if f"bin/{service}" in line or f"/{service}-server" in line)
        os.kill(int(pid.partition(":")[0]), signal.SIGKILL)

        assert up.process.exit_code(within=90) == 69
    finally:
        up.process.end()
    assert up.process.said.splitlines()[-1] == (
        f"chaz: {service} has ended though nobody stopped it; start again, its data are kept"
    )
    eventually(lambda: living(str(tmp_path)) == [], within=60)
