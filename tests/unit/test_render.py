"""Entries as lines for people."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import get_args
from uuid import uuid4

import pytest

from chaz.cli.conversation import spoken
from chaz.cli.render import entry_line, one_line
from chaz.cli.sessions import activity
from chaz.cli.tree import line_of
from chaz.entries import Entry, EntryType


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\n\n b\tc ", "a b c"),
        ("sure?\x1b[2K\x1b[1Gfine", "sure?\ufffd[2K\ufffd[1Gfine"),
        ("rm \u202egnp.exe", "rm \ufffdgnp.exe"),
        ("\u00e4 \u4f60\u597d \U0001f468\u200d\U0001f469", "\u00e4 \u4f60\u597d \U0001f468\u200d\U0001f469"),
    ],
)
def test_what_anybody_wrote_is_one_line_that_moves_no_cursor(text: str, line: str) -> None:
    assert one_line(text) == line


NASTY = "a\x1b[2Jb\nc"


@pytest.mark.parametrize("type", get_args(EntryType))
def test_no_name_of_an_entrys_moves_the_cursor(type: EntryType) -> None:
    entry = Entry(
        id=uuid4(),
        session_id=uuid4(),
        position=1,
        seq=0,
        type=type,
        sender=NASTY,
        author="agent",
        recipient=NASTY,
        content="{}",
        metadata=dict.fromkeys(("tool", "outcome", "attempt", "decision"), NASTY),
        run_id=None,
        created_at=datetime.now(UTC),
    )
    for line in (entry_line(entry), spoken(entry, colour=False)):
        assert line.isprintable(), line


def test_nor_does_the_name_of_an_agent_that_nobody_serves() -> None:
    now = datetime.now(UTC)
    run = {"agent": NASTY, "state": "queued", "started_at": None, "created_at": now, "ended_at": None, "steps": 0}
    run |= {"usage": {}, "cost": 0.0, "calls": {}, "waits_for": None, "not_before": None, "attempt": 0}
    session = {"run": uuid4(), "agent": NASTY, "state": "queued", "since": now, "waits_for": None}
    session |= {"unplaced": 0, "pending": 0, "asked": 0}
    for line in (
        line_of(run, now),
        line_of(run | {"ended_at": now, "reason": "", "result": NASTY}, now),
        activity(session, now),
    ):
        assert line.isprintable(), line
