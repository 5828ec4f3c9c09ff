"""``chaz chat``, as a person uses it: in a terminal with keys, and line by line from a pipe."""

from __future__ import annotations

import subprocess
import sys

import pytest

from chaz import Chaz
from chaz.testing import eventually
from tests.fixtures.model import answer, call, calls, script, spawn
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes
from tests.fixtures.terminal import CTRL_C, CTRL_D, ENTER, Terminal

pytestmark = pytest.mark.timeout(180)


def chat(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "chaz", "chat", *arguments]


@pytest.fixture
def environment(processes: Processes) -> dict[str, str]:
    processes.environment |= {"CHAZ_APPROVERS": "ada"}
    return processes.environment | {"USER": "ada"}


def test_in_a_terminal(processes: Processes, database: ScratchDatabase, environment: dict[str, str]) -> None:
    processes.stack()
    asking = script(
        calls(call("record_effect", name="paid")),
        calls(call("ask_human", question="Which colour?", options=["red", "blue"])),
        answer("{{results}} it is"),
    )
    working = script(calls(spawn("solo", script(calls(call("slow", seconds=50)), answer("x")))), answer("not this"))
    with Chaz(database.url) as chaz, Terminal(chat("den", "--agent", "solo"), environment) as terminal:
        den = chaz.session("den")
        terminal.until_shows("chaz chat den")
        # Before this, the terminal itself would take a key such as Ctrl-D.
        at = terminal.until_shows("idle")

        terminal.keys("Hello there" + ENTER)
        at = terminal.until_shows("You said: ada: Hello there", after=at)

        # What others say and what their runs do is seen, too; and what is asked is answered here.
        den.direct("guarded", asking, sender="bob")
        at = terminal.until_shows("allow record_effect?", after=at)
        terminal.keys("y" + ENTER)
        at = terminal.until_shows("[red | blue]", after=at)
        terminal.keys("green" + ENTER)
        at = terminal.until_shows("is one of red, blue", after=at)
        terminal.keys("blue" + ENTER)
        at = terminal.until_shows("blue it is", after=at)

        # Children are seen as they work; Ctrl-C ends the turn, and another one leaves.
        run = den.direct("parent", working, sender="bob")
        at = terminal.until_shows("slow()", after=at)
        terminal.keys(CTRL_C)
        at = terminal.until_shows("cancelled by ada", after=at)
        assert run.state == "cancelled"
        at = terminal.until_shows("idle", after=at)
        terminal.keys("/usage" + ENTER)
        at = terminal.until_shows("together: ", after=at)
        terminal.keys("/nonsense" + ENTER)
        at = terminal.until_shows("there is no command /nonsense", after=at)
        terminal.keys(CTRL_C)
        at = terminal.until_shows("nothing is at work here", after=at)

        def leaves() -> bool:
            terminal.keys(CTRL_C)
            return terminal.has_ended

        eventually(leaves, within=30, every=0.5)
        assert terminal.exit_code() == 0
    with Terminal(chat("den", "--history", "3"), environment) as again:
        at = again.until_shows("cancelled by ada")
        again.until_shows("idle", after=at)
        assert "Hello there" not in again.shown
        again.keys(CTRL_D)
        assert again.exit_code() == 0


def test_from_a_pipe(processes: Processes, environment: dict[str, str]) -> None:
    processes.stack()

    done = subprocess.run(
        chat("den", "--agent", "solo"),
        input="Hi\n\n/approvals\n/quit\nnever sent\n",
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "solo: You said: ada: Hi" in lines
    assert lines[-1] == "nobody is asked anything"
