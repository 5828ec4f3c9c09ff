"""What was said in a run's session, as its model is shown it: entries in, messages out. Pure.

An entry is a message, and neighbours of one role stay two: only an adapter knows what its provider takes for a
neighbour (a tool's result is the user's word to some), so that it is the one to join them where it has to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chaz.entries import IN_CONTEXT, Entry
from chaz.outcomes import Turn
from chaz.runtime.models import AssistantMessage, HistoryMessage, UserMessage

SUMMARY = "Summary of the earlier conversation:"
EMPTY = "(empty)"
"""Stands for a text without anything to read in it: providers refuse those."""
GO_ON = UserMessage(text="(Nobody said anything. Go on from here.)")
"""What a run is told that answers no entry: a history that ends with the model's own words is refused, too."""


@dataclass(frozen=True)
class Conversation:
    """What comes before a run's own steps; there is always something to answer, and no text is empty."""

    asked: tuple[UserMessage, ...]
    """What the run is to answer: its triggers."""
    earlier: tuple[HistoryMessage, ...] = ()
    """What was said before, without tools: it may begin with the agent's own words."""
    summary: UserMessage | None = None
    """Of what came before that."""


def conversation_of(agent: str, entries: Sequence[Entry], triggers: Sequence[Entry]) -> Conversation:
    """The conversation of a run of ``agent``: what is in its view, in order, and what it answers.

    The agent's own messages are ``assistant``; everybody else's are ``user`` with the speaker's name, a directive
    whoever wrote it. The newest summary stands first, whatever it stands behind.
    """
    summary: UserMessage | None = None
    earlier: list[HistoryMessage] = []
    for entry in entries:
        if entry.type not in IN_CONTEXT:
            continue
        if entry.type == "summary":
            summary = UserMessage(text=f"{SUMMARY}\n{_content(entry)}")
        elif not (entry.type == "message" and entry.author == "agent" and entry.sender == agent):
            earlier.append(UserMessage(text=_spoken(entry)))
        elif entry.content.strip():
            earlier.append(AssistantMessage(turn=Turn(text=entry.content)))
    return Conversation(tuple(spoken(triggers)) or (GO_ON,), tuple(earlier), summary)


def spoken(entries: Sequence[Entry]) -> list[UserMessage]:
    """Entries as the running agent hears them."""
    return [UserMessage(text=_spoken(entry)) for entry in entries]


def _spoken(entry: Entry) -> str:
    return f"{entry.sender}: {_content(entry)}" if entry.type == "message" else _content(entry)


def _content(entry: Entry) -> str:
    return entry.content if entry.content.strip() else EMPTY
