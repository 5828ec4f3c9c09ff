"""``chaz tree``: what a person sees of a tree of runs, while it runs and after."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys

from chaz import Chaz
from chaz.testing import eventually
from tests.fixtures.model import answer, call, calls, script, spawn
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes


def chaz_tree(processes: Processes, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chaz", "tree", *arguments]
    return subprocess.run(command, env=processes.environment, capture_output=True, text=True, timeout=60, check=False)


def wanted() -> str:
    """Two children; one of them waits for an effect in a grandchild."""
    waiting = script(calls(call("until_effect", name="go")), answer("gone"))
    between = script(calls(spawn("solo", waiting)), answer("x"))
    return script(calls(spawn("solo", script(answer("quick"))), spawn("parent", between)), answer("all done"))


def in_one_order(lines: list[str]) -> list[str]:
    """The two children are spawned at once, and either may be there first."""
    if "solo" in lines[1]:
        return lines
    first, below, second = lines[1:4]
    return [lines[0], second.replace("└─", "├─"), first.replace("├─", "└─"), below.replace("│ ", "  "), *lines[4:]]


def test_a_tree_is_drawn_while_it_waits_and_followed_to_its_end(
    processes: Processes, database: ScratchDatabase
) -> None:
    processes.stack()
    with Chaz(database.url) as chaz:
        root = chaz.session("s").direct("parent", wanted())
        eventually(lambda: database.query("select 1 from chaz.calls where tool = 'until_effect'"), within=30)
        eventually(lambda: database.value("select count(*) from chaz.runs where state = 'parked'") == 2)
        grandchild = database.value("select id from chaz.runs where depth = 2")

        drawn = chaz_tree(processes, str(grandchild))
        lines = re.sub(r"\d+\.\d s", "N s", re.sub(r"\d+ tokens", "N tokens", drawn.stdout)).splitlines()
        used = "N s  1 step, N tokens, cost unknown"
        assert in_one_order(lines) == [
            f"parent  parked  {used}  waits for solo, parent (spawn_agent())",
            f"├─ solo  succeeded  {used}  quick",
            f"└─ parent  parked  {used}  waits for solo (spawn_agent())",
            f"   └─ solo  running  {used}  until_effect() ◂",
            "4 runs: 2 parked, 1 succeeded, 1 running; 4 steps, N tokens, cost unknown",
        ], drawn.stderr

        follower = processes.start("tree", [sys.executable, "-m", "chaz", "tree", str(root.id), "--follow"])
        follower.until_says("until_effect()")
        seen = processes.start("json", [sys.executable, "-m", "chaz", "tree", str(root.id), "--follow", "--json"])
        seen.until_says('"running"')
        database.query("insert into effects (name) values ('go')")
        assert root.get(timeout=30) == "all done"
        assert follower.exit_code() == seen.exit_code() == 0
    assert "all done" in follower.said
    states = [(run["id"], run["state"]) for run in map(json.loads, seen.said.splitlines())]
    assert (str(grandchild), "running") in states
    assert (str(grandchild), "succeeded") in states

    unknown = chaz_tree(processes, "00000000-0000-4000-8000-000000000000")
    assert (unknown.returncode, unknown.stdout) == (66, "")


def test_on_a_terminal_it_is_drawn_anew(processes: Processes, database: ScratchDatabase) -> None:
    with Chaz(database.url) as chaz:
        run = chaz.session("s").direct("solo", "Hi")
        assert "solo  pending" in chaz_tree(processes, str(run.id)).stdout, "before any listener has seen it"
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "chaz", "tree", str(run.id), "--follow"],
            env=processes.environment | {"COLUMNS": "80", "LINES": "20"},
            stdout=theirs,
        )
        os.close(theirs)
        processes.stack()
        run.wait(30)
        assert process.wait(30) == 0
        said = os.read(ours, 65536).decode()
        os.close(ours)
    assert "\033[1F\033[J" in said
    assert "\033[32msucceeded\033[0m" in said.splitlines()[-1]
    assert "You said: Hi" in said.splitlines()[-1]
