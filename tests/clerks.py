"""An agent of the tests that takes its time over a summary, until somebody has left a row named ``go``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

import psycopg

from chaz import Agent
from chaz.outcomes import Turn, Usage
from chaz.runtime.compaction import SYSTEM
from chaz.runtime.models import HistoryMessage, ToolSchema, register_provider


class Clerk:
    """Answers at once, and summarises when it is told to; each time it is asked to it leaves a row."""

    async def complete(
        self,
        system: str,
        history: Sequence[HistoryMessage],
        tools: Sequence[ToolSchema],
        *,
        timeout: float,
        on_delta: Callable[[str], None] | None = None,
    ) -> Turn:
        if system != SYSTEM:
            return Turn(text="noted", usage=Usage(prompt=10, completion=1))
        url = os.environ["CHAZ_DATABASE_URL"]
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            await connection.execute("insert into effects (name, pid) values ('asked', %s)", (os.getpid(),))
            while not (await connection.execute("select from effects where name = 'go'")).rowcount:
                await asyncio.sleep(0.05)
        return Turn(text="all was noted", usage=Usage(prompt=20, completion=3))


register_provider("clerk", lambda name: Clerk())

clerk = Agent("clerk", instructions="Take notes.", model="clerk:x")
