"""The agents of the soak. Their tools leave a row in the table `effects` whenever they really run."""

from __future__ import annotations

import asyncio
import os

import psycopg

from chaz import Agent, CallContext, tool


def leave(name: str, context: CallContext, *, idempotent: bool) -> None:
    """Leave the row, on a connection that no chaos cuts."""
    url = os.environ["CHAZ_DATABASE_URL"]
    with psycopg.connect(url, autocommit=True, application_name="effect") as connection:
        connection.execute(
            "insert into effects (name, key, idempotent, pid) values (%s, %s, %s, %s)",
            (name, context.idempotency_key, idempotent, os.getpid()),
        )


@tool
def record_effect(name: str, context: CallContext) -> str:
    """Leave a row behind, once."""
    leave(name, context, idempotent=False)
    return f"recorded {name}"


@tool(idempotent=True)
def record_again(name: str, context: CallContext) -> str:
    """Leave a row behind; may be repeated."""
    leave(name, context, idempotent=True)
    return f"recorded {name}"


@tool
def word_count(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())


@tool(idempotent=True)
async def slow(seconds: float) -> str:
    """Take so many seconds."""
    await asyncio.sleep(seconds)
    return f"after {seconds:g} s"


TOOLS = (record_effect, record_again, word_count, slow)
solo = Agent("solo", instructions="Work alone.", model="scripted", tools=TOOLS)
child = Agent("child", instructions="Do as you are told.", model="scripted", tools=TOOLS)
parent = Agent(
    "parent",
    instructions="Let others work.",
    model="scripted",
    tools=[*TOOLS, "spawn_agent"],
    may_spawn=["child", "parent"],
)
