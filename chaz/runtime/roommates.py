"""What an agent's model is told of the other agents of its session. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

# How an agent may be named; what is no such name was attached by mistake, and is nothing to put before a model.
_NAME = re.compile(r"[A-Za-z][\w.-]{0,99}")


def room_note(agent: str, agents: Sequence[str], lead: str | None) -> str:
    """The note for ``agent`` in a session with these agents, of which ``lead`` leads; empty if it is alone.

    The same for the same agents in any order, byte by byte, so that providers find their cached prompts.
    """
    others = sorted(other for other in set(agents) if other != agent and _NAME.fullmatch(other))
    if not others:
        return ""
    if lead == agent:
        leads = ["You lead: what is said to nobody by name is yours to answer."]
    elif lead in others:
        leads = [f"{lead} leads, and answers what is said to nobody by name."]
    else:
        leads = []
    return " ".join(
        (
            f"You share this conversation with people and these other agents: {', '.join(others)}.",
            *leads,
            "To have one of them speak next, write @name in your answer, not in code.",
            "Only the first whom you mention is woken; without a mention, none is.",
            "If nothing is left to be said, answer with an empty text.",
        )
    )
