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


class Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")] + [
        (name, ctypes.c_size_t) for name in ("fsmblks", "uordblks", "fordblks", "keepcost")
    ]


@tool
def bytes_in_use() -> int:
    """Collect the worker's garbage; the bytes that it holds then, without the gaps between them."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


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
janitor = Agent("janitor", instructions="Tidy up.", model="scripted", tools=[bytes_in_use], queue="parent")
