"""Who a placed entry wakes. Pure: the log's rules, without the log.

::

    message     from a human or a program  -> a run of the agent it is for
    message     from an agent              -> a run of the first other agent it mentions (chaz.mentions)
    directive                              -> a run of its recipient, which it attaches
    approval_decision                      -> what asked for it goes on (chaz.approvals)
    compaction_request                     -> a compaction run, which summarises the session (chaz.compactions)
    anything else                          -> nothing

Who a message is for: its recipient, else the first @mention of an attached agent, else the session's lead, else its
first attached agent, else the deployment's default agent. Who summarises: the same, without mentions. A person
who is named like an agent is a person: an entry's author says so, not its sender.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from chaz.entries import Author, EntryType, RunOptions, safe_text

BURST = 6
"""How many answers of agents in a row may wake other agents, where neither the session nor the deployment says."""

# A mention stands at a word's edge: not inside an e-mail address.
_MENTION = re.compile(r"(?<![\w@./:?&=#%+~-])@(\w[\w.-]*+)(?!@)")
# A text is anybody's and a megabyte long at most: none of these looks at a character more than a few times.
_URL = re.compile(r"://[^\s<>\"]*")
_FENCE = re.compile(
    r"[ \t>]*+(?P<item>(?:(?:[-*+]|\d{1,9}[.)])[ \t>]++)*+)(?P<fence>`{3,}(?=[^`]*$)|~{3,})(?P<rest>.*)"
)
_BACKTICKS = re.compile(r"`+")


@dataclass(frozen=True)
class Roster:
    """The agents of a session, in the order in which they were attached."""

    agents: Sequence[str] = ()
    lead: str | None = None
    default: str = ""
    """The deployment's default agent, or empty."""


@dataclass(frozen=True)
class Wake:
    """Make a run of this agent; ``attach`` it to the session first."""

    agent: str
    attach: bool = False
    options: RunOptions = field(default_factory=RunOptions)
    note: str = ""
    """What the log is to say about it, if anything."""


@dataclass(frozen=True)
class Refused:
    """The entry should wake somebody and cannot: a failed run of ``agent``, and an ``error`` entry saying why."""

    agent: str
    why: str


@dataclass(frozen=True)
class Noted:
    """The entry wakes nobody, and a ``note`` says why."""

    why: str


def route(
    *,
    type: EntryType,
    author: Author,
    recipient: str | None,
    content: str,
    options: object,
    roster: Roster,
) -> Wake | Refused | Noted | None:
    """What to do about an entry just placed; None: nothing."""
    note = ""
    match type:
        case "directive":
            agent = recipient or ""
            attach = agent not in roster.agents
        case "message" if author in {"human", "program"}:
            agent, attach = _addressee(recipient, content, roster)
            if recipient is not None and agent.casefold() != recipient.casefold():
                note = f"{recipient!r} is not attached to this session; {agent!r} answers instead"
            if not agent:
                return Noted(
                    "nobody to answer: the session has no agent and CHAZ_DEFAULT_AGENT is not set; "
                    "a directive to an agent attaches it"
                )
        case "compaction_request":
            agent, attach = _summariser(recipient, roster), False
            if not agent:
                return Noted("nobody to summarise: the session has no agent and CHAZ_DEFAULT_AGENT is not set")
            if recipient is not None and agent.casefold() != recipient.casefold():
                note = f"{recipient!r} is not attached to this session; {agent!r} summarises instead"
        case _:
            return None
    try:
        return Wake(agent, attach, RunOptions.model_validate(options or {}), note)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(("metadata.options", *map(str, first["loc"])))
        return Refused(agent, f"{safe_text(where, 200)}: {first['msg']} (it is {safe_text(repr(first['input']), 200)})")


def _addressee(recipient: str | None, content: str, roster: Roster) -> tuple[str, bool]:
    """The agent that a message is for, and whether it is to be attached; ("", False) where there is none."""
    if recipient is not None:
        if found := _attached(recipient, roster):
            return found, False
        if not roster.agents:
            return recipient, True
    for found in _mentions(content, roster):
        return found, False
    if roster.lead or roster.agents:
        return roster.lead or roster.agents[0], False
    return roster.default, bool(roster.default)


def _summariser(recipient: str | None, roster: Roster) -> str:
    """The agent that summarises the session; empty where there is none. To summarise attaches nobody."""
    if recipient is not None and (found := _attached(recipient, roster)):
        return found
    return roster.lead or (roster.agents[0] if roster.agents else roster.default)


def first_mentioned(content: str, sender: str, roster: Roster) -> str | None:
    """The first attached agent that a message of the agent ``sender`` mentions, itself left out."""
    return next((agent for agent in _mentions(content, roster) if agent != sender), None)


def _mentions(content: str, roster: Roster) -> Iterator[str]:
    """The attached agents that a text mentions, in order, outside of code and URLs."""
    # Most texts mention nobody.
    if "@" not in content:
        return
    exactly = set(roster.agents)
    in_any_case = {agent.casefold(): agent for agent in reversed(roster.agents)}
    # A text may mention as many as it has room for, and none of them be attached.
    for mention in _MENTION.finditer(_URL.sub("://", _without_code(content))):
        name = mention.group(1).rstrip(".-")
        found = name if name in exactly else in_any_case.get(name.casefold())
        if found is not None:
            yield found


def _without_code(text: str) -> str:
    """The text without what Markdown shows as code: fenced blocks (an open one goes to the end) and inline code."""
    paragraphs: list[list[str]] = [[]]
    fence = ""
    for line in text.splitlines():
        found = _FENCE.fullmatch(line)
        if fence:
            # In an item of a list code may begin, but not end.
            if found is not None and not found["item"]:
                closes = found["fence"].startswith(fence) and not found["rest"].strip()
                fence = "" if closes else fence
        elif found is not None:
            fence = found["fence"]
            paragraphs.append([])
        elif not line.strip():
            paragraphs.append([])
        else:
            paragraphs[-1].append(line)
    return "\n\n".join(_without_spans("\n".join(paragraph)) for paragraph in paragraphs)


def _without_spans(paragraph: str) -> str:
    """The paragraph without its inline code, which as many backticks end as begin it."""
    ticks = list(_BACKTICKS.finditer(paragraph))
    closing: dict[int, int] = {}
    next_of_its_length: dict[int, int] = {}
    for index in range(len(ticks) - 1, -1, -1):
        length = len(ticks[index].group())
        closing[index] = next_of_its_length.get(length, -1)
        next_of_its_length[length] = index
    kept: list[str] = []
    start = index = 0
    while index < len(ticks):
        escaped = paragraph[max(0, ticks[index].start() - 1) : ticks[index].start()] == "\\"
        if escaped or closing[index] < 0:
            index += 1
            continue
        # A word on either side stays a word on its own.
        kept += [paragraph[start : ticks[index].start()], "`"]
        start = ticks[closing[index]].end()
        index = closing[index] + 1
    return "".join([*kept, paragraph[start:]])


def _attached(name: str, roster: Roster) -> str | None:
    """The attached agent of this name, in any case where none has exactly this one."""
    if name in roster.agents:
        return name
    return next((agent for agent in roster.agents if agent.casefold() == name.casefold()), None)
