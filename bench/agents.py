"""The agents of the soak. Their tools leave a line in the file `effects` whenever they really run."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import time

from chaz import Agent, CallContext, tool


def leave(name: str, context: CallContext, *, idempotent: bool) -> None:
    """Add a line to a file, which no chaos reaches."""
    effect = [name, context.idempotency_key, idempotent, os.getpid(), time.time()]
    with open(os.environ["SOAK_EFFECTS"], "a") as file:
        file.write(json.dumps(effect) + "\n")


@tool
def record_effect(name: str, context: CallContext) -> str:
    """Leave a line behind, once."""
    leave(name, context, idempotent=False)
    return f"recorded {name}"


@tool(idempotent=True)
def record_again(name: str, context: CallContext) -> str:
    """Leave a line behind; may be repeated."""
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


@tool
def let_go() -> str:
    """Let the worker give back what it does not hold on to: what is measured then is kept for a reason."""
    collected = gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return f"{collected} objects"


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
janitor = Agent("janitor", instructions="Tidy up.", model="scripted", tools=[let_go], queue="parent")
