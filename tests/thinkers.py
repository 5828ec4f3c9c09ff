"""Agents of the tests that think over HTTP: OPENAI_BASE_URL has to be a stub's."""

from __future__ import annotations

from chaz import Agent

thinker = Agent(
    "thinker",
    instructions="Think.",
    model="openai:gpt-stub",
    tools=["spawn_agent"],
    may_spawn=["thinker", "far"],
)
far = Agent("far", instructions="Think elsewhere.", model="openai:gpt-stub")
