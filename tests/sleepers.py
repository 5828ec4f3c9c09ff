"""An agent of the tests that wakes by itself, and then has itself woken again where it is."""

from __future__ import annotations

from chaz import Agent, Schedule
from tests.fixtures.model import answer, call, calls, script

AGAIN = script(answer("awake again"), text="Wake up again.")
FIRST = script(
    calls(call("schedule_add", id="again", prompt=AGAIN, every=1, max_fires=1)),
    calls(call("schedule_add", id="silent", prompt=script(answer("")), every=1, max_fires=1, target="fresh")),
    answer("awake"),
    text="Wake up.",
)

sleeper = Agent(
    "sleeper",
    instructions="Sleep.",
    model="scripted",
    tools=["schedules"],
    schedules=[Schedule("first", FIRST, every=1, max_fires=1)],
)
