"""The context of a run: entries in, a model's history out. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from chaz.entries import IN_CONTEXT, Entry
from chaz.outcomes import Turn
from chaz.runtime.models import AssistantMessage, HistoryMessage, UserMessage


def build_history(agent: str, conversation: Sequence[Entry], triggers: Sequence[Entry]) -> list[HistoryMessage]:
    """What a run's model is shown of its session: the conversation in order, then what the run answers.

    The agent's own messages are ``assistant``; everybody else's are ``user`` with the speaker's name, a directive
    whoever wrote it. It never starts with ``assistant``.
    """
    history: list[HistoryMessage] = []
    for entry in conversation:
        if entry.type not in IN_CONTEXT:
            continue
        own = entry.type == "message" and entry.author == "agent" and entry.sender == agent
        if not own:
            history.append(UserMessage(text=_spoken(entry)))
        elif history:
            history.append(AssistantMessage(turn=Turn(text=entry.content)))
    history.extend(spoken(triggers))
    return history


def spoken(entries: Sequence[Entry]) -> list[HistoryMessage]:
    """Entries as the running agent hears them."""
    return [UserMessage(text=_spoken(entry)) for entry in entries]


def _spoken(entry: Entry) -> str:
    return f"{entry.sender}: {entry.content}" if entry.type == "message" else entry.content
