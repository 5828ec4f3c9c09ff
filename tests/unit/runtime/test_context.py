"""The context of a run: what of a session's log its model is shown, and as whose words."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import get_args
from uuid import UUID

import pytest

from chaz.entries import IN_CONTEXT, Author, Entry, EntryType
from chaz.outcomes import Turn
from chaz.runtime.context import GO_ON, conversation_of
from chaz.runtime.models import AssistantMessage, HistoryMessage, UserMessage
from chaz.runtime.tokens import estimate
from chaz.runtime.window import Window


def entry(
    content: str,
    type: EntryType = "message",
    sender: str = "ada",
    author: Author = "human",
    *,
    recipient: str | None = None,
) -> Entry:
    return Entry(
        id=UUID(int=1),
        session_id=UUID(int=2),
        position=1,
        seq=0,
        type=type,
        sender=sender,
        author=author,
        recipient=recipient,
        content=content,
        metadata={},
        run_id=None,
        created_at=datetime(2030, 1, 1, tzinfo=UTC),
    )


def mine(content: str) -> Entry:
    return entry(content, sender="reader", author="agent")


def user(text: str) -> UserMessage:
    return UserMessage(text=text)


def said(text: str) -> AssistantMessage:
    return AssistantMessage(turn=Turn(text=text))


ASKED = entry("and now?")


def history(*conversation: Entry, triggers: tuple[Entry, ...] = (ASKED,)) -> list[HistoryMessage]:
    return Window(conversation_of("reader", conversation, triggers), estimate, 100_000).show()


def before(*conversation: Entry) -> list[HistoryMessage]:
    """What stands before that which is asked."""
    *earlier, asked = history(*conversation)
    assert asked == user("ada: and now?")
    return earlier


def test_there_is_always_something_to_answer() -> None:
    assert history(triggers=()) == [GO_ON]
    assert history(entry("one"), mine("two"), triggers=()) == [user("ada: one"), said("two"), GO_ON]


@pytest.mark.parametrize("blank", ["", " ", "\n\t"])
def test_no_text_is_empty(blank: str) -> None:
    assert before(entry("one"), entry(blank), mine(blank)) == [user("ada: one"), user("ada: (empty)")]
    assert history(triggers=(entry(blank, "directive"),)) == [user("(empty)")]
    assert before(entry(blank, "summary")) == [user("Summary of the earlier conversation:\n(empty)")]


def test_a_conversation_keeps_its_order_and_ends_with_what_is_to_be_answered() -> None:
    found = history(entry("one"), mine("two"), entry("three", sender="bob"), triggers=(entry("four"), entry("five")))
    assert found == [user("ada: one"), said("two"), user("bob: three"), user("ada: four"), user("ada: five")]


@pytest.mark.parametrize(
    ("sender", "author"),
    [
        ("writer", "agent"),
        ("Reader", "agent"),
        ("reader", "human"),  # a person who shares the agent's name stays a person
        ("reader", "program"),
        ("reader", "system"),
    ],
)
def test_only_the_agents_own_messages_are_its_words(sender: str, author: Author) -> None:
    other = entry("two", sender=sender, author=author)
    assert before(entry("one"), other) == [user("ada: one"), user(f"{sender}: two")]


@pytest.mark.parametrize("sender", ["reader", "writer", "ada"])
@pytest.mark.parametrize("author", get_args(Author))
def test_a_directive_is_an_instruction_whoever_wrote_it(sender: str, author: Author) -> None:
    directive = entry("read it", "directive", sender, author)
    assert before(directive) == [user("read it")]
    assert history(triggers=(directive,)) == [user("read it")]


def test_the_newest_summary_comes_first_as_somebody_elses_words() -> None:
    summary = entry("one was said", "summary", "reader", "agent")
    told = user("Summary of the earlier conversation:\none was said")
    assert before(summary, mine("two")) == [told, said("two")]
    assert before(entry("nothing", "summary"), mine("two"), summary) == [told, said("two")]


@pytest.mark.parametrize("type", sorted({*get_args(EntryType)} - IN_CONTEXT))
def test_what_is_not_listed_is_not_shown(type: EntryType) -> None:
    assert before(entry("one"), entry("hidden", type), entry("hidden", type, "reader", "agent")) == [user("ada: one")]


def test_it_never_starts_with_the_agents_own_words() -> None:
    assert before(mine("zero"), mine("one"), entry("two"), mine("three")) == [user("ada: two"), said("three")]
    assert history(mine("zero"), triggers=(entry("one"),)) == [user("ada: one")]
    assert before(entry("x", "ack", "reader", "agent"), mine("zero"), entry("one")) == [user("ada: one")]


def test_the_recipient_is_not_told() -> None:
    assert before(entry("one", recipient="writer")) == [user("ada: one")]
