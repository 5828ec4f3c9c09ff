"""Bad input and absent services: one clear line, the right exit code, nothing half-done."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from chaz import database as chaz_database
from chaz.database import Database
from chaz.errors import DatabaseTooOld
from tests.fixtures.broker import Broker
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import ROOT, Processes

NOBODY = "01a00000-0000-7000-8000-000000000000"


def closed_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def refused(environment: dict[str, str], *command: str, code: int) -> str:
    """Run a command that must fail with this code; the one line that it says, without the program's name."""
    program = [] if command[0] == "celery" else ["chaz"]
    done = subprocess.run(
        [sys.executable, "-m", *program, *command],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("20")]
    assert line.startswith("chaz: ")
    assert "Traceback" not in done.stdout + done.stderr
    return line.removeprefix("chaz: ")


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (("send", "talk", ""), 65, "a message needs a text, and this one is empty"),
        (("send", "talk", " \n"), 65, "a message needs a text"),
        (("send", "x" * 201, "Hi"), 65, "a session's name has 1 to 200 characters, not 201"),
        (("send", "", "Hi"), 65, "a session's name has 1 to 200 characters, not 0"),
        (("send", NOBODY, "Hi"), 66, f"no session '{NOBODY}'"),
        (
            ("pause", "solo"),
            65,
            "there is nothing like 'solo' to pause, resume or limit; write agent:NAME, session:NAME",
        ),
        (("pause", "agent:nobody"), 66, "no worker has registered an agent 'nobody'"),
        (("pause", "session:nothing-here"), 66, "no session 'nothing-here'"),
        (("session", NOBODY, "--on-message", "each"), 66, f"no session '{NOBODY}'"),
        (("log", "nothing-here"), 66, "no session 'nothing-here'"),
        (("log", NOBODY), 66, f"no session '{NOBODY}'"),
        (("wait", NOBODY), 66, f"no run {NOBODY}"),
        (("wait", "no-id-at-all"), 66, "no run no-id-at-all"),
    ],
)
def test_what_a_producer_gets_wrong(
    processes: Processes, database: ScratchDatabase, command: tuple[str, ...], code: int, said: str
) -> None:
    line = refused(processes.environment, *command, code=code)

    assert said in line
    assert database.value("select count(*) from chaz.entries") == 0


def test_the_same_key_for_another_text(processes: Processes) -> None:
    first = ("send", "talk", "one", "--key", "k")
    subprocess.run([sys.executable, "-m", "chaz", *first], env=processes.environment, check=True, timeout=60)

    line = refused(processes.environment, "send", "talk", "two", "--key", "k", code=65)

    assert "exists with another content" in line


def test_an_agent_that_nobody_registered(processes: Processes, database: ScratchDatabase) -> None:
    processes.listener(unknown_agent_grace="0.5", sweep="1")

    line = refused(processes.environment, "send", "talk", "Hi", "--to", "stranger", "--wait", "--timeout", "30", code=1)

    assert "no worker has registered an agent 'stranger'" in line
    assert database.value("select content from chaz.entries where type = 'error'").startswith("no worker")


def test_a_wait_that_is_too_short(processes: Processes) -> None:
    line = refused(processes.environment, "send", "talk", "Hi", "--to", "solo", "--wait", "--timeout", "0.2", code=75)

    assert "is pending after 0.2 s; it goes on" in line


@pytest.mark.parametrize("command", [("send", "talk", "Hi"), ("runs",), ("listener",), ("audit",), ("worker",)])
@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("", 78, "no database: set CHAZ_DATABASE_URL"),
        ("mysql://root:secret@127.0.0.1/chaz", 78, "CHAZ_DATABASE_URL must start with postgresql://, not 'mysql'"),
        ("postgresql://chaz:secret@127.0.0.1:{closed}/chaz", 69, "is not available"),
    ],
)
def test_a_wrong_database(processes: Processes, command: tuple[str, ...], url: str, code: int, said: str) -> None:
    environment = processes.environment | {"CHAZ_DATABASE_URL": url.replace("{closed}", str(closed_port()))}

    line = refused(environment, *command, code=code)

    assert said in line
    assert "secret" not in line


def test_a_wrong_password(processes: Processes, database: ScratchDatabase) -> None:
    user, _, address = database.url.partition("@")
    wrong = f"{user.rpartition(':')[0]}:wrong-password@{address}"

    line = refused(processes.environment | {"CHAZ_DATABASE_URL": wrong}, "send", "talk", "Hi", code=69)

    assert "password authentication failed" in line
    assert "wrong-password" not in line


