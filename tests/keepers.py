"""An agent of the tests whose tools hold and give secrets, and tell what they were called with by leaving a row."""

from __future__ import annotations

import os

import psycopg

from chaz import Agent, tool


def _planted() -> str:
    return os.environ["CHAZ_TEST_PLANTED"]


@tool
def read_config() -> dict[str, str]:
    """Read a configuration that holds what it should not."""
    return {"user": "app", "token": _planted(), "own": os.environ["VAULT_PASSWORD"]}


@tool
def fail_to_log_in() -> str:
    """Fail, and quote what was tried."""
    raise PermissionError(f"{_planted()} was refused")


@tool
def half(which: int) -> str:
    """Give the first (0) or the second (1) half of it; neither looks like a secret."""
    middle = len(_planted()) // 2
    return _planted()[middle:] if which else _planted()[:middle]


@tool
def log_in(token: str) -> str:
    """Leave a row that shows what this was called with."""
    with psycopg.connect(os.environ["CHAZ_DATABASE_URL"], autocommit=True) as connection:
        connection.execute("insert into effects (name, key, pid) values (%s, 'login', %s)", (token, os.getpid()))
    return "logged in"


@tool(secrets="off")
def tell_all() -> str:
    """Give it on purpose."""
    return _planted()


keeper = Agent(
    "keeper",
    instructions="Keep it.",
    model="openai:gpt-stub",
    tools=[read_config, fail_to_log_in, half, log_in, tell_all, "spawn_agent"],
    may_spawn=["keeper"],
)
