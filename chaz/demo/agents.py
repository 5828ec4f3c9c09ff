"""The demo's agents: a ``researcher`` that has two ``reader``\\ s count the words of three texts.

With ``OPENAI_API_KEY`` or ``OPENAI_BASE_URL`` they think with a real model (``CHAZ_DEMO_MODEL``), else they follow a
script. The tools are the same: the texts are really read, the words really counted.
"""

import os
import re
from importlib.resources import files

from chaz import Agent, tool

TEXTS = files("chaz.demo") / "texts"

REAL = bool(os.environ.get("OPENAI_API_KEY") or os.environ.get("OPENAI_BASE_URL"))
MODEL = f"openai:{os.environ.get('CHAZ_DEMO_MODEL', 'gpt-5-mini')}" if REAL else "scripted"


@tool(idempotent=True)
def count_words(file: str) -> str:
    """Count the words of a text, given its file name such as garden.txt."""
    known = sorted(path.name for path in TEXTS.iterdir())
    if file not in known:
        raise ValueError(f"there is no text {file!r}; there are {', '.join(known)}")
    return f"{file}: {len((TEXTS / file).read_text('utf-8').split())} words"


@tool(idempotent=True)
def compare(reports: list[str]) -> str:
    """Add up the readers' reports, each with lines such as 'garden.txt: 120 words', and find the longest text."""
    counts = {name: int(words) for name, words in re.findall(r"([\w-]+\.txt): (\d+) words", "\n".join(reports))}
    if not counts:
        raise ValueError("no report has a line such as 'garden.txt: 120 words'")
    longest = max(counts, key=lambda name: counts[name])
    each = ", ".join(f"{name} {words}" for name, words in sorted(counts.items()))
    return f"{longest} is the longest with {counts[longest]} words; together they have {sum(counts.values())} ({each})"


def _instructions(text: str, script: str) -> str:
    return text if REAL else f"{text}\n\n```script\n{script}\n```"


reader = Agent(
    "reader",
    instructions=_instructions(
        "You count words. Call count_words for each file you are asked about, all in one turn, and answer with "
        "its results.",
        r"""
        [{"calls": [{"tool": "count_words", "each": "[\\w-]+\\.txt", "arguments": {"file": "{{each}}"}}]},
         {"text": "{{results}}"}]
        """,
    ),
    model=MODEL,
    tools=[count_words],
)

researcher = Agent(
    "researcher",
    instructions=_instructions(
        "You compare texts. In one turn, spawn one reader for garden.txt and log.txt and another one for queue.txt, "
        "asking each to count words. Then call compare with their answers, and answer with its result.",
        """
        [{"calls": [
            {"tool": "spawn_agent",
             "arguments": {"agent": "reader", "instruction": "Count the words of garden.txt and log.txt."}},
            {"tool": "spawn_agent",
             "arguments": {"agent": "reader", "instruction": "Count the words of queue.txt."}}]},
         {"calls": [{"tool": "compare", "arguments": {"reports": ["{{0.0}}", "{{0.1}}"]}}]},
         {"text": "{{results}}"}]
        """,
    ),
    model=MODEL,
    tools=[compare, "spawn_agent"],
    may_spawn=["reader"],
)
