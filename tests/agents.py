"""The agents of the tests, and tools whose effects can be counted. No model of theirs needs a network."""

from __future__ import annotations

import asyncio
import os
import threading

import psycopg

from chaz import Agent, CallContext, tool


@tool
def word_count(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())


@tool
def record_effect(name: str, context: CallContext) -> str:
    """Leave a row behind: the table `effects` shows how often this really ran."""
    with psycopg.connect(os.environ["CHAZ_DATABASE_URL"], autocommit=True) as connection:
        connection.execute(
            "insert into effects (name, key, pid) values (%s, %s, %s)", (name, context.idempotency_key, os.getpid())
        )
    return f"recorded {name}"


@tool(timeout=60)
async def slow(seconds: float) -> str:
    """Take so many seconds."""
    await asyncio.sleep(seconds)
    return f"after {seconds:g} s"


@tool(timeout=60)
async def until_effect(name: str) -> str:
    """Take until somebody has left a row of that name in the table `effects`."""
    async with await psycopg.AsyncConnection.connect(os.environ["CHAZ_DATABASE_URL"], autocommit=True) as connection:
        while not (await connection.execute("select from effects where name = %s", (name,))).rowcount:
            await asyncio.sleep(0.05)
    return f"after {name}"


@tool(timeout=60)
def until_told(context: CallContext) -> str:
    """Work until told that nobody wants the result any more."""
    record_effect("started", context)
    while not context.cancelled:
        threading.Event().wait(0.02)
    record_effect("told", context)
    return "too late"


@tool
def failing(why: str) -> str:
    """Fail."""
    raise RuntimeError(why)


@tool(timeout=1)
def hang() -> None:
    """Never end."""
    threading.Event().wait()


@tool
def kill_process() -> None:
    """Take the process down."""
    os._exit(1)


@tool(idempotent=True)
def kill_again() -> None:
    """Take the process down, whenever it is called."""
    os._exit(1)


@tool(name="web.search")
def web_search(query: str) -> str:
    """Search the web, or say so."""
    return f"found {query}"


@tool(idempotent=True, retries=3)
def third_time(name: str, context: CallContext) -> str:
    """Leave a row behind, and fail until there are three."""
    record_effect(name, context)
    with psycopg.connect(os.environ["CHAZ_DATABASE_URL"], autocommit=True) as connection:
        tries = connection.execute("select from effects where key = %s", (context.idempotency_key,)).rowcount
    if tries < 3:
        raise RuntimeError("not yet")
    return f"in try {tries}"


@tool(rate_limit="2/s")
def seldom(name: str, context: CallContext) -> str:
    """Leave a row behind, as often as its rate allows."""
    return record_effect(name, context)


@tool(sensitive_params=["card"])
def pay(card: str, amount: int, context: CallContext) -> str:
    """Leave a row with the card's number behind."""
    record_effect(card, context)
    return f"paid {amount}"


@tool(sensitive_params=["card"], approval="always", risk="high")
def charge(card: str, amount: int, context: CallContext) -> str:
    """Leave a row with the card's number behind, and say it."""
    record_effect(card, context)
    return f"charged {amount} to {card}"


ODD: dict[str, object] = {
    "nul": "a\0b",
    "lone surrogate": "a\ud800b",
    "20 MB": "x" * 20_000_000,
    "an exception": ValueError("returned, not raised"),
    "2,000 emoji": "\N{GRINNING FACE}" * 2000,
}


@tool
def odd(kind: str) -> object:
    """Give an odd result."""
    return ODD[kind]


solo = Agent(
    "solo",
    instructions="Work alone.",
    model="scripted",
    # Room for the longest message.
    context_window=1_000_000,
    tools=[word_count, record_effect, slow, until_effect, until_told, failing, hang, kill_process, kill_again, odd],
)
child = Agent(
    "child",
    instructions="Do as you are told.",
    model="scripted",
    models=["scripted:other"],
    tools=[word_count, record_effect, slow, web_search],
)
parent = Agent(
    "parent",
    instructions="Let others work.",
    model="scripted",
    tools=[word_count, record_effect, slow, web_search, "spawn_agent"],
    may_spawn=["child", "parent", "solo", "nobody"],
)
capped = Agent(
    "capped",
    instructions="Two of us at a time.",
    model="scripted",
    tools=[slow, record_effect, until_effect],
    max_concurrent=2,
)
careful = Agent("careful", instructions="Be careful.", model="scripted", tools=[record_effect, third_time, seldom, pay])
guarded = Agent(
    "guarded",
    instructions="Ask first.",
    model="scripted",
    tools=[word_count, record_effect, slow, until_effect, until_told, kill_again, charge, "ask_human"],
    policies={"record_effect": {"approval": "always"}, "until_told": {"approval": "always", "timeout": 3600}},
)
