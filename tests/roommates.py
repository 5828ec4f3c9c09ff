"""Five agents of the tests, in a circle: told nothing else, each hands over to the next, for ever.

They think over HTTP: OPENAI_BASE_URL has to be a stub's, which shows what they were asked.
"""

from __future__ import annotations

from chaz import Agent
from tests.fixtures.model import answer, script


def _roommate(name: str, following: str) -> Agent:
    instructions = script(answer(f"Your turn, @{following}."), text=f"Speak as {name}.")
    return Agent(name, instructions=instructions, model="openai:gpt-stub")


alpha = _roommate("alpha", "beta")
beta = _roommate("beta", "gamma")
gamma = _roommate("gamma", "delta")
delta = _roommate("delta", "epsilon")
epsilon = _roommate("epsilon", "alpha")
