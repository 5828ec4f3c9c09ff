"""An agent of the tests whose model never asks for the same call twice, wherever it is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import uuid4

from chaz import Agent
from chaz.outcomes import ToolCall, Turn
from chaz.runtime.models import HistoryMessage, ToolMessage, ToolSchema, register_provider
from tests.agents import record_effect


class Wavering:
    """Asks once for an effect, of another name each time, and answers with what that came to."""

    async def complete(
        self,
        system: str,
        history: Sequence[HistoryMessage],
        tools: Sequence[ToolSchema],
        *,
        timeout: float,
        on_delta: Callable[[str], None] | None = None,
    ) -> Turn:
        results = [message.content for message in history if isinstance(message, ToolMessage)]
        if results:
            return Turn(text=" ".join(results), model="wavering:x")
        call = ToolCall(id="call", tool="record_effect", arguments=f'{{"name": "{uuid4()}"}}')
        return Turn(text="", calls=(call,), model="wavering:x")


register_provider("wavering", lambda name: Wavering())

waverer = Agent(
    "waverer",
    instructions="Waver.",
    model="wavering:x",
    tools=[record_effect],
    policies={"record_effect": {"approval": "always"}},
)