@pytest.mark.parametrize("command", [("send", "talk", "Hi"), ("log", "talk"), ("listener",), ("audit",), ("worker",)])
def test_no_schema(command: tuple[str, ...], processes: Processes, empty_database: ScratchDatabase) -> None:
    environment = processes.environment | {"CHAZ_DATABASE_URL": empty_database.url}

    line = refused(environment, *command, code=78)

    assert line.endswith("run `chaz schema upgrade`")


@pytest.mark.parametrize("command", [("listener",), ("audit",), ("worker",)])
def test_a_schema_that_is_behind(command: tuple[str, ...], processes: Processes, database: ScratchDatabase) -> None:
    database.query("update chaz.alembic_version set version_num = '0000'")

    assert "version 0000, behind 0001; run `chaz schema upgrade`" in refused(processes.environment, *command, code=78)


def test_a_server_that_is_too_old(database: ScratchDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaz_database, "OLDEST_SERVER", 99)

    with pytest.raises(DatabaseTooOld, match="is version 18; chaz needs 99 or later"):
        asyncio.run(Database(database.url).open())


@pytest.mark.parametrize("command", [("listener",), ("audit",), ("worker",), ("celery", "-A", "chaz", "worker")])
def test_no_broker(command: tuple[str, ...], processes: Processes) -> None:
    url = f"redis://:secret@127.0.0.1:{closed_port()}/0"

    line = refused(processes.environment | {"CHAZ_BROKER_URL": url}, *command, code=69)

    assert line.startswith("the broker at redis://127.0.0.1:")
    assert "secret" not in line


def test_a_producer_does_not_care_for_the_broker(processes: Processes) -> None:
    environment = processes.environment | {"CHAZ_BROKER_URL": f"redis://127.0.0.1:{closed_port()}/0"}

    sent = [sys.executable, "-m", "chaz", "send", "talk", "Hi"]
    assert subprocess.run(sent, env=environment, timeout=60, check=True, capture_output=True).stdout


@pytest.mark.parametrize("command", [("worker",), ("celery", "-A", "chaz", "worker")])
@pytest.mark.parametrize(
    ("module", "text", "said"),
    [
        ("", "", "no agents module: set CHAZ_AGENTS=package.module"),
        ("not_there", None, "there is no module 'not_there'"),
        ("broken", "import nothing_like_this\n", "broken.py:1: importing 'broken' failed: No module named"),
        ("empty", "x = 1\n", "empty.py: module 'empty' defines no agent"),
        (
            "twice",
            "from chaz import Agent\na = Agent('a', instructions='', model='scripted')\n"
            "b = Agent('a', instructions='', model='scripted')\n",
            "twice.py:3: agent 'a' is defined already at",
        ),
        (
            "model",
            "from chaz import Agent\na = Agent('a', instructions='', model='closedai:gpt')\n",
            "model.py:2: agent 'a': model 'closedai:gpt' has the unknown provider 'closedai'",
        ),
        (
            "hints",
            "from chaz import tool\n\n@tool\ndef count(text):\n    'Count.'\n",
            "hints.py:3: tool 'count' has no type hint for 'text'",
        ),
    ],
)
def test_a_wrong_agents_module(
    command: tuple[str, ...], module: str, text: str | None, said: str, processes: Processes, tmp_path: Path
) -> None:
    if text:
        (tmp_path / f"{module}.py").write_text(text)
    paths = {"CHAZ_AGENTS": module, "PYTHONPATH": f"{ROOT}:{tmp_path}"}

    assert said in refused(processes.environment | paths, *command, code=78)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("CHAZ_LEASE", "soon"), ("CHAZ_LEASE", "-1"), ("CHAZ_BROKER_PREFIX", "a b"), ("CHAZ_BEAT", "14")],
)
@pytest.mark.parametrize("command", [("listener",), ("celery", "-A", "chaz", "worker")])
def test_a_wrong_setting(command: tuple[str, ...], variable: str, value: str, processes: Processes) -> None:
    line = refused(processes.environment | {variable: value}, *command, code=78)

    assert variable in line


def test_a_wrong_command_line(processes: Processes) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chaz", "dance"], env=processes.environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert "invalid choice: 'dance'" in done.stderr


def test_debug_shows_the_traceback(processes: Processes) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chaz", "wait", "--debug", str(uuid4())],
        env=processes.environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert "Traceback" in done.stderr


def test_a_broker_without_its_driver(processes: Processes, broker: Broker) -> None:
    line = refused(processes.environment | {"CHAZ_BROKER_URL": "nonsense://127.0.0.1/"}, "listener", code=69)

    assert "nonsense" in line
